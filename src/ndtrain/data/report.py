"""What preparation did: counts a user can check before anything is trained."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

UNKNOWN_ROLE = "with the unknown role"
"""How the warning of a role begins that neither the recipe nor the template knows."""


@dataclass(frozen=True)
class SourceReport:
    """Counts of one dataset.

    Attributes:
        rows_used: token rows that were made of it.
        rows_taken: rows that it gives to an epoch, or to its evaluation set: held-out rows are not
            among them, rows that weight or samples repeats are counted each time.
        dropped: rows left out, by reason.
        changed: rows kept but not whole, by what happened to them.
        warnings: rows that look wrong, by what looks wrong.
        examples: the first place of each reason.
    """

    path: str
    rows_in: int
    rows_used: int
    rows_taken: int
    tokens: int
    trained_tokens: int
    duplicates: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    changed: Mapping[str, int] = field(default_factory=dict)
    warnings: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DataReport:
    """Counts of all datasets and of the rows that will be trained.

    Attributes:
        train_rows: rows of an epoch before packing; mixing may repeat or leave out rows.
        lengths: [upper bound in tokens, rows] of each bin of the length histogram.
        packed_rows: rows of an epoch after packing; None without packing.
        fill: share of packed rows that is not padding; None without packing.
        cached: whether this preparation was found ready.
    """

    sources: tuple[SourceReport, ...]
    train_rows: int
    eval_rows: Mapping[str, int]
    tokens: int
    trained_tokens: int
    longest: int
    lengths: tuple[tuple[int, int], ...] = ()
    packed_rows: int | None = None
    fill: float | None = None
    cached: bool = False

    @property
    def trained_share(self) -> float:
        """Trained tokens over all tokens."""
        return self.trained_tokens / self.tokens if self.tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain types, for scripts."""
        return {**asdict(self), "trained_share": self.trained_share}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "DataReport":
        """The inverse of `to_json`."""
        fields = {key: value for key, value in data.items() if key != "trained_share"}
        fields["sources"] = tuple(SourceReport(**source) for source in data["sources"])
        fields["lengths"] = tuple((int(top), int(rows)) for top, rows in data["lengths"])
        return DataReport(**fields)


def rows_notes(report: DataReport) -> tuple[str, ...]:
    """What the start of a run says of its rows: one line of counts, then what looks wrong."""
    dropped = sum(sum(source.dropped.values()) for source in report.sources)
    left_out = f"; {dropped:,} rows left out" if dropped else ""
    packed = f" in {report.packed_rows:,} packed rows" if report.packed_rows is not None else ""
    counts = (
        f"{report.train_rows:,} training rows{packed}, {report.tokens:,} tokens, "
        f"{report.trained_share:.0%} of them trained{left_out}"
    )
    doubts = (
        f"{source.path}: {rows:,} rows {reason} (first: {source.examples[reason]})"
        if rows != 1
        else f"{source.path}: a row {reason} ({source.examples[reason]})"
        for source in report.sources
        for reason, rows in source.warnings.items()
        if reason.startswith(UNKNOWN_ROLE)
    )
    return (counts, *doubts)
