"""What is read from the environment, and what is ignored aloud."""

import os
from pathlib import Path

import pytest

from ndtrain import environment
from ndtrain.environment import LaunchedRank, first_host, read_launched_rank
from ndtrain.errors import MeshError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29501",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_ID": "1234567",
}


def test_torchrun() -> None:
    assert read_launched_rank(TORCHRUN) == LaunchedRank(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        run_id="job",
        launcher="torchrun",
        attempt=2,
        address="node-0",
        port=29501,
    )


def test_accelerate_is_told_apart() -> None:
    found = read_launched_rank(TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"})
    assert found is not None
    assert found.launcher == "accelerate"


def test_srun_derives_address_and_port_equally_on_every_rank() -> None:
    ranks = [
        read_launched_rank(SRUN | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank // 4)})
        for rank in range(6)
    ]
    assert all(rank is not None for rank in ranks)
    found = [rank for rank in ranks if rank is not None]
    assert {(rank.address, rank.port) for rank in found} == {("gpu03", 34567)}
    assert [rank.local_world_size for rank in found] == [4, 4, 4, 4, 2, 2]
    assert {rank.launcher for rank in found} == {"srun"}


@pytest.mark.parametrize("environ", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, {"RANK": "0"}])
def test_no_launcher(environ: dict[str, str]) -> None:
    assert read_launched_rank(environ) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "8"}, "RANK is '8', but WORLD_SIZE is '8'"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many', which is not a number"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is ''"),
    ],
)
def test_broken_variables_are_named(change: dict[str, str], words: str) -> None:
    with pytest.raises(MeshError) as caught:
        read_launched_rank(TORCHRUN | change)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[03-07,9],x1", "gpu03"),
        ("gpu[1,3]", "gpu1"),
        ("alone", "alone"),
        ("a,b", "a"),
        ("rack1-[10-12]-ib", "rack1-10-ib"),
        ("", ""),
    ],
)
def test_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_variables_of_other_tools_are_ignored_with_a_notice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in os.environ:
        if name.startswith(("ACCELERATE_", "FSDP_")):
            monkeypatch.delenv(name)
    assert environment.ignored_variables_notice() is None
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "1")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    notice = environment.ignored_variables_notice()
    assert notice is not None
    assert "ACCELERATE_USE_FSDP, FSDP_SHARDING_STRATEGY" in notice


def test_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environment.cache_dir() == tmp_path / "ndtrain"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert environment.cache_dir() == Path("/home/someone/.cache/ndtrain")


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("", False), ("1", True)])
def test_no_color(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if value is not None:
        monkeypatch.setenv("NO_COLOR", value)
    assert environment.no_color() is expected
