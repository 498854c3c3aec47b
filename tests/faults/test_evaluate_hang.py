"""A rank that stands still ends an evaluation too, with its name."""

import os
import signal
import time
from pathlib import Path

import pytest
from faulty import Command, start, write_recipe

from ndtrain.launch.rank_process import STACK_SIGNAL, stacks_path


def in_the_rows(command: Command, logs: Path, seconds: float = 120) -> int:
    """Wait until rank 1 works on held-out rows; its process id."""
    deadline = time.monotonic() + seconds
    stacks = stacks_path(logs, 1)
    while time.monotonic() < deadline:
        assert command.poll() is None, command.text()
        ranks = command.ranks()
        if len(ranks) == 4 and stacks.exists():
            os.kill(ranks[1], STACK_SIGNAL)
            time.sleep(0.1)
            if "in evaluation_loss" in stacks.read_text():
                stacks.write_text("")  # what the launcher reads there is what it asks for
                return ranks[1]
        time.sleep(0.05)
    raise AssertionError(command.text())


@pytest.mark.slow
def test_an_evaluation_names_the_rank_that_stands_still(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, rows=12_000)
    changes = ("--set", "val_set_size=11900", "--set", "ddp_timeout=10")
    command = start(tmp_path, "evaluate", str(recipe), *changes)
    stopped = in_the_rows(command, tmp_path / "run" / "evaluation" / "logs")
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    assert command.wait(60) == 3, command.text()
    # the ranks that do not wait for it have rows for far longer
    assert time.monotonic() - began < 10 + 15
    assert "A collective did not finish within 10 s" in command.text(), command.text()
    assert "rank 1 did not take part" in command.text()
