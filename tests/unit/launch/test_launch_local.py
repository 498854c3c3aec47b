"""Real processes: started, judged and ended by the launcher."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ndtrain.environment import LaunchedRank
from ndtrain.errors import (
    CheckpointError,
    DataError,
    ExitCode,
    MeshError,
    NdtrainError,
    OutOfMemoryError,
)
from ndtrain.launch import LaunchOptions, launch
from ndtrain.launch.status import read_status
from ndtrain.parallel.runtime import start, stop
from ndtrain.train.stopping import Stopper


def options(tmp_path: Path, world_size: int, **changes: object) -> LaunchOptions:
    values = {"world_size": world_size, "run_dir": tmp_path, "device": "cpu"} | changes
    return LaunchOptions(**values)  # type: ignore[arg-type]


def sum_of_ranks(job: Path, launched: LaunchedRank | None) -> int:
    runtime = start(launched, device="cpu", timeout_seconds=30)
    total = torch.tensor(float(runtime.rank + 1))
    dist.all_reduce(total)
    (job / f"sum-{runtime.rank}").write_text(str(total.item()))
    stop(runtime)
    return 0


def test_ranks_meet_and_reduce(tmp_path: Path) -> None:
    assert launch(tmp_path, sum_of_ranks, options(tmp_path, 3)) == 0
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(3)] == ["6.0"] * 3


def test_a_single_rank_runs_in_this_process_with_a_group_of_its_own(tmp_path: Path) -> None:
    assert launch(tmp_path, sum_of_ranks, options(tmp_path, 1)) == 0
    assert (tmp_path / "sum-0").read_text() == "1.0"


def fail_on_rank_1(job: Path, launched: LaunchedRank | None) -> int:
    runtime = start(launched, device="cpu", timeout_seconds=60)
    if runtime.rank == 1:
        raise DataError("row 7 is broken.", where="rows.jsonl:7", hint="Fix it.")
    dist.all_reduce(torch.ones(1))
    return 0


def test_first_real_error_comes_back_with_its_exit_code(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(DataError) as caught:
        launch(tmp_path, fail_on_rank_1, options(tmp_path, 3))
    assert str(caught.value) == "rows.jsonl:7: row 7 is broken. Fix it."
    assert caught.value.exit_code == ExitCode.DATA
    assert time.monotonic() - began < 15
    status = read_status(tmp_path / "status.json")
    assert status is not None
    assert (status.state, status.exit_code) == ("failed", 4)
    assert "rows.jsonl:7" in (tmp_path / "logs/rank-1.log").read_text()


def defect_on_rank_2(job: Path, launched: LaunchedRank | None) -> int:
    runtime = start(launched, device="cpu", timeout_seconds=60)
    if runtime.rank == 2:
        raise IndexError("list index out of range")
    dist.all_reduce(torch.ones(1))
    return 0


def test_a_defect_names_its_rank_and_log(tmp_path: Path) -> None:
    with pytest.raises(
        NdtrainError, match=r"IndexError: list index out of range \(rank 2"
    ) as caught:
        launch(tmp_path, defect_on_rank_2, options(tmp_path, 4))
    assert caught.value.exit_code == ExitCode.FAULT
    assert caught.value.where == str(tmp_path / "logs/rank-2.log")


def out_of_memory_on_rank_0(job: Path, launched: LaunchedRank | None) -> int:
    runtime = start(launched, device="cpu", timeout_seconds=60)
    if runtime.rank == 0:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    dist.all_reduce(torch.ones(1))
    return 0


def test_out_of_memory_has_its_own_exit_code(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemoryError, match="micro_batch_size"):
        launch(tmp_path, out_of_memory_on_rank_0, options(tmp_path, 2))


def full_disk_on_rank_1(job: Path, launched: LaunchedRank | None) -> int:
    runtime = start(launched, device="cpu", timeout_seconds=60)
    if runtime.rank == 1:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/metrics.jsonl")
    dist.all_reduce(torch.ones(1))
    return 0


@pytest.mark.skipif(
    os.geteuid() != 0, reason="a file system of its own can be mounted by root only"
)
def test_a_failure_reaches_the_launcher_when_no_file_can_be_written(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k,nr_inodes=8", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this container does not let its root mount a file system")
    try:
        (disk / "logs").mkdir()
        for rank in range(2):
            (disk / f"logs/rank-{rank}.log").touch()
            (disk / f"logs/rank-{rank}.stacks.txt").touch()
        (disk / "ballast").write_bytes(bytes(8192))
        with pytest.raises(CheckpointError) as caught:
            launch(disk, full_disk_on_rank_1, options(disk, 2))
        assert str(caught.value).startswith("run/metrics.jsonl: cannot be written: No space left")
        assert not (disk / "status.json").exists()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def killed_rank(job: Path, launched: LaunchedRank | None) -> int:
    runtime = start(launched, device="cpu", timeout_seconds=60)
    if runtime.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    return 0


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    with pytest.raises(NdtrainError, match=r"Rank 1 was killed by signal 9") as caught:
        launch(tmp_path, killed_rank, options(tmp_path, 2))
    assert caught.value.exit_code == ExitCode.FAULT


def hang_on_rank_1(job: Path, launched: LaunchedRank | None) -> int:
    runtime = start(launched, device="cpu", timeout_seconds=2)
    if runtime.rank == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(1))
    return 0


def test_a_hanging_collective_names_the_missing_rank(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match=r"did not finish within 2 s .*rank 1 did not take part"):
        launch(tmp_path, hang_on_rank_1, options(tmp_path, 3, timeout_seconds=2))
    # The stuck rank's stack shows where it was.
    assert "hang_on_rank_1" in (tmp_path / "logs/rank-1.stacks.txt").read_text()


def lost_once(job: Path, launched: LaunchedRank | None) -> int:
    runtime = start(launched, device="cpu", timeout_seconds=30)
    if runtime.rank == 1 and runtime.attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return sum_of_ranks_again(job, runtime.attempt)


def sum_of_ranks_again(job: Path, attempt: int) -> int:
    total = torch.ones(1)
    dist.all_reduce(total)
    (job / f"attempt-{attempt}").write_text(str(total.item()))
    return 0


def test_a_lost_rank_restarts_the_set(tmp_path: Path) -> None:
    assert launch(tmp_path, lost_once, options(tmp_path, 2, max_restarts=1)) == 0
    assert (tmp_path / "attempt-1").read_text() == "2.0"


def test_no_restart_after_an_error_that_would_come_again(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(DataError):
        launch(tmp_path, fail_on_rank_1, options(tmp_path, 2, max_restarts=3))
    assert time.monotonic() - began < 10


def train_until_stopped(job: Path, launched: LaunchedRank | None) -> int:
    stopper = Stopper()
    runtime = start(launched, device="cpu", timeout_seconds=30)
    (job / f"pid-{runtime.rank}").write_text(str(os.getpid()))
    while (reason := stopper.agreed()) is None:
        time.sleep(0.01)
    (job / f"stopped-{runtime.rank}").write_text(reason.name)
    stop(runtime)
    return reason.exit_code


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from test_launch_local import options, train_until_stopped
from ndtrain.launch import launch
folder = Path({folder!r})
sys.exit(launch(folder, train_until_stopped, options(folder, 3)))
"""


def start_program(tmp_path: Path) -> tuple["subprocess.Popen[bytes]", list[int]]:
    text = PROGRAM.format(here=str(Path(__file__).parent), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", text], start_new_session=True)
    return process, [wait_for_pid(tmp_path / f"pid-{rank}") for rank in range(3)]


def wait_for_pid(path: Path) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130)]
)
def test_a_signal_to_the_launcher_stops_all_ranks(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process, _ = start_program(tmp_path)
    process.send_signal(number)
    assert process.wait(30) == code
    reasons = {(tmp_path / f"stopped-{rank}").read_text() for rank in range(3)}
    assert reasons == {number.name}


def test_a_signal_to_one_rank_stops_all_ranks(tmp_path: Path) -> None:
    process, pids = start_program(tmp_path)
    os.kill(pids[2], signal.SIGTERM)
    assert process.wait(30) == 143
    assert all((tmp_path / f"stopped-{rank}").exists() for rank in range(3))


def test_ranks_end_when_the_launcher_is_killed(tmp_path: Path) -> None:
    process, pids = start_program(tmp_path)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in pids)
