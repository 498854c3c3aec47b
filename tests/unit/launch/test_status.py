"""status.json: whole at every moment, cheap, and one identity a run."""

import json
from pathlib import Path

from ndtrain.launch.status import (
    RunStatus,
    StatusWriter,
    choose_run_id,
    note_failure,
    read_status,
)


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def read(path: Path) -> RunStatus:
    status = read_status(path)
    assert status is not None
    return status


def test_states_are_written_at_once_and_steps_at_intervals(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    clock = Clock()
    writer = StatusWriter(path, "run-1", now=clock, elapsed=clock)
    assert read(path).state == "starting"
    clock.seconds += 1
    writer.enter("training", step=1)
    writer.beat(2)
    assert read(path).step == 1
    clock.seconds += 0.2
    writer.beat(3)
    assert (read(path).step, read(path).heartbeat) == (3, 101.2)
    writer.enter("saving", "saving step 3")
    assert (read(path).state, read(path).stage) == ("saving", "saving step 3")
    writer.end("finished", 0)
    assert json.loads(path.read_text())["exit_code"] == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]


def test_a_clock_that_jumps_back_does_not_stop_the_heartbeat(tmp_path: Path) -> None:
    wall, steady = Clock(), Clock()
    writer = StatusWriter(tmp_path / "s", "r", now=wall, elapsed=steady)
    wall.seconds -= 86400
    steady.seconds += 1
    writer.beat(5)
    assert read(tmp_path / "s").step == 5


def test_run_id_is_kept_by_a_rerun_and_new_for_a_fresh_start(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    first = choose_run_id(path, fresh=False)
    StatusWriter(path, first)
    assert choose_run_id(path, fresh=False) == first
    assert choose_run_id(path, fresh=True) != first


def test_a_broken_file_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    path.write_text('{"state": "train')
    assert read_status(path) is None
    path.write_text('{"unknown": 1}')
    assert read_status(path) is None


def test_failure_noted_from_outside_keeps_step_and_run(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    StatusWriter(path, "run-1", step=17)
    note_failure(path, 1, "Rank 2 was killed")
    status = read(path)
    assert (status.state, status.step, status.run_id) == ("failed", 17, "run-1")
    assert (status.exit_code, status.error) == (1, "Rank 2 was killed")
