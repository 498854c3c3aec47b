"""Steps at which something is due, counted by hand."""

from typing import Any

import pytest

from ndtrain.recipe.schema import Recipe
from ndtrain.train.optim import learning_rate_factor
from ndtrain.train.timetable import Timetable, build_timetable


def timetable(epoch: int, **keys: Any) -> Timetable:
    base = {"base_model": "m", "learning_rate": 1.0, "datasets": [{"path": "a"}]}
    recipe = Recipe.model_validate({**base, "val_set_size": 1, **keys})
    return build_timetable(recipe, epoch, has_eval_rows=True)


@pytest.mark.parametrize(
    ("epochs", "steps", "total"),
    [(1.1, 50, 55), (2.2, 100, 220), (0.07, 100, 7), (0.5, 7, 4), (3, 7, 21), (1e-6, 7, 1)],
)
def test_part_epochs_end_where_their_digits_say(epochs: float, steps: int, total: int) -> None:
    assert timetable(steps, num_epochs=epochs).total_steps == total


def test_a_share_of_warm_up_is_rounded_up_from_its_digits() -> None:
    keys = {"learning_rate": 1.0, "warmup_ratio": 0.07, "lr_scheduler": "constant"}
    recipe = Recipe.model_validate({"base_model": "m", "datasets": [{"path": "a"}], **keys})
    factors = [learning_rate_factor(recipe, step, 100) for step in range(8)]
    assert factors == [(step + 1) / 7 for step in range(7)] + [1.0]


@pytest.mark.parametrize(
    ("times", "epoch", "due"),
    [
        (4, 7, [2, 4, 6, 7, 9, 11, 13, 14]),
        (2, 5, [3, 5, 8, 10]),
        (1, 3, [3, 6]),
        (5, 3, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_so_many_an_epoch_are_so_many(times: int, epoch: int, due: list[int]) -> None:
    both = timetable(epoch, num_epochs=2, saves_per_epoch=times, evals_per_epoch=times)
    steps = range(1, 2 * epoch + 1)
    assert [step for step in steps if both.save_is_due(step)] == due
    assert [step for step in steps if both.eval_is_due(step)] == due


def test_shares_and_counts_of_steps() -> None:
    table = timetable(10, num_epochs=2, save_steps=0.25, eval_steps=3)
    assert [step for step in range(1, 21) if table.save_is_due(step)] == [5, 10, 15, 20]
    assert [step for step in range(1, 21) if table.eval_is_due(step)] == [3, 6, 9, 12, 15, 18, 20]
