"""The recipe's word lists say exactly what the layers that do the work offer."""

from ndtrain.data.formats.catalog import FORMATS
from ndtrain.data.sources import READERS
from ndtrain.data.templates.catalog import TEMPLATES
from ndtrain.recipe.words import (
    CHAT_TEMPLATES,
    DATASET_TYPES,
    FILE_KINDS,
    OPTIMIZERS,
    SCHEDULES,
    TRACKERS,
)
from ndtrain.report.trackers import TRACKERS as TRACKER_ARGUMENTS
from ndtrain.train.optim import OPTIMIZERS as OPTIMIZER_FACTORIES
from ndtrain.train.optim import SCHEDULES as SCHEDULE_FUNCTIONS


def test_optimizers() -> None:
    assert set(OPTIMIZERS) == set(OPTIMIZER_FACTORIES)


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
