"""A recipe key that nothing reads would be ignored in silence, which we promise not to do."""

import re
from pathlib import Path

import pytest

from ndtrain.recipe.data_keys import DatasetSpec, InstructionMapping, PretrainingSpec
from ndtrain.recipe.model_keys import SpecialTokens
from ndtrain.recipe.schema import LrGroup, Recipe

SOURCE = Path(__file__).resolve().parents[2] / "src" / "ndtrain"
WORKING_LAYERS = ("data", "launch", "model", "parallel", "report", "train")


@pytest.mark.parametrize(
    "part",
    [Recipe, DatasetSpec, InstructionMapping, LrGroup, PretrainingSpec, SpecialTokens],
    ids=lambda part: part.__name__,
)
def test_every_key_is_read_by_a_layer_that_works_with_it(part) -> None:
    text = "\n".join(
        path.read_text("utf-8")
        for layer in WORKING_LAYERS
        for path in (SOURCE / layer).rglob("*.py")
    )
    text += (SOURCE / "plan" / "model_source.py").read_text("utf-8")
    words = set(re.findall(r"\w+", text))
    assert set(part.model_fields) - words == set()
