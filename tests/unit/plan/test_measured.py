"""Measured machines: kept, found again, and used as the hardware book would be."""

from dataclasses import replace

import pytest

from ndtrain.errors import CheckpointError
from ndtrain.plan import machines as machines_module
from ndtrain.plan import measured as measured_module
from ndtrain.plan.book import facts_from_book
from ndtrain.plan.hardware import build_cluster, calibration, find_gpu, find_link
from ndtrain.plan.machines import Machines, cluster_for, cluster_here
from ndtrain.plan.measured import (
    MeasuredMachine,
    machine_path,
    read_measured,
    with_measured,
    write_measured,
)
from ndtrain.plan.plan import BatchPlan, ParallelPlan
from ndtrain.plan.search import setting_on
from ndtrain.plan.step_time import predict_time
from ndtrain.recipe.schema import Recipe

H200 = find_gpu("h200")[0]
BOOK = calibration()
READING = MeasuredMachine(
    device="NVIDIA H200",
    count=8,
    torch="2.11.0",
    on_gpu=True,
    memory_gib=139.8,
    matmul_tf=989 * 0.804,
    memory_gbs=4800 * 0.85,
    exchanges={
        "all_gather": 450 * BOOK.link,
        "all_reduce": 450 * BOOK.link,
        "all_to_all": 450 * BOOK.all_to_all,
    },
    latency_us=12,
    date="2026-11-30",
)
RECIPE = Recipe(base_model="m", learning_rate=1e-4, sequence_len=8192)


@pytest.fixture(autouse=True)
def own_machine(tmp_path, monkeypatch):
    """Eight H200, torch 2.11.0 and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measured_module, "version", lambda name: "2.11.0")
    monkeypatch.setattr(measured_module, "gpu_models", lambda: ("NVIDIA H200",) * 8)
    monkeypatch.setattr(machines_module, "local_gpus", lambda: ("h200",) * 8)


def test_what_is_written_is_read_again():
    path = write_measured(READING)

    assert path == machine_path("NVIDIA H200", 8, "2.11.0")
    assert path.name == "NVIDIA-H200-x8-torch-2.11.0.json"
    assert read_measured(on_gpu=True, count=8) == READING


def test_other_devices_counts_and_versions_are_other_machines(monkeypatch):
    write_measured(READING)

    assert read_measured(on_gpu=True, count=4) is None
    assert read_measured(on_gpu=False, count=8) is None
    monkeypatch.setattr(measured_module, "version", lambda name: "2.13.0")
    assert read_measured(on_gpu=True, count=8) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"v": 1}', '{"v": 9, "device": "x"}'])
def test_a_file_that_cannot_be_read_is_no_measurement(text):
    write_measured(READING).write_text(text)

    assert read_measured(on_gpu=True, count=8) is None


def test_a_cache_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "ndtrain").write_text("in the way")

    with pytest.raises(CheckpointError, match="set XDG_CACHE_HOME to another folder"):
        write_measured(READING)


@pytest.mark.parametrize("sizes", [(1, 8, 1, 1), (2, 4, 1, 1), (1, 2, 4, 1), (1, 2, 1, 4)], ids=str)
def test_the_calibrated_machine_measured_again_gives_the_book_s_steps(sizes):
    facts = facts_from_book("meta-llama/Llama-3.1-8B")
    method = "ulysses" if sizes[2] > 1 else "none"
    mesh = ParallelPlan(*sizes, cp_method=method)
    book = build_cluster("h200", world_size=8)
    setting = setting_on(book, RECIPE, facts, mesh, BatchPlan(1, 1, mesh.data_ranks))
    expected = predict_time(facts, setting, book, BOOK)

    found = predict_time(facts, setting, with_measured(book, READING), BOOK)

    assert vars(found) == pytest.approx(vars(expected))


def test_slower_readings_make_slower_steps():
    facts = facts_from_book("meta-llama/Llama-3.1-8B")
    book = build_cluster("h200", world_size=8)
    mesh = ParallelPlan(dp_shard=8)
    setting = setting_on(book, RECIPE, facts, mesh, BatchPlan(1, 1, 8))
    half = replace(READING, matmul_tf=READING.matmul_tf / 2)

    found = predict_time(facts, setting, with_measured(book, half), BOOK)

    assert found.matmul == pytest.approx(2 * predict_time(facts, setting, book, BOOK).matmul)


def test_a_plan_for_this_machine_uses_its_measurement():
    here = Machines(found=("h200",) * 8)
    assert cluster_for(here, RECIPE, 8).rates == "book"

    write_measured(READING)

    assert cluster_for(here, RECIPE, 8).rates == "measured"
    # half of the machine is the same machine
    assert cluster_for(here, RECIPE, 4).rates == "measured"
    assert cluster_here(RECIPE, 8).rates == "measured"
    two_nodes = cluster_for(here, RECIPE, 16)
    assert (two_nodes.nodes, two_nodes.intra.name, two_nodes.inter.name) == (
        2,
        "measured",
        "ib-ndr",
    )


def test_named_parts_come_from_the_book():
    write_measured(READING)
    here = Machines(found=("h200",) * 8)

    assert cluster_for(replace(here, gpu="h100-80"), RECIPE, 8).rates == "book"
    slow = cluster_for(replace(here, intra="pcie4"), RECIPE, 8)
    assert (slow.rates, slow.intra) == ("measured", find_link("pcie4", "--intra"))


def test_a_gpu_the_book_lacks_is_known_by_its_measurement(monkeypatch):
    monkeypatch.setattr(measured_module, "gpu_models", lambda: ("NVIDIA X1",) * 2)
    here = Machines(found=("unknown",) * 2)
    assert cluster_for(here, RECIPE, 2) is None

    write_measured(replace(READING, device="NVIDIA X1", count=2, memory_gib=95.0))

    cluster = cluster_for(here, RECIPE, 2)
    assert (cluster.gpu.name, cluster.gpu.memory_gib, cluster.rates) == (
        "NVIDIA X1",
        95.0,
        "measured",
    )


def test_a_host_has_no_speed_until_it_is_measured(monkeypatch):
    on_host = RECIPE.model_copy(update={"device": "cpu"})
    monkeypatch.setattr(measured_module, "device_name", lambda on_gpu: "A Processor")
    assert cluster_for(Machines(), on_host, 2) is None
    assert cluster_here(on_host, 2).rates == "guessed"

    write_measured(replace(READING, device="A Processor", count=2, on_gpu=False, memory_gib=0))

    assert cluster_for(Machines(), on_host, 2).rates == "measured"
    assert cluster_here(on_host, 2).rates == "measured"
    assert cluster_here(on_host, 4).rates == "guessed"
