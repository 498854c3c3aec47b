"""k steps and a resume are the same as one go, for every k, with dropout on."""

from pathlib import Path

import pytest
from faulty import WITH_DROPOUT, Trace, read_trace, starts, train, write_recipe

STEPS = 20
FEW = (1, 13)


@pytest.fixture(scope="module")
def in_one_go(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("one-go")
    command = train(write_recipe(folder, steps=STEPS, keys=WITH_DROPOUT))
    assert command.wait() == 0, command.text()
    return read_trace(folder / "run")


@pytest.mark.parametrize(
    "stop",
    [
        pytest.param(stop, marks=[] if stop in FEW else [pytest.mark.slow])
        for stop in range(1, STEPS)
    ],
)
def test_stopping_after_any_step_changes_nothing(
    tmp_path: Path, in_one_go: Trace, stop: int
) -> None:
    recipe, run = write_recipe(tmp_path, steps=STEPS, keys=WITH_DROPOUT), tmp_path / "run"
    first = train(recipe, "--max-steps", str(stop))
    assert first.wait() == 0, first.text()
    second = train(recipe)
    assert second.wait() == 0, second.text()
    assert list(starts(run)) == [0, stop]
    assert read_trace(run) == in_one_go


def test_dropout_is_on(tmp_path: Path, in_one_go: Trace) -> None:
    without = WITH_DROPOUT.replace("lora_dropout: 0.2", "lora_dropout: 0.0")
    command = train(write_recipe(tmp_path, steps=STEPS, keys=without))
    assert command.wait() == 0, command.text()
    assert read_trace(tmp_path / "run").losses[1] != in_one_go.losses[1]
