"""Inside foreign launchers: real torchrun and accelerate processes, srun by a stand-in."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ndtrain.environment import LaunchedRank
from ndtrain.errors import MeshError
from ndtrain.launch import check_world_size

PROGRAM = """
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ndtrain.environment import LaunchedRank
from ndtrain.errors import NdtrainError
from ndtrain.launch import LaunchOptions, launch
from ndtrain.parallel.runtime import start, stop
from ndtrain.train.stopping import Stopper


def work(folder: Path, launched: LaunchedRank | None) -> int:
    stopper = Stopper()
    runtime = start(launched, device="cpu", timeout_seconds=60)
    total = torch.tensor(1.0)
    dist.all_reduce(total)
    (folder / f"rank-{runtime.rank}-{runtime.attempt}").write_text(f"{os.getpid()} {total.item()}")
    mode = sys.argv[3]
    if mode == "lose" and runtime.attempt == 0 and runtime.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "wait" or (mode == "lose" and runtime.attempt == 0):
        while (reason := stopper.agreed()) is None:
            time.sleep(0.02)
        (folder / f"stopped-{runtime.rank}").write_text(reason.name)
        stop(runtime)
        return reason.exit_code
    stop(runtime)
    return 0


folder = Path(sys.argv[1])
try:
    sys.exit(launch(folder, work, LaunchOptions(world_size=int(sys.argv[2]), run_dir=folder)))
except NdtrainError as error:
    print(error, file=sys.stderr)
    sys.exit(int(error.exit_code))
"""

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ACCELERATE = [
    sys.executable,
    "-m",
    "accelerate.commands.launch",
    "--cpu",
    "--num_processes=2",
    "--num_machines=1",
    "--mixed_precision=no",
    "--dynamo_backend=no",
]


def begin(
    folder: Path, launcher: list[str], planned: int, mode: str, **environ: str
) -> "subprocess.Popen[str]":
    program = folder / "program.py"
    program.write_text(PROGRAM)
    return subprocess.Popen(
        [*launcher, str(program), str(folder), str(planned), mode],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environ,
        start_new_session=True,
    )


def results(folder: Path, attempt: int = 0) -> list[str]:
    found = sorted(folder.glob(f"rank-?-{attempt}"))
    return [path.read_text().split()[1] for path in found]


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(TORCHRUN, id="torchrun"),
        pytest.param(ACCELERATE, id="accelerate", marks=pytest.mark.slow),
    ],
)
def test_ranks_are_taken_over_not_started_twice(tmp_path: Path, launcher: list[str]) -> None:
    process = begin(tmp_path, launcher, 2, "run")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert results(tmp_path) == ["2.0", "2.0"]


def test_a_launcher_must_have_started_as_many_ranks_as_the_mesh_has() -> None:
    launched = LaunchedRank(0, 2, 0, 2, run_id="a", launcher="torchrun")
    check_world_size(launched, 2)
    with pytest.raises(MeshError, match="mesh has 4 ranks, but torchrun started 2") as caught:
        check_world_size(launched, 4)
    assert "Start 4 ranks, change the axis sizes" in str(caught.value.hint)


@pytest.mark.slow
def test_another_number_of_ranks_is_refused_with_every_way_out(tmp_path: Path) -> None:
    process = begin(tmp_path, TORCHRUN, 4, "run")
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "The recipe's mesh has 4 ranks, but torchrun started 2." in errors
    assert "Start 4 ranks, change the axis sizes" in errors
    assert results(tmp_path) == []


def wait_for(paths: list[Path]) -> None:
    deadline = time.monotonic() + 100
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"none of {paths} appeared"
        time.sleep(0.05)


@pytest.mark.slow
def test_torchruns_own_signalling_stops_all_ranks_together(tmp_path: Path) -> None:
    process = begin(tmp_path, TORCHRUN, 2, "wait")
    wait_for([tmp_path / "rank-0-0", tmp_path / "rank-1-0"])
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode != 0
    reasons = [(tmp_path / f"stopped-{rank}").read_text() for rank in (0, 1)]
    assert reasons == ["SIGTERM", "SIGTERM"]


@pytest.mark.slow
def test_torchruns_restart_joins_a_new_attempt(tmp_path: Path) -> None:
    launcher = [*TORCHRUN[:3], "--max-restarts=1", *TORCHRUN[3:]]
    process = begin(tmp_path, launcher, 2, "lose")
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    assert results(tmp_path, attempt=1) == ["2.0", "2.0"]


def test_srun_ranks_meet_through_slurms_variables(tmp_path: Path) -> None:
    common = {
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_JOB_ID": str(os.getpid()),
    }
    ranks = [
        begin(
            tmp_path,
            [sys.executable],
            2,
            "run",
            **common,
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
        )
        for rank in (1, 0)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    assert results(tmp_path) == ["2.0", "2.0"]
