"""The formats by the name a recipe gives them.

To add one: write `read_<name>(row, spec) -> Sample` in a file beside this one and name it here.
"""

from collections.abc import Callable, Mapping

from ndtrain.data.formats.chat import read_chat
from ndtrain.data.formats.completion import read_completion
from ndtrain.data.formats.instruction import read_alpaca, read_mapped
from ndtrain.data.formats.segments import read_segments
from ndtrain.data.formats.tokenised import read_tokens
from ndtrain.data.rows import Row
from ndtrain.data.sample import Sample
from ndtrain.errors import RecipeError
from ndtrain.recipe.schema import DatasetSpec, InstructionMapping

Format = Callable[[Row, DatasetSpec], Sample]

FORMATS: Mapping[str, Format] = {
    "alpaca": read_alpaca,
    "chat_template": read_chat,
    "sharegpt": read_chat,
    "completion": read_completion,
    "input_output": read_segments,
    "_synthetic": read_tokens,
}


def find_format(spec: DatasetSpec) -> Format:
    """The reader of a dataset's rows.

    Raises:
        RecipeError: the recipe names a format that does not exist.
    """
    if spec.path == "synthetic" or spec.type is None or spec.type == "":
        return read_tokens
    if isinstance(spec.type, InstructionMapping):
        return read_mapped
    if spec.type not in FORMATS:
        known = ", ".join(name for name in FORMATS if not name.startswith("_"))
        raise RecipeError(
            f"dataset type '{spec.type}' is unknown.",
            where="type",
            hint=f"Use one of {known}, a mapping of instruction fields, or null for rows that "
            "are tokenised already.",
        )
    return FORMATS[spec.type]
