"""`report_to`: hands losses to tensorboard, wandb, mlflow or trackio, each an extra of its own.

To add a tracker that accelerate knows, add a line to `TRACKERS` and an extra of the same name.
"""

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ndtrain.errors import MeshError
from ndtrain.recipe.schema import Recipe
from ndtrain.report.events import EvalDone, Event, Notice, StepDone
from ndtrain.report.run_directory import RunDirectory


class Tracker(Protocol):
    """The part of accelerate's trackers that is used here."""

    def start(self) -> None:
        """Open the run at the service."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the settings of the run."""

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        """Keep values of one step."""

    def finish(self) -> None:
        """Close the run at the service."""


def _tensorboard_arguments(run_dir: RunDirectory, recipe: Recipe) -> dict[str, Any]:
    return {"run_name": "tensorboard", "logging_dir": str(run_dir.path)}


def _project_arguments(run_dir: RunDirectory, recipe: Recipe) -> dict[str, Any]:
    return {"run_name": recipe.wandb_project or "ndtrain", "name": run_dir.path.name}


def _wandb_arguments(run_dir: RunDirectory, recipe: Recipe) -> dict[str, Any]:
    return {**_project_arguments(run_dir, recipe), "dir": str(run_dir.path)}


def _mlflow_arguments(run_dir: RunDirectory, recipe: Recipe) -> dict[str, Any]:
    return {"experiment_name": "ndtrain", "run_name": run_dir.path.name}


TRACKERS: Mapping[str, Callable[[RunDirectory, Recipe], dict[str, Any]]] = {
    "tensorboard": _tensorboard_arguments,
    "wandb": _wandb_arguments,
    "mlflow": _mlflow_arguments,
    "trackio": _project_arguments,
}
"""Name of the tracker, of its package and of our extra, and what its constructor is given."""


def tracker_names(recipe: Recipe) -> tuple[str, ...]:
    """The trackers that `report_to` asks for; `none` and an empty list ask for none."""
    asked = (recipe.report_to,) if isinstance(recipe.report_to, str) else recipe.report_to
    return tuple(dict.fromkeys(name for name in asked if name and name != "none"))


def check_trackers(recipe: Recipe) -> None:
    """Refuse a tracker that would fail, before any work; imports none of them.

    Raises:
        MeshError: packages that are not installed.
    """
    names = tracker_names(recipe)
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        listed = ", ".join(f"'{name}'" for name in missing)
        what = "is not installed" if len(missing) == 1 else "are not installed"
        raise MeshError(
            f"{listed} {what}.",
            where="report_to",
            hint=f'Run: pip install "ndtrain[{",".join(missing)}]", or leave it out; '
            "metrics.jsonl is written in any case.",
        )


def start_trackers(
    run_dir: RunDirectory, recipe: Recipe, tell: Callable[[Event], None]
) -> list["TrackerReporter"]:
    """Open every tracker that the recipe asks for, on the main rank.

    Args:
        run_dir: names the run; local trackers write into it.
        recipe: its settings are kept beside the curves.
        tell: takes the notice that a tracker has failed.
    """
    check_trackers(recipe)
    names = tracker_names(recipe)
    if not names:
        return []
    from accelerate.state import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    # accelerate's own log lines ask this state for the rank; it joins the group that runs already.
    PartialState()
    settings = flat_settings(recipe)
    reporters = []
    for name in names:
        tracker = LOGGER_TYPE_TO_CLASS[name](**TRACKERS[name](run_dir, recipe))
        try:
            tracker.start()
            tracker.store_init_configuration(settings)
        except Exception as error:
            raise MeshError(
                f"'{name}' could not start: {error}",
                where="report_to",
                hint="Log in to it, or leave it out; metrics.jsonl is written in any case.",
            ) from error
        reporters.append(TrackerReporter(name, tracker, tell))
    return reporters


def flat_settings(recipe: Recipe) -> dict[str, str | int | float | bool]:
    """The settings that differ from their default, one level deep, as trackers keep them."""
    chosen = recipe.model_dump(by_alias=True, exclude_defaults=True)
    return {
        key: value if isinstance(value, str | int | float | bool) else str(value)
        for key, value in chosen.items()
    }


class TrackerReporter:
    """Passes steps and evaluations on; a tracker that fails is left alone, the run goes on.

    Args:
        name: of the tracker.
        tracker: opened already.
        tell: takes the notice of a failure.
    """

    def __init__(self, name: str, tracker: Tracker, tell: Callable[[Event], None]) -> None:
        self._name = name
        self._tracker = tracker
        self._tell = tell
        self._works = True

    def write(self, event: Event) -> None:
        """Send the numbers of the event."""
        values = tracked_values(event)
        if values and isinstance(event, StepDone | EvalDone):
            self._attempt(lambda: self._tracker.log(values, step=event.step))

    def close(self) -> None:
        """Close the run at the service."""
        self._attempt(self._tracker.finish)

    def _attempt(self, action: Callable[[], None]) -> None:
        if not self._works:
            return
        try:
            action()
        except Exception as error:
            # A service that is away for a minute must not end days of training.
            self._works = False
            self._tell(Notice(f"report_to: '{self._name}' failed and gets no more: {error}"))


_STEP_KEYS = (
    "loss",
    "grad_norm",
    "lr",
    "epoch",
    "seen_tokens",
    "tokens_per_second",
    "tflops_per_device",
    "mfu",
    "memory_gib",
)


def tracked_values(event: Event) -> dict[str, float]:
    """The finite numbers of a step under `train/`, of an evaluation under `eval/`."""
    values: Sequence[tuple[str, float | None]] = ()
    if isinstance(event, StepDone):
        values = [(f"train/{key}", getattr(event, key)) for key in _STEP_KEYS]
    elif isinstance(event, EvalDone):
        values = [("eval/loss", event.loss)]
        values += [(f"eval/{name}/loss", loss) for name, loss in event.by_dataset.items()]
    return {key: value for key, value in values if value is not None and math.isfinite(value)}
