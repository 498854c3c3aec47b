"""Rows that say themselves which stretches of text are trained."""

from ndtrain.data.rows import Row
from ndtrain.data.sample import Passage, Segment
from ndtrain.recipe.schema import DatasetSpec


def read_segments(row: Row, spec: DatasetSpec) -> Passage:
    """Column `segments`: [{text, label}], joined as they are, with no token added."""
    segments = row.data.get("segments")
    if not isinstance(segments, list):
        raise row.fail(
            "column 'segments' must be a list of {text, label}.",
            "Each label says whether the text is trained.",
        )
    return Passage(tuple(_segment(row, item) for item in segments), bounded=False)


def _segment(row: Row, item: object) -> Segment:
    """One checked segment."""
    if (
        not isinstance(item, dict)
        or not isinstance(item.get("text"), str)
        or not isinstance(item.get("label"), bool)
    ):
        raise row.fail(f"segment {item!r} is not {{text: text, label: true or false}}.")
    return Segment(item["text"], trained=item["label"])
