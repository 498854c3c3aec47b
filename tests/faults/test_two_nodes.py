"""Two nodes as two network namespaces: replicate over the nodes, shard inside each of them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty import read_trace, train, when_file, write_recipe

PORT = 29477
SUBNET = "10.213.77"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[str, str]]:
    """Names of two namespaces that see each other and nothing else."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces can be made by root only")
    names = (f"ndt{os.getpid()}a", f"ndt{os.getpid()}b")
    ends = (f"nd{os.getpid() % 10000}a", f"nd{os.getpid() % 10000}b")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this container does not let its root make network namespaces")
    for number, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
        ip("link", "set", end, "netns", name)
        ip("-n", name, "addr", "add", f"{SUBNET}.{number}/24", "dev", end)
        ip("-n", name, "link", "set", end, "up")
        ip("-n", name, "link", "set", "lo", "up")
    yield names
    for name in names:
        ip("netns", "del", name)


def start_node(name: str, number: int, recipe: Path, *options: str) -> "subprocess.Popen[bytes]":
    log = (recipe.parent / f"node-{number}.txt").open("ab")
    command = [sys.executable, "-m", "ndtrain", "train", str(recipe), "--nnodes", "2"]
    command += ["--node-rank", str(number), "--rdzv-endpoint", f"{SUBNET}.1:{PORT}", *options]
    return subprocess.Popen(
        ["ip", "netns", "exec", name, *command],
        stdout=log,
        stderr=log,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def output_of(recipe: Path) -> str:
    return "".join(path.read_text() for path in sorted(recipe.parent.glob("node-*.txt")))


def losses(run: Path) -> dict[int, float]:
    return {step: float(text) for step, text in read_trace(run).losses.items()}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("one-process")
    command = train(write_recipe(folder, keys=""))
    assert command.wait() == 0, command.text()
    return losses(folder / "run")


@pytest.mark.slow
def test_two_nodes_equal_one_process(
    tmp_path: Path, nodes: tuple[str, str], one_process: dict[int, float]
) -> None:
    recipe = write_recipe(tmp_path)
    # Node 1 first: it must wait for the one that hosts the meeting place.
    processes = [start_node(nodes[number], number, recipe) for number in (1, 0)]
    codes = [process.wait(180) for process in processes]
    assert codes == [0, 0], output_of(recipe)
    assert losses(tmp_path / "run") == pytest.approx(one_process, rel=1e-6)
    mesh = json.loads((tmp_path / "run/plan.json").read_text())
    assert "dp_replicate" in str(mesh)


@pytest.mark.slow
def test_a_killed_node_comes_back(
    tmp_path: Path, nodes: tuple[str, str], one_process: dict[int, float]
) -> None:
    recipe = write_recipe(tmp_path)
    restarts = ("--max-restarts", "2")
    first, second = (start_node(nodes[number], number, recipe, *restarts) for number in (0, 1))
    when_file(tmp_path / "run/checkpoints/step-000003", first)
    os.killpg(second.pid, signal.SIGKILL)
    second.wait()
    time.sleep(1)
    again = start_node(nodes[1], 1, recipe, *restarts)
    assert again.wait(240) == 0, output_of(recipe)
    assert first.wait(60) == 0, output_of(recipe)
    assert "Restarting all ranks" in output_of(recipe)
    assert losses(tmp_path / "run") == pytest.approx(one_process, rel=1e-6)
