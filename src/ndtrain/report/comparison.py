"""Two runs side by side: their settings, and how far their losses are apart, step by step."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ndtrain.plan.plan import AXES, ParallelPlan
from ndtrain.plan.report import count_of
from ndtrain.recipe.schema import DatasetSpec
from ndtrain.report.chart import CHART_STYLE, Series, draw_chart
from ndtrain.report.recorded import RecordedRun
from ndtrain.report.wording import number, sparkline, value_change


@dataclass(frozen=True)
class LossDistance:
    """One loss of two runs.

    Attributes:
        last: of each run.
        shared: number of steps that both have.
        step: of those, where they are furthest apart; None without any.
        there: both losses at that step.
        first: the first of those where they are apart at all; None where none is.
        at_first: both losses at that step.
        newest: the last step that both have; None without any.
    """

    last: tuple[float, float]
    shared: int
    step: int | None = None
    there: tuple[float, float] | None = None
    first: int | None = None
    at_first: tuple[float, float] | None = None
    newest: int | None = None

    @property
    def largest(self) -> float | None:
        """The largest relative distance, 0 where all shared steps are equal to the last bit."""
        return None if self.there is None else relative_distance(*self.there)

    def to_json(self) -> dict[str, Any]:
        """For scripts, with `a` and `b` for the runs."""
        return {
            "last": _by_run(self.last),
            "shared_steps": self.shared,
            "largest_relative_distance": self.largest,
            "at_step": self.step,
            "there": None if self.there is None else _by_run(self.there),
            "first_apart_at_step": self.first,
        }


def loss_distance(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]
) -> LossDistance | None:
    """The distance of two runs' records of one kind; None where a run has none."""
    if not first or not second:
        return None
    losses_a = {record["step"]: record["loss"] for record in first}
    losses_b = {record["step"]: record["loss"] for record in second}
    last = (first[-1]["loss"], second[-1]["loss"])
    apart = {
        step: relative_distance(losses_a[step], losses_b[step])
        for step in sorted(losses_a.keys() & losses_b.keys())
    }
    if not apart:
        return LossDistance(last, 0)
    worst = max(apart, key=lambda step: apart[step])
    first_apart = next((step for step, distance in apart.items() if distance), None)
    return LossDistance(
        last,
        len(apart),
        worst,
        (losses_a[worst], losses_b[worst]),
        first_apart,
        None if first_apart is None else (losses_a[first_apart], losses_b[first_apart]),
        max(apart),
    )


def comparison_json(first: RecordedRun, second: RecordedRun) -> dict[str, Any]:
    """What `compare --json` prints; a run that lacks a setting lacks it here."""
    loss = loss_distance(first.history.steps, second.history.steps)
    evals = loss_distance(first.history.evals, second.history.evals)
    return {
        "a": str(first.directory.path),
        "b": str(second.directory.path),
        "settings": {
            key: {run: value for run, value in _by_run(values).items() if value is not _ABSENT}
            for key, *values in setting_differences(first.settings, second.settings)
        },
        "changed": _by_run((first.history.changes(), second.history.changes())),
        "mesh": _by_run((_sizes(first.parallel), _sizes(second.parallel))),
        "loss": loss and loss.to_json(),
        "eval": evals and evals.to_json(),
    }


def _by_run(values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(("a", "b"), values, strict=True))


def _sizes(parallel: ParallelPlan | None) -> dict[str, int] | None:
    return None if parallel is None else dict(zip(AXES, parallel.sizes, strict=True))


def comparison_lines(first: RecordedRun, second: RecordedRun) -> Iterator[str]:
    """Settings, mesh and losses, side by side."""
    yield f"A       {first.directory.path}"
    yield f"B       {second.directory.path}"
    yield from _settings(first.settings, second.settings)
    yield from _changes("A", first)
    yield from _changes("B", second)
    if first.parallel != second.parallel:
        yield f"mesh    {first.parallel} → {second.parallel}"
    yield from _bars(first, second)
    yield from _loss_lines("loss", first.history.steps, second.history.steps, untrained=1)
    yield from _loss_lines("eval", first.history.evals, second.history.evals, untrained=0)


def _settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """What differs in the recipes; of a run that has left none, that it has not."""
    unknown = [label for label, settings in (("A", first), ("B", second)) if not settings]
    if unknown:
        yield f"recipe  {' and '.join(unknown)} left none"
        return
    differing = list(setting_differences(first, second))
    yield f"recipe  {_how_many(len(differing))}"
    for key, value_a, value_b in differing:
        yield f"        {key}: {_shown(value_a)} → {_shown(value_b)}"


def _changes(label: str, run: RecordedRun) -> Iterator[str]:
    """What a resumed run went on with instead of its first values."""
    for step, changed in run.history.changes().items():
        for key, values in changed.items():
            yield f"changed {label} after step {step}: {value_change(key, **values)}"


def _how_many(differing: int) -> str:
    if not differing:
        return "the same settings"
    return "1 setting differs" if differing == 1 else f"{differing} settings differ"


_ABSENT = object()
_ENTRY = re.compile(r"(.*?\[\d+\])\.")


def setting_differences(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Dotted key and both values of each setting that differs; one that is missing is `absent`."""
    flat_a, flat_b = dict(_flat(first)), dict(_flat(second))
    told: set[str] = set()
    for key in dict.fromkeys([*flat_a, *flat_b]):
        value_a, value_b = flat_a.get(key, _ABSENT), flat_b.get(key, _ABSENT)
        if value_a == value_b:
            continue
        entry = _ENTRY.match(key)
        if entry is not None and _ABSENT in (value_a, value_b):
            whole_a, whole_b = _entry_in(flat_a, entry[1]), _entry_in(flat_b, entry[1])
            if _ABSENT in (whole_a, whole_b):
                # an entry of a list that only one of them has is one difference
                if entry[1] not in told:
                    yield entry[1], whole_a, whole_b
                told.add(entry[1])
                continue
        yield key, value_a, value_b


def _entry_in(flat: Mapping[str, Any], entry: str) -> Any:
    """What is set in an entry of a list, defaults of a dataset left out; else `absent`."""
    head = f"{entry}."
    values = {key.removeprefix(head): value for key, value in flat.items() if key.startswith(head)}
    if not values:
        return _ABSENT
    defaults = (
        DatasetSpec.model_validate({"path": ""}).model_dump(mode="json")
        if "datasets[" in entry
        else {}
    )
    return {name: value for name, value in values.items() if value != defaults.get(name, _ABSENT)}


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, part in value.items():
            yield from _flat(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
        for place, part in enumerate(value):
            yield from _flat(part, f"{key}[{place}]")
    else:
        yield key, value


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else json.dumps(value, ensure_ascii=False, default=str)


def _bars(first: RecordedRun, second: RecordedRun) -> Iterator[str]:
    """Both training losses as bars."""
    for label, run in (("A", first), ("B", second)):
        bars = sparkline([loss for _, loss in run.history.curve("loss")])
        if bars:
            yield f"loss {label}  {bars}"


def _loss_lines(
    label: str, first: list[dict[str, Any]], second: list[dict[str, Any]], *, untrained: int
) -> Iterator[str]:
    """Where the steps that both have are first apart, and the largest relative distance.

    Args:
        label: of the loss.
        first: records of one run.
        second: records of the other.
        untrained: the last step whose loss is that of the model before any update.
    """
    found = loss_distance(first, second)
    if found is not None:
        last_a, last_b = told_apart(*found.last)
        yield f"{label}    last {last_a} → {last_b}; {_distance_words(found, untrained)}"


def _distance_words(found: LossDistance, untrained: int) -> str:
    if found.newest is None:
        return "no step in common"
    if found.first is None or found.at_first is None:
        if found.newest <= untrained:
            return f"only step {found.newest}, before any update, is in common; it is equal"
        return f"equal to the last bit over {count_of(found.shared, 'shared step')}"
    values = " and ".join(told_apart(*found.at_first))
    words = f"first apart at step {found.first} ({values}), "
    if found.shared == 1:
        return f"{words}{found.largest:.2e} relative, their only shared step"
    words += (
        f"at most {found.largest:.2e} relative apart over {count_of(found.shared, 'shared step')}"
    )
    return words if found.step == found.first else f"{words} (step {found.step})"


def told_apart(a: float, b: float) -> tuple[str, str]:
    """Two losses with as few digits, four at least, as show that they differ."""
    shown = number(a), number(b)
    if a == b or shown[0] != shown[1] or not math.isfinite(a):
        return shown
    return next(
        pair
        for digits in range(5, 18)
        if (pair := (f"{a:.{digits}g}", f"{b:.{digits}g}"))[0] != pair[1]
    )


def relative_distance(a: float, b: float) -> float:
    """How far two losses are apart relative to the larger; infinite when only one is a number."""
    if a == b or (a != a and b != b):
        return 0.0
    distance = abs(a - b) / max(abs(a), abs(b))
    return distance if distance == distance else float("inf")


def draw_both(first: RecordedRun, second: RecordedRun) -> str:
    """Both training losses in one picture."""
    name_a, name_b = first.name, second.name
    if name_a == name_b:
        name_a, name_b = f"A: {name_a}", f"B: {name_b}"
    return draw_chart(
        "Training loss",
        [
            Series(name_a, first.history.curve("loss"), "first", noisy=True),
            Series(name_b, second.history.curve("loss"), "second", noisy=True),
        ],
        style=CHART_STYLE,
    )
