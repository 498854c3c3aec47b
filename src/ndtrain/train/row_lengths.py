"""How long the rows of a run are, for predicting it."""

from typing import TYPE_CHECKING

from ndtrain.plan.own_run import RowLengths
from ndtrain.recipe.schema import Recipe

if TYPE_CHECKING:
    from ndtrain.data.report import DataReport


def row_lengths(report: "DataReport", recipe: Recipe) -> RowLengths:
    """Lengths of padded rows, and of the documents in them where a row is more than one."""
    mean = report.tokens / max(1, report.train_rows)
    padded = recipe.pad_to_sequence_len
    if padded is None:
        padded = recipe.sample_packing
    longest = recipe.sequence_len if padded else max(1, report.longest)
    # Rows of like length come together, so a micro-batch is hardly wider than its rows.
    width = float(longest) if padded else max(1.0, mean)
    alone = not recipe.sample_packing and width == mean
    return RowLengths(longest, width, None if alone else _felt_length(report, mean))


def _felt_length(report: "DataReport", mean: float) -> float:
    """Length of the documents as attention feels it: its work grows with their square.

    A bin of the histogram spans a factor of two; its middle is scaled so that the sum is right.
    """
    bins = [(0.75 * top, rows) for top, rows in report.lengths]
    counted = sum(length * rows for length, rows in bins)
    if not counted:
        return mean
    scale = report.tokens / counted
    return scale * sum(length**2 * rows for length, rows in bins) / counted
