"""The recipe type: every key a user may write, frozen once loaded.

Keys are Axolotl's wherever Axolotl has the thing. To add a key, put a described field in the
group it belongs to; the JSON schema and the reference page are generated from here.
"""

from pydantic import ConfigDict

from ndtrain.recipe.data_keys import DataKeys, DatasetSpec, InstructionMapping, PretrainingSpec
from ndtrain.recipe.model_keys import AdapterKeys, ModelKeys, SpecialTokens
from ndtrain.recipe.training_keys import (
    EvalKeys,
    LrGroup,
    MemoryKeys,
    MeshKeys,
    OptimizerKeys,
    ReportKeys,
    SaveKeys,
)

__all__ = [
    "DatasetSpec",
    "InstructionMapping",
    "LrGroup",
    "PretrainingSpec",
    "Recipe",
    "SpecialTokens",
]


class Recipe(
    ModelKeys,
    AdapterKeys,
    DataKeys,
    MeshKeys,
    OptimizerKeys,
    MemoryKeys,
    SaveKeys,
    EvalKeys,
    ReportKeys,
):
    """A whole fine-tuning run."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        populate_by_name=True,
        title="ndtrain recipe",
    )
