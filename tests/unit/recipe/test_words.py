"""The recipe's word lists say exactly what the layers that do the work offer."""

import inspect

import pytest
import torch

from ndtrain.data.formats.catalog import FORMATS
from ndtrain.data.sources import READERS
from ndtrain.data.templates.catalog import TEMPLATES
from ndtrain.recipe.schema import Recipe
from ndtrain.recipe.words import (
    CHAT_TEMPLATES,
    DATASET_TYPES,
    FILE_KINDS,
    OPTIMIZER_ARGS,
    OPTIMIZERS,
    SCHEDULES,
    TRACKERS,
)
from ndtrain.report.trackers import TRACKERS as TRACKER_ARGUMENTS
from ndtrain.train.optim import OPTIMIZERS as OPTIMIZER_FACTORIES
from ndtrain.train.optim import SCHEDULES as SCHEDULE_FUNCTIONS


def test_optimizers() -> None:
    assert set(OPTIMIZERS) == set(OPTIMIZER_FACTORIES)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_arguments_of_optimizers(name: str) -> None:
    recipe = Recipe.model_validate(
        {"base_model": "m", "learning_rate": 1e-3, "datasets": [{"path": "a"}], "optimizer": name}
    )
    built = OPTIMIZER_FACTORIES[name]([{"params": [torch.zeros(2)]}], recipe)
    known = set(inspect.signature(type(built)).parameters)
    how_fast = {"foreach", "fused", "capturable", "differentiable"}
    own_keys = {"params", "lr", "weight_decay", "maximize"}
    own_keys |= {"betas", "eps"} if "betas" in known else set()
    assert set(OPTIMIZER_ARGS[name]) == known - how_fast - own_keys


def test_schedules() -> None:
    assert set(SCHEDULES) == set(SCHEDULE_FUNCTIONS)


def test_dataset_types() -> None:
    assert set(DATASET_TYPES) == {name for name in FORMATS if not name.startswith("_")}


def test_file_kinds() -> None:
    assert set(FILE_KINDS) == set(READERS)


def test_chat_templates() -> None:
    assert set(CHAT_TEMPLATES) == set(TEMPLATES)


def test_trackers() -> None:
    assert set(TRACKERS) == set(TRACKER_ARGUMENTS)
