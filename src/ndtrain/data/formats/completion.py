"""Plain text: every token is trained, and long texts become several rows."""

from ndtrain.data.rows import Row
from ndtrain.data.sample import Passage, Segment
from ndtrain.recipe.schema import DatasetSpec


def read_completion(row: Row, spec: DatasetSpec) -> Passage:
    """The text of the column that `field` names."""
    text = row.text(spec.field, key="field")
    return Passage((Segment(text, trained=True),), splits=True)
