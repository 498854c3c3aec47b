"""`ndtrain train --sweep FILE`: one run for each set of values, and a table of them at the end.

The file maps recipe keys to lists; every combination is run. Values that belong together stand
under `_` as a list of mappings, which counts as one more list.
"""

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ndtrain.environment import launched_rank
from ndtrain.errors import CheckpointError, ExitCode, MeshError, NdtrainError, Problems, RecipeError
from ndtrain.plan.decide import decide
from ndtrain.plan.machines import machines_here
from ndtrain.plan.model_facts import find_facts
from ndtrain.plan.validate import ranks_to_start
from ndtrain.recipe.document import parse_document, read_text
from ndtrain.recipe.load import load_recipe
from ndtrain.recipe.problem import Places, parse_dotted
from ndtrain.recipe.schema import Recipe
from ndtrain.report.atomic import replace_text, write_failure
from ndtrain.report.recorded import read_run
from ndtrain.report.run_directory import RunDirectory
from ndtrain.report.wording import value_change

PAIRED = "_"
"""Key of the values that change together."""

Values = Mapping[str, Any]


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    name: str
    values: Values
    folder: Path
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class SweepResult:
    """How one run ended; losses are None where there are none.

    Attributes:
        loss: of the last step.
        eval_loss: lowest on held-out rows.
    """

    run: SweepRun
    exit_code: int
    steps: int = 0
    loss: float | None = None
    eval_loss: float | None = None


def run_sweep(
    recipe: Path,
    sweep_file: Path,
    overrides: Sequence[str],
    *,
    options: Sequence[str] = (),
    max_seconds: float | None = None,
    dry_run: bool = False,
    debug: bool = False,
) -> int:
    """Run the recipe once for each set of values; returns the first exit code that is not 0.

    Args:
        recipe: the recipe's file.
        sweep_file: the sets of values.
        overrides: `--set` values, for every run.
        options: words of the command line for every run, such as `--max-steps 5`.
        max_seconds: longest time of the whole sweep.
        dry_run: print the plan of every run and start none.
        debug: let errors keep their tracebacks.

    Raises:
        MeshError: started inside a launcher.
        Problems: what is wrong with any set of values, before the first run starts.
    """
    launched = launched_rank()
    if launched is not None:
        raise MeshError(
            f"a sweep starts its runs itself, but {launched.launcher} has started this one.",
            where="--sweep",
            hint="Run `ndtrain train RECIPE --sweep FILE` alone.",
        )
    # a sweep's folders stand where the recipe's own run would
    from ndtrain.train.command import run_folder

    base = run_folder(load_recipe(recipe, overrides))
    runs = plan_runs(read_sweep(sweep_file), base, overrides)
    check_runs(recipe, runs, continues="--restart" not in options)
    if dry_run:
        for run in runs:
            print(f"\n== {run.name}: {_shown(run.values)}", flush=True)
            _train(recipe, run, [*options, "--dry-run"], debug=debug)
        return ExitCode.OK
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_failure(base, error) from error
    results: list[SweepResult] = []
    began = time.monotonic()
    for number, run in enumerate(runs, 1):
        print(f"\n== {run.name} ({number} of {len(runs)}): {_shown(run.values)}", flush=True)
        limit: list[str] = []
        if max_seconds is not None:
            # a second at least: a run that finds itself done takes less
            left = max(1.0, max_seconds - (time.monotonic() - began))
            limit = ["--max-time", f"{left:.1f}s"]
        code = _train(recipe, run, [*options, *limit], debug=debug)
        results.append(read_result(run, code))
        _keep(base / "sweep.json", results)
        if code in (ExitCode.SIGINT, ExitCode.SIGTERM):
            print(f"Stopped; the same command continues with {run.name}.")
            break
        if code != ExitCode.OK:
            print(f"{run.name} ended with exit code {code}; the others go on.", flush=True)
    print()
    for line in result_lines(results):
        print(line)
    return next((result.exit_code for result in results if result.exit_code), ExitCode.OK)


def read_sweep(path: Path) -> list[Values]:
    """Every set of values that a sweep file asks for, in its own order.

    Raises:
        RecipeError: the file is not such a mapping of lists.
        Problems: it repeats keys.
    """
    document = parse_document(read_text(path, "sweep"), str(path), "sweep")
    places = Places(str(path), document.spots)

    def at(*key: str | int) -> str:
        return places.where(places.find(key))

    if document.problems:
        raise Problems([*places.report(document.problems)])
    choices: list[list[Values]] = []
    for key, values in document.data.items():
        if not isinstance(values, list) or not values:
            raise RecipeError(
                f"'{key}' needs a list of values, not '{values}'.",
                where=at(key),
                hint=f"Write {key}: [first, second].",
            )
        for number, one in enumerate(values if key == PAIRED else ()):
            if not isinstance(one, dict) or not one:
                raise RecipeError(
                    f"an entry under '{PAIRED}' is a mapping of recipe keys, not '{one}'.",
                    where=at(key, number),
                    hint="Write - {micro_batch_size: 1, learning_rate: 1e-5}",
                )
        choices.append(values if key == PAIRED else [{key: one} for one in values])
    if not choices:
        raise RecipeError(
            "there are no values to try.", where=str(path), hint="Write learning_rate: [1e-5, 2e-5]"
        )
    return [_merged(combination, path) for combination in itertools.product(*choices)]


def _merged(parts: Sequence[Values], path: Path) -> Values:
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if key in merged:
                raise RecipeError(
                    f"'{key}' is given as a list and under '{PAIRED}'.",
                    where=str(path),
                    hint="Keep one of them.",
                )
            if key == "output_dir":
                raise RecipeError(
                    "each run gets a folder of its own: 'output_dir' cannot be swept.",
                    where=str(path),
                    hint="Set output_dir in the recipe; the runs stand in it.",
                )
            merged[key] = value
    return merged


def plan_runs(sets: Sequence[Values], base: Path, overrides: Sequence[str]) -> list[SweepRun]:
    """A name, a folder and overrides for each set of values."""
    runs = []
    for number, values in enumerate(sets, 1):
        name = f"sweep-{number:03d}"
        own = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
        folder = base / name
        place = f"output_dir={json.dumps(str(folder), ensure_ascii=False)}"
        runs.append(SweepRun(name, values, folder, (*overrides, *own, place)))
    return runs


def check_runs(recipe: Path, runs: Sequence[SweepRun], *, continues: bool = True) -> None:
    """Load and plan every run.

    Args:
        recipe: the recipe's file.
        runs: the sweep's.
        continues: go on with what stands in the runs' folders.

    Raises:
        Problems: everything that is wrong, each with the run it is wrong for.
    """
    problems: list[NdtrainError] = []
    machines = machines_here()
    for run in runs:
        try:
            loaded = load_recipe(recipe, run.overrides)
            where = loaded.position("base_model")
            world_size = ranks_to_start(loaded.recipe, machines)
            decide(
                loaded.recipe,
                find_facts(loaded.recipe, where=where),
                world_size=world_size,
                where=loaded.position,
            )
            if continues:
                _check_values(run, loaded.recipe)
        except NdtrainError as error:
            problems.append(RecipeError(f"{run.name} ({_shown(run.values)}):\n  {error}"))
    if problems:
        raise Problems(problems)


def _check_values(run: SweepRun, recipe: Recipe) -> None:
    """Folders are named by number: another list of values must not be told an older one's losses.

    Raises:
        CheckpointError: the run's folder holds a run of other values.
    """
    if not RunDirectory(run.folder).resolved.exists():
        return
    settings = read_run(run.folder).settings
    values = recipe.model_dump(by_alias=True, mode="json")
    for key in run.values:
        name = str(parse_dotted(key)[0])
        if name in settings and settings[name] != values[name]:
            raise CheckpointError(
                f"holds a run of other values: {value_change(name, settings[name], values[name])}.",
                where=str(run.folder),
                hint="Give this sweep an output_dir of its own, or add --restart, "
                "which moves the older runs aside.",
            )


def _train(recipe: Path, run: SweepRun, options: Sequence[str], *, debug: bool) -> int:
    """One run in a process of its own; stop signals are passed on to it once."""
    command = [sys.executable, "-m", "ndtrain", *(["--debug"] if debug else []), "train"]
    command += [str(recipe), *options]
    command += [word for one in run.overrides for word in ("--set", one)]
    # a session of its own: a Ctrl-C in the terminal reaches it through this process alone
    process = subprocess.Popen(command, start_new_session=True)

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    earlier = {one: signal.signal(one, pass_on) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    # killed from outside
    return code if code >= 0 else ExitCode.FAULT


def read_result(run: SweepRun, exit_code: int) -> SweepResult:
    """What a run has written of its losses."""
    try:
        history = read_run(run.folder).history
    except CheckpointError:
        return SweepResult(run, exit_code)
    evals = [float(record["loss"]) for record in history.evals]
    if not history.steps:
        return SweepResult(run, exit_code, eval_loss=min(evals, default=None))
    last = history.steps[-1]
    return SweepResult(
        run, exit_code, int(last["step"]), float(last["loss"]), min(evals, default=None)
    )


def result_lines(results: Sequence[SweepResult]) -> Iterator[str]:
    """The table: values, steps, losses and exit code of each run, and the best one."""
    keys = list(dict.fromkeys(key for result in results for key in result.run.values))
    rows = [["run", *keys, "steps", "loss", "best eval", "exit"]]
    for result in results:
        values = [_text(result.run.values.get(key)) for key in keys]
        losses = [_loss(result.loss), _loss(result.eval_loss)]
        row = [result.run.name, *values, str(result.steps), *losses, str(int(result.exit_code))]
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    done = [result for result in results if result.exit_code == ExitCode.OK]
    ranked = [(one.eval_loss, one) for one in done if one.eval_loss is not None]
    if ranked:
        loss, best = min(ranked, key=lambda pair: pair[0])
        yield f"best by eval loss: {best.run.name}, {loss:.4f}, {best.run.folder}"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _shown(values: Values) -> str:
    return ", ".join(f"{key}={_text(value)}" for key, value in values.items())


def _keep(path: Path, results: Sequence[SweepResult]) -> None:
    """The same for scripts, after every run."""
    runs = [
        {
            "name": result.run.name,
            "values": dict(result.run.values),
            "exit_code": int(result.exit_code),
            "steps": result.steps,
            "loss": result.loss,
            "best_eval_loss": result.eval_loss,
        }
        for result in results
    ]
    replace_text(path, json.dumps({"v": 1, "runs": runs}, indent=2, ensure_ascii=False) + "\n")
