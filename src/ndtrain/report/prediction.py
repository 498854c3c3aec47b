"""What was predicted of a run beside what the run came to, once it has ended."""

import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ndtrain.errors import CheckpointError
from ndtrain.report.atomic import replace_text
from ndtrain.report.events import Event, Notice, RunEnded
from ndtrain.report.history import History

WARM_UP = 3
"""Steps that pay for compilation and caches; a shorter run leaves out its first step only."""


@dataclass(frozen=True)
class Verdict:
    """A prediction and the measurement, in GiB and in seconds; None where one is missing.

    Attributes:
        steps: how many steps the median of the seconds is taken over.
    """

    predicted_gib: float
    measured_gib: float
    predicted_seconds: float | None
    measured_seconds: float
    steps: int

    @property
    def memory_error(self) -> float:
        """Positive: predicted more than measured."""
        return self.predicted_gib / self.measured_gib - 1

    @property
    def time_error(self) -> float | None:
        """Positive: predicted slower than measured."""
        if self.predicted_seconds is None:
            return None
        return self.predicted_seconds / self.measured_seconds - 1

    def __str__(self) -> str:
        text = f"memory {compare_memory(self.predicted_gib, self.measured_gib)}"
        if self.predicted_seconds is None or self.time_error is None:
            return text
        return (
            f"{text}; step {self.predicted_seconds:.3g} s predicted, "
            f"{self.measured_seconds:.3g} measured ({_percent(self.time_error)})"
        )

    def to_json(self) -> dict[str, Any]:
        """What `plan.json` keeps beside `predicted`."""
        return {
            "measured": {
                "memory_gib": self.measured_gib,
                "step_seconds": self.measured_seconds,
                "steps": self.steps,
            },
            "prediction_error": {"memory": self.memory_error, "step": self.time_error},
        }


def compare_memory(predicted_gib: float, measured_gib: float) -> str:
    """`5.84 GiB predicted, 5.08 measured (+15.0 %)`: positive where too much was predicted."""
    error = predicted_gib / measured_gib - 1
    return f"{predicted_gib:.2f} GiB predicted, {measured_gib:.2f} measured ({_percent(error)})"


def judge_prediction(plan: Mapping[str, Any], history: History) -> Verdict | None:
    """The steps since the last start against the plan; None without a prediction or a step.

    Args:
        plan: `plan.json`.
        history: the run's events.
    """
    predicted = plan.get("predicted")
    begun = history.starts[-1]["start_step"] if history.starts else 0
    steps = [record for record in history.steps if record["step"] > begun]
    if not predicted or not steps:
        return None
    settled = steps[WARM_UP:] or steps[1:] or steps
    # what a profile holds while it is written counts from then on
    begins = min((record["first_step"] for record in history.profiles), default=math.inf)
    own = [record for record in steps if record["step"] < begins] or steps
    return Verdict(
        predicted_gib=predicted["memory_gib"],
        measured_gib=max(record["memory_gib"] for record in own),
        predicted_seconds=predicted["step_seconds"],
        measured_seconds=statistics.median(record["step_seconds"] for record in settled),
        steps=len(settled),
    )


def read_plan(path: Path) -> dict[str, Any]:
    """`plan.json`; empty where there is none that can be read."""
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return plan if isinstance(plan, dict) else {}


class PredictionAtEnd:
    """Writes the measurement into `plan.json` once the run has ended.

    Args:
        path: `plan.json`.
        history: gathered by the metrics writer, which hears of each event first.
        tell: takes the notice that the file could not be written.
    """

    def __init__(self, path: Path, history: History, tell: Callable[[Event], None]) -> None:
        self._path = path
        self._history = history
        self._tell = tell

    def write(self, event: Event) -> None:
        """Judge when this was the last event."""
        if not isinstance(event, RunEnded):
            return
        plan = read_plan(self._path)
        verdict = judge_prediction(plan, self._history)
        if verdict is None:
            return
        text = json.dumps({**plan, **verdict.to_json()}, indent=2, ensure_ascii=False)
        try:
            replace_text(self._path, text + "\n")
        except CheckpointError as error:
            # The model is trained and saved: a figure that is missing must not undo that.
            self._tell(Notice(f"plan.json keeps no measurement: {error}"))

    def close(self) -> None:
        """Nothing is held."""


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %".replace("-", "\N{MINUS SIGN}")
