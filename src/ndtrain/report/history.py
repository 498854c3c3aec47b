"""A run as its records tell it: what charts, summaries and pages are drawn from."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Point = tuple[float, float]
"""A step and a value."""


@dataclass
class History:
    """Records by kind, in order of their steps."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    profiles: list[dict[str, Any]] = field(default_factory=list)
    notices: list[dict[str, Any]] = field(default_factory=list)
    ends: list[dict[str, Any]] = field(default_factory=list)

    def add(self, record: Mapping[str, Any]) -> None:
        """Sort one record in; a kind that this version does not know is left out."""
        kind = self._by_event().get(record["event"])
        if kind is not None:
            kind.append(dict(record))

    def replace(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Forget everything and begin with these records."""
        for kind in self._by_event().values():
            kind.clear()
        for record in records:
            self.add(record)

    def _by_event(self) -> dict[str, list[dict[str, Any]]]:
        return {
            "step": self.steps,
            "eval": self.evals,
            "samples": self.samples,
            "start": self.starts,
            "checkpoint": self.checkpoints,
            "profile": self.profiles,
            "notice": self.notices,
            "end": self.ends,
        }

    def until(self, step: int) -> "History":
        """The same with no step and no evaluation after `step`."""
        return replace(
            self,
            steps=[record for record in self.steps if record["step"] <= step],
            evals=[record for record in self.evals if record["step"] <= step],
        )

    def changes(self) -> dict[int, Mapping[str, Mapping[str, Any]]]:
        """Values that a start went on with instead of others, by the step after which it did.

        Of several starts at one step, the last one counts.
        """
        latest = {start["start_step"]: start.get("changed", {}) for start in self.starts}
        return {step: changed for step, changed in latest.items() if changed}

    def curve(self, key: str) -> list[Point]:
        """Step and value of each training step that has the value."""
        return [
            (record["step"], record[key]) for record in self.steps if record.get(key) is not None
        ]

    def eval_curve(self) -> list[Point]:
        """Step and loss of each evaluation."""
        return [(record["step"], record["loss"]) for record in self.evals]


def gather(records: Iterable[Mapping[str, Any]]) -> History:
    """The history that these records tell."""
    history = History()
    history.replace(records)
    return history
