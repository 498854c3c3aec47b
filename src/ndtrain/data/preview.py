"""Rows and counts as a person reads them: what is trained stands out."""

from collections.abc import Iterator
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from ndtrain.data.batch import IGNORED
from ndtrain.data.report import DataReport, SourceReport
from ndtrain.data.tokens import Ids

TrainedText = tuple[str, bool]


def trained_stretches(
    ids: Ids, labels: Ids, tokenizer: PreTrainedTokenizerBase
) -> Iterator[TrainedText]:
    """The text of a row in stretches that are trained or not.

    The first token of a row is never trained: nothing comes before it.
    """
    trained = labels != IGNORED
    trained[:1] = False
    for is_trained, places in groupby(range(len(ids)), key=lambda place: bool(trained[place])):
        yield tokenizer.decode(ids[list(places)].tolist()), is_trained


def mark_plain(stretches: Iterator[TrainedText]) -> str:
    """One text with the trained stretches in double brackets."""
    return "".join(f"[[{text}]]" if trained else text for text, trained in stretches)


def describe_data(report: DataReport) -> Iterator[str]:
    """The counts of a preparation, a few lines a dataset."""
    for source in report.sources:
        yield from _describe_source(source)
    yield (
        f"training rows: {report.train_rows:,}, {report.tokens:,} tokens, "
        f"{report.trained_share:.1%} of them trained, longest row {report.longest:,}"
    )
    for name, rows in report.eval_rows.items():
        yield f"evaluation rows: {rows:,} ({name})"
    if report.packed_rows is not None and report.fill is not None:
        yield f"packed rows: {report.packed_rows:,}, {report.fill:.1%} full"
    most = max((rows for _, rows in report.lengths), default=1)
    for top, rows in report.lengths:
        yield f"  up to {top:>7,} tokens {rows:>9,} {'█' * max(1, round(24 * rows / most))}"


def _describe_source(source: SourceReport) -> Iterator[str]:
    """The counts of one dataset, and what was left out of it."""
    repeated = f", {source.duplicates:,} of them duplicates" if source.duplicates else ""
    taken = f", {source.rows_taken:,} taken" if source.rows_taken != source.rows_used else ""
    yield (
        f"{source.path}: {source.rows_in:,} rows read, {source.rows_used:,} token rows"
        f"{repeated}{taken}"
    )
    for verb, counts in (
        ("dropped", source.dropped),
        ("changed", source.changed),
        ("warning", source.warnings),
    ):
        for reason, number in counts.items():
            yield f"  {verb}: {number:,} {reason} (first: {source.examples[reason]})"
