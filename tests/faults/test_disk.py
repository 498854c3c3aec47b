"""Full disks, damaged checkpoints and other things that happen to files."""

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from faulty import (
    STEPS,
    Trace,
    checkpoint_state,
    read_trace,
    starts,
    train,
    when,
    write_recipe,
)

from ndtrain.errors import CheckpointError
from ndtrain.launch.status import RunStatus, read_status
from ndtrain.parallel import runtime as runtimes
from ndtrain.train import checkpoint_files
from ndtrain.train.checkpoint import Checkpointer
from ndtrain.train.state import Progress

needs_mount = pytest.mark.skipif(
    os.geteuid() != 0, reason="a file system of its own can be mounted by root only"
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("undisturbed")
    command = train(write_recipe(folder))
    assert command.wait() == 0, command.text()
    return read_trace(folder / "run")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this container does not let its root mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path, leave: int) -> Path:
    """Take all but `leave` bytes of the disk."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        while (free := shutil.disk_usage(disk).free) > leave:
            try:
                file.write(bytes(min(free - leave, 2**20)))
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    break  # the run took the last bytes first
                raise
    return ballast


def training_at(step: int) -> Callable[[RunStatus], bool]:
    return lambda status: status.state == "training" and status.step >= step


@needs_mount
@pytest.mark.parametrize(
    "leave", [*(pytest.param(left, marks=pytest.mark.slow) for left in (600_000, 20_000)), 0]
)
def test_a_disk_that_fills_up_costs_nothing_already_saved(
    tmp_path: Path, small_disk: Path, undisturbed: Trace, leave: int
) -> None:
    run = small_disk / "run"
    recipe = write_recipe(tmp_path, output=run)
    command = train(recipe)
    assert when(run, command, training_at(8)), command.text()
    with command.paused():
        ballast = fill(small_disk, leave)
    assert command.wait() == 5, command.text()
    whole, broken = checkpoint_state(run)
    assert broken == []
    assert max(whole) >= 3
    ballast.unlink()
    again = train(recipe)
    assert again.wait() == 0, again.text()
    assert max(starts(run)) in whole
    assert read_trace(run) == undisturbed


@needs_mount
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_disk_that_fills_up_in_the_middle_of_a_file(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    runtime = runtimes.start(None, device="cpu")
    try:
        model = torch.nn.Linear(1000, 500)
        keeper = Checkpointer(small_disk, runtime=runtime, run_id="run", asynchronous=asynchronous)
        keeper.save(1, model, None, Progress(1))
        keeper.wait()
        # Space that was there at the check and is gone when the bytes come.
        monkeypatch.setattr(checkpoint_files, "check_space", lambda folder, needed: None)
        ballast = fill(small_disk, 1_000_000)

        def save_and_wait() -> None:
            keeper.save(2, model, None, Progress(2))
            keeper.wait()

        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            save_and_wait()
        assert caught.value.exit_code == 5
        assert [path.name for path in keeper.folder.iterdir()] == ["step-000001"]
        ballast.unlink()
        keeper.save(3, model, None, Progress(3))
        keeper.wait()
        found = keeper.newest()
        assert found is not None
        assert found.step == 3
        keeper.close()
    finally:
        runtimes.stop(runtime)


@needs_mount
def test_a_disk_too_small_from_the_start_is_said_before_the_first_step(
    tmp_path: Path, small_disk: Path
) -> None:
    fill(small_disk, 700_000)
    recipe = write_recipe(tmp_path, output=small_disk / "run")
    command = train(recipe)
    assert command.wait() == 5
    assert "A checkpoint needs" in command.text()
    assert not any("step" in line for line in command.text().splitlines() if "loss" in line)


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES: list[tuple[str, Callable[[Path], None]]] = [
    ("__0_0.distcp", truncate),
    ("COMPLETE", Path.unlink),
    (".metadata", Path.unlink),
    ("__3_0.distcp", Path.unlink),
    ("meta.json", truncate),
]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param(*damage, marks=[] if position < 1 else [pytest.mark.slow])
        for position, damage in enumerate(DAMAGES)
    ],
)
def test_a_damaged_checkpoint_is_passed_over_aloud(
    tmp_path: Path, undisturbed: Trace, name: str, damage: Callable[[Path], None]
) -> None:
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    assert train(recipe, "--max-steps", "10").wait() == 0
    damaged = newest(run)
    assert damaged.name == "step-000010"
    damage(damaged / name)
    command = train(recipe)
    assert command.wait() == 0, command.text()
    assert f"{damaged}: " in command.text()
    assert name in command.text()
    assert list(starts(run)) == [0, 9]
    assert read_trace(run) == undisturbed


def test_a_named_checkpoint_that_is_damaged_is_refused(tmp_path: Path) -> None:
    recipe, run = write_recipe(tmp_path, steps=3), tmp_path / "run"
    assert train(recipe, "--max-steps", "2").wait() == 0
    checkpoint = newest(run)
    truncate(checkpoint / ".metadata")
    command = train(recipe, "--resume", str(checkpoint))
    assert command.wait() == 5
    assert "This checkpoint cannot be used: '.metadata' has" in command.text()


@pytest.mark.slow
def test_a_file_in_the_place_of_a_checkpoint_is_passed_over(tmp_path: Path) -> None:
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    assert train(recipe, "--max-steps", "4").wait() == 0
    (run / "checkpoints" / "step-999999").write_text("not a folder")
    command = train(recipe)
    assert command.wait() == 0, command.text()
    assert list(starts(run)) == [0, 4]


@pytest.mark.slow
def test_starting_over_because_all_are_damaged_is_said(tmp_path: Path) -> None:
    recipe, run = write_recipe(tmp_path, steps=4), tmp_path / "run"
    assert train(recipe, "--max-steps", "2").wait() == 0
    (newest(run) / "COMPLETE").unlink()
    command = train(recipe)
    assert command.wait() == 0, command.text()
    assert "step-000002: it has no COMPLETE marker" in command.text()
    assert max(starts(run)) == 0


def test_nothing_to_resume_from_is_said(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    command = train(recipe, "--resume", str(tmp_path / "elsewhere"))
    assert command.wait() == 5
    assert "There is no whole checkpoint" in command.text()


def test_an_output_dir_that_cannot_be_made_fails_before_data_and_model(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    recipe = write_recipe(tmp_path, output=tmp_path / "file" / "run")
    command = train(recipe)
    assert command.wait() == 5
    assert len(command.text().strip().splitlines()) == 1
    assert "cannot be written" in command.text()


@pytest.mark.slow
def test_counters_go_on_over_a_resume(tmp_path: Path) -> None:
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    assert train(recipe, "--max-steps", "5").wait() == 0
    assert train(recipe).wait() == 0
    tokens = read_trace(run).tokens
    assert sorted(tokens) == list(range(1, STEPS + 1))
    assert all(tokens[step] < tokens[step + 1] for step in range(1, STEPS))
    status = read_status(run / "status.json")
    assert status is not None
    assert (status.state, status.step) == ("finished", STEPS)
