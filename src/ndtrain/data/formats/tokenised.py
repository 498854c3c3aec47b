"""Rows that are tokenised already."""

from collections.abc import Sequence

from ndtrain.data.batch import IGNORED
from ndtrain.data.rows import Row
from ndtrain.data.sample import Tokens
from ndtrain.recipe.schema import DatasetSpec


def read_tokens(row: Row, spec: DatasetSpec) -> Tokens:
    """Columns input_ids, and optionally attention_mask and labels; masked ids are left out."""
    ids = _integers(row, "input_ids")
    if ids is None:
        raise row.fail(
            "column 'input_ids' is missing.",
            "Rows without `type:` must be tokenised already; else name their type.",
        )
    labels = _integers(row, "labels")
    if labels is None:
        labels = ids
    mask = _integers(row, "attention_mask")
    for name, column in (("labels", labels), ("attention_mask", mask)):
        if column is not None and len(column) != len(ids):
            raise row.fail(f"'{name}' has {len(column)} items, 'input_ids' has {len(ids)}.")
    for place, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if token < 0 or (label < 0 and label != IGNORED):
            raise row.fail(f"token {place} has id {token} and label {label}; both must be >= 0.")
    if mask is None:
        return Tokens(ids, labels)
    kept = [place for place, seen in enumerate(mask) if seen]
    return Tokens([ids[place] for place in kept], [labels[place] for place in kept])


def _integers(row: Row, column: str) -> Sequence[int] | None:
    """A column of whole numbers, None when it is not there."""
    values = row.data.get(column)
    if values is None:
        return None
    if not isinstance(values, (list, tuple)) or not all(type(value) is int for value in values):
        raise row.fail(f"column '{column}' must be a list of whole numbers.")
    return values
