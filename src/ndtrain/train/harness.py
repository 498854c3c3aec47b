"""`ndtrain evaluate --tasks`: benchmarks of lm-evaluation-harness on a checkpoint or base model.

The harness is an optional package. It gets the model that `ndtrain generate` would load, in one
process, so that every kind of run, adapter and base can be measured.
"""

import difflib
import importlib.util
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ndtrain.errors import DataError, MeshError, RecipeError
from ndtrain.report.atomic import replace_text, write_failure
from ndtrain.train.speaker import Speaker

_PACKAGE = "lm_eval"


@dataclass(frozen=True)
class TaskResult:
    """What one task, or one group of tasks, gave.

    Attributes:
        shots: worked examples before each question.
        samples: questions that were asked; None for a group.
        metrics: value by `metric` or `metric,filter`.
        errors: standard error of each, where the harness knows one.
    """

    version: str | None
    shots: int | None
    samples: int | None
    metrics: dict[str, float]
    errors: dict[str, float]


def require_harness() -> None:
    """Refuse before anything is loaded when the package is missing.

    Raises:
        MeshError: says how to install it.
    """
    if importlib.util.find_spec(_PACKAGE) is None:
        raise MeshError(
            "lm-evaluation-harness is not installed.",
            where="--tasks",
            hint='Run: pip install "ndtrain[lm-eval]".',
        )


def find_tasks(words: Sequence[str]) -> tuple[Any, list[str]]:
    """The harness's list of tasks, and the wanted ones in it.

    Args:
        words: names, patterns such as `arc_*`, or YAML files of own tasks; commas separate several.

    Raises:
        RecipeError: one of them is nothing of these.
    """
    from lm_eval.tasks import TaskManager

    wanted = [word for one in words for part in one.split(",") if (word := part.strip())]
    # its own list is hundreds of files
    manager = TaskManager(include_defaults=not all(Path(word).is_file() for word in wanted))
    found: list[str] = []
    for word in wanted:
        matches = [word] if Path(word).is_file() else list(manager.match_tasks([word]))
        if not matches:
            close = difflib.get_close_matches(word, manager.all_tasks, n=1)
            raise RecipeError(
                f"'{word}' is no task of lm-evaluation-harness and no file.",
                where="--tasks",
                hint=f"Did you mean '{close[0]}'?" if close else "`lm-eval ls tasks` lists them.",
            )
        found += matches
    return manager, found


def run_tasks(
    speaker: Speaker, manager: Any, tasks: Sequence[str], *, batch_size: int, limit: int | None
) -> dict[str, TaskResult]:
    """Results by task.

    Args:
        speaker: the model.
        manager: from `find_tasks`.
        tasks: from `find_tasks`.
        batch_size: rows at once.
        limit: questions of each task; None: all.

    Raises:
        DataError: the rows of a task cannot be had.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    with _quiet():
        model = HFLM(pretrained=speaker.model, tokenizer=speaker.tokenizer, batch_size=batch_size)
        try:
            told: Any = simple_evaluate(
                model=model, tasks=list(tasks), limit=limit, task_manager=manager, log_samples=False
            )
        except OSError as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise DataError(
                f"the rows of {', '.join(tasks)} cannot be loaded: {reason}",
                where="--tasks",
                hint="Check the connection to the hub; downloaded once, they are kept.",
            ) from error
    return read_results(told)


def read_results(told: Mapping[str, Any]) -> dict[str, TaskResult]:
    """Results by task, from what the harness returns."""
    results = {}
    for name, values in {**told["results"], **told.get("groups", {})}.items():
        numbers = {
            key.removesuffix(",none"): float(value)
            for key, value in values.items()
            if isinstance(value, (int, float)) and "," in key
        }
        samples = told.get("n-samples", {}).get(name, {}).get("effective")
        version, shots = told.get("versions", {}).get(name), told.get("n-shot", {}).get(name)
        results[name] = TaskResult(
            version=None if version is None else str(version),
            shots=shots,
            samples=samples,
            metrics={key: one for key, one in numbers.items() if "_stderr" not in key},
            errors={
                key.replace("_stderr", ""): one for key, one in numbers.items() if "_stderr" in key
            },
        )
    return results


def task_lines(results: Mapping[str, TaskResult]) -> Iterator[str]:
    """A small table: a line for each metric."""
    width = max(map(len, ["task", *results]))
    yield f"{'task':<{width}}  {'metric':<20}  {'value':>8}  {'±':>7}  {'questions':>9}"
    for name, one in results.items():
        for metric, value in one.metrics.items():
            error = f"{one.errors[metric]:>7.4f}" if metric in one.errors else f"{'':>7}"
            asked = "" if one.samples is None else f"{one.samples:,}"
            yield f"{name:<{width}}  {metric:<20}  {value:>8.4f}  {error}  {asked:>9}"


def keep_results(
    folder: Path, results: Mapping[str, TaskResult], *, subject: str, step: int, limit: int | None
) -> None:
    """Leave the numbers in full precision for scripts, as `tasks.json` in `folder`.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    import lm_eval

    content = {
        "v": 1,
        "harness": str(lm_eval.__version__),
        "model": subject,
        "step": step,
        "limit": limit,
        "tasks": {name: asdict(one) for name, one in results.items()},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_failure(folder, error) from error
    replace_text(folder / "tasks.json", json.dumps(content, indent=2) + "\n")


@contextmanager
def _quiet() -> Iterator[None]:
    """The harness warns of a model that was loaded before; that is what happens here."""
    logger = logging.getLogger(_PACKAGE)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
