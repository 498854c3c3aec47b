"""Two launchers that meet, as two nodes would, over the loopback interface."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ndtrain.environment import LaunchedRank
from ndtrain.errors import DataError, MeshError
from ndtrain.launch import LaunchOptions, launch
from ndtrain.launch.network import interface_towards
from ndtrain.launch.rendezvous import split_endpoint
from ndtrain.parallel.runtime import start, stop

PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
import test_launch_nodes as nodes
from ndtrain.errors import NdtrainError
from ndtrain.launch import LaunchOptions, launch
options = LaunchOptions(
    world_size=4, run_dir=Path({folder!r}) / "node-{node}", device="cpu", num_nodes=2,
    node_rank={node}, endpoint="127.0.0.1:{port}", timeout_seconds=60, max_restarts={restarts},
)
try:
    sys.exit(launch(Path({folder!r}), nodes.{work}, options))
except NdtrainError as error:
    print(error, file=sys.stderr)
    sys.exit(int(error.exit_code))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_node(
    folder: Path, node: int, port: int, work: str, restarts: int = 0
) -> "subprocess.Popen[str]":
    text = PROGRAM.format(
        here=str(Path(__file__).parent),
        folder=str(folder),
        node=node,
        port=port,
        work=work,
        restarts=restarts,
    )
    return subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.PIPE, text=True)


def note_place(job: Path, launched: LaunchedRank | None) -> int:
    runtime = start(launched, device="cpu", timeout_seconds=60)
    total = torch.tensor(float(runtime.rank))
    dist.all_reduce(total)
    (job / f"rank-{runtime.rank}").write_text(f"{runtime.local_rank} {total.item()}")
    stop(runtime)
    return 0


def test_ranks_of_two_nodes_meet(tmp_path: Path) -> None:
    port = free_port()
    nodes = [start_node(tmp_path, node, port, "note_place") for node in (1, 0)]
    assert [node.wait(90) for node in nodes] == [0, 0]
    places = [(tmp_path / f"rank-{rank}").read_text() for rank in range(4)]
    assert places == ["0 6.0", "1 6.0", "0 6.0", "1 6.0"]


def fail_on_node_1(job: Path, launched: LaunchedRank | None) -> int:
    runtime = start(launched, device="cpu", timeout_seconds=60)
    if runtime.rank == 3:
        raise DataError("row 7 is broken.", where="rows.jsonl:7")
    dist.all_reduce(torch.ones(1))
    return 0


@pytest.mark.slow
def test_a_failure_on_one_node_ends_both_with_its_code_and_message(tmp_path: Path) -> None:
    port = free_port()
    nodes = [start_node(tmp_path, node, port, "fail_on_node_1") for node in (0, 1)]
    outputs = [node.communicate(timeout=90)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [4, 4], outputs
    assert "rows.jsonl:7: Node 1: row 7 is broken." in outputs[0]
    assert "rows.jsonl:7: row 7 is broken." in outputs[1]


def wait_for_second_attempt(job: Path, launched: LaunchedRank | None) -> int:
    runtime = start(launched, device="cpu", timeout_seconds=60)
    (job / f"up-{runtime.attempt}-{runtime.rank}").write_text(str(os.getpid()))
    while runtime.attempt == 0:
        # One node will be killed meanwhile; the other then fails here.
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)
    return note_place(job, launched) if not dist.is_initialized() else finish(job, runtime.rank)


def finish(job: Path, rank: int) -> int:
    dist.barrier()
    (job / f"done-{rank}").write_text("")
    return 0


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_node_started_again_is_let_in(tmp_path: Path) -> None:
    port = free_port()
    nodes = [start_node(tmp_path, node, port, "wait_for_second_attempt", 2) for node in (0, 1)]
    for rank in range(4):
        wait_for(tmp_path / f"up-0-{rank}")
    nodes[1].send_signal(signal.SIGKILL)
    nodes[1].wait()
    again = start_node(tmp_path, 1, port, "wait_for_second_attempt", 2)
    assert again.wait(90) == 0
    assert nodes[0].wait(90) == 0
    assert all((tmp_path / f"done-{rank}").exists() for rank in range(4))


def test_a_node_that_does_not_come_is_named(tmp_path: Path) -> None:
    options = LaunchOptions(
        world_size=2,
        run_dir=tmp_path,
        device="cpu",
        num_nodes=2,
        endpoint=f"127.0.0.1:{free_port()}",
        timeout_seconds=1,
    )
    with pytest.raises(MeshError, match="Node 1 did not come within 1 s"):
        launch(tmp_path, note_place, options)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node-0:29500", ("node-0", 29500)),
        ("node-0", ("node-0", 29400)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[fd00::1]:7", ("fd00::1", 7)),
    ],
)
def test_endpoints(text: str, expected: tuple[str, int]) -> None:
    assert split_endpoint(text) == expected


@pytest.mark.parametrize("text", ["", ":29500", "node:x", "node:0", "node:70000"])
def test_endpoints_that_are_none(text: str) -> None:
    with pytest.raises(MeshError, match="--rdzv-endpoint"):
        split_endpoint(text)


def test_interface_of_the_loopback_route() -> None:
    assert interface_towards("127.0.0.1") == "lo"


def test_a_host_without_address_is_refused() -> None:
    with pytest.raises(MeshError, match=r"There is no way to 'no-such-host\.invalid'"):
        interface_towards("no-such-host.invalid")


@pytest.mark.parametrize(
    "keys",
    [
        {"world_size": 3, "num_nodes": 2, "endpoint": "a:1"},
        {"world_size": 4, "num_nodes": 2, "node_rank": 2, "endpoint": "a:1"},
        {"world_size": 4, "num_nodes": 2},
    ],
)
def test_impossible_options_are_refused(tmp_path: Path, keys: dict[str, object]) -> None:
    with pytest.raises(MeshError):
        LaunchOptions(run_dir=tmp_path, **keys)  # type: ignore[arg-type]
