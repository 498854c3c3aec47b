"""`ndtrain evaluate`: what is evaluated and on which rows, decided before any rank exists."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ndtrain.environment import launched_rank
from ndtrain.errors import ExitCode, MeshError, RecipeError
from ndtrain.launch import LaunchOptions, launch
from ndtrain.plan.model_source import ModelSource, find_model
from ndtrain.plan.plan import Plan
from ndtrain.recipe.load import LoadedRecipe, load_recipe
from ndtrain.recipe.schema import Recipe
from ndtrain.report.run_directory import RunDirectory
from ndtrain.train.checkpoint_files import FoundCheckpoint, newest_checkpoint
from ndtrain.train.command import make_plan, run_folder

if TYPE_CHECKING:
    from ndtrain.train.evaluation import EvaluationJob

BASE = Path("base")
"""In the place of a checkpoint: the model before any training."""

FOLDER = "evaluation"
"""Part of the run directory that evaluations write to: never the run's own status and logs."""


def evaluate(
    recipe_path: Path,
    *,
    overrides: Sequence[str],
    checkpoint: Path | None,
    debug: bool,
    tasks: Sequence[str] = (),
    limit: int | None = None,
) -> int:
    """Print the loss of each held-out dataset, or the results of tasks; returns the exit code.

    Args:
        recipe_path: the recipe, or a run directory; its mesh is used.
        overrides: `--set` values.
        checkpoint: one folder or a run; `base`: the base model; None: the run's newest, else the
            base model.
        debug: let errors keep their tracebacks.
        tasks: of lm-evaluation-harness, in place of the held-out rows.
        limit: questions of each task; None: all.

    Raises:
        RecipeError: the recipe holds out no rows, or there is no such task.
        CheckpointError: the named checkpoint does not exist or does not fit.
    """
    loaded = _load(recipe_path, overrides)
    if tasks:
        return _measure_tasks(loaded, checkpoint, tasks, limit)
    launched = launched_rank()
    source = find_model(loaded.recipe, where=loaded.position("base_model"))
    plan = make_plan(loaded, source, launched, None, 1)
    run_dir = run_folder(loaded)
    # slow imports, once the recipe is known to be sound
    from ndtrain.train.evaluation import evaluate_rank

    found = _find(checkpoint, run_dir)
    job = _prepare(loaded, plan, source, found, run_dir / FOLDER)
    if launched is None or launched.rank == 0:
        print(_subject(loaded.recipe, found, run_dir, checkpoint))
    options = LaunchOptions(
        world_size=plan.parallel.world_size,
        run_dir=job.folder,
        device=loaded.recipe.device,
        timeout_seconds=loaded.recipe.ddp_timeout,
    )
    return launch(job, evaluate_rank, options)


def _load(path: Path, overrides: Sequence[str]) -> LoadedRecipe:
    """The recipe at `path`, or the one that the run at `path` was started with."""
    resolved = RunDirectory(path).resolved
    if not resolved.is_file():
        return load_recipe(path, overrides)
    # the folder may have been moved since, and a recipe need not name it
    return load_recipe(resolved, (f"output_dir={json.dumps(str(path))}", *overrides))


def _measure_tasks(
    loaded: LoadedRecipe, checkpoint: Path | None, tasks: Sequence[str], limit: int | None
) -> int:
    """Benchmarks run in one process, whatever mesh the recipe names."""
    launched = launched_rank()
    if launched is not None and launched.world_size > 1:
        raise MeshError(
            f"benchmarks run in one process, but {launched.launcher} started "
            f"{launched.world_size}.",
            where="--tasks",
            hint="Run ndtrain evaluate alone.",
        )
    from ndtrain.train import harness

    harness.require_harness()
    manager, names = harness.find_tasks(tasks)
    from ndtrain.train.speaker import find_base, find_speaker, load_speaker, own_place

    recipe, run_dir = loaded.recipe, run_folder(loaded)
    found = _find(checkpoint, run_dir)
    subject = _subject(recipe, found, run_dir, checkpoint)
    print(subject)
    speaker = load_speaker(
        find_speaker(str(found.path)) if found else find_base(recipe), own_place(recipe.device)
    )
    results = harness.run_tasks(
        speaker, manager, names, batch_size=recipe.micro_batch_size, limit=limit
    )
    for line in harness.task_lines(results):
        print(line)
    harness.keep_results(
        run_dir / FOLDER,
        results,
        subject=subject.splitlines()[-1],
        step=found.step if found else 0,
        limit=limit,
    )
    return ExitCode.OK


def _find(checkpoint: Path | None, run_dir: Path) -> FoundCheckpoint | None:
    """The checkpoint that is named, else the run's newest, if it has one."""
    from ndtrain.train.checkpoint_files import find_checkpoint

    if checkpoint == BASE:
        return None
    if checkpoint is not None:
        return find_checkpoint(checkpoint)
    return newest_checkpoint(run_dir / "checkpoints")


def _prepare(
    loaded: LoadedRecipe,
    plan: Plan,
    source: ModelSource,
    found: FoundCheckpoint | None,
    folder: Path,
) -> "EvaluationJob":
    from ndtrain.data.prepare import prepare
    from ndtrain.model.ready import ready_model
    from ndtrain.model.tokenizer import load_tokenizer, tokenizer_key
    from ndtrain.train.evaluation import EvaluationJob

    recipe = loaded.recipe
    ready = ready_model(source, trust_remote_code=recipe.trust_remote_code)
    tokenizer = load_tokenizer(ready, recipe)
    prepared = prepare(
        loaded, tokenizer, tokenizer_key(tokenizer), data_ranks=plan.parallel.data_ranks
    )
    if not any(map(len, prepared.evals.values())):
        raise RecipeError(
            "the recipe holds out no rows, so there is nothing to evaluate on.",
            where=str(loaded.path),
            hint="Set val_set_size: 0.05, or name test_datasets.",
        )
    return EvaluationJob(recipe, plan, ready, prepared.path, len(tokenizer), found, folder)


def _subject(
    recipe: Recipe, found: FoundCheckpoint | None, run_dir: Path, wanted: Path | None
) -> str:
    """What is evaluated, and what was passed over."""
    if found is not None:
        lines = [f"Passed over {reason}." for reason in found.skipped]
        return "\n".join([*lines, f"checkpoint {found.path} (step {found.step})"])
    name = recipe.base_model or "random weights"
    if wanted == BASE:
        return f"base model {name}"
    return f"base model {name} (no checkpoint in {run_dir / 'checkpoints'})"
