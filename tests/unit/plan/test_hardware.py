"""The hardware book: names, memory sizes, nodes, and the GPUs of this machine."""

import pytest

from ndtrain.errors import MeshError, RecipeError
from ndtrain.plan.hardware import (
    build_cluster,
    calibration,
    find_gpu,
    find_link,
    gpu_names,
    link_names,
    local_gpus,
)


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_is_complete_and_its_link_exists(name):
    gpu, assumed = find_gpu(name)

    assert not assumed
    assert gpu.link in link_names()
    assert 10 < gpu.memory_gib < 400
    assert gpu.source
    assert gpu.date >= "2026"


@pytest.mark.parametrize("name", link_names())
def test_every_link_has_source_and_date(name):
    link = find_link(name, "--intra")

    assert link.gbs > 0
    assert link.source
    assert link.date >= "2026"


@pytest.mark.parametrize(
    ("word", "name"),
    [("h100-80", "h100-80"), ("H100", "h100-80"), ("h200", "h200"), ("RTX_4090", "rtx-4090")],
)
def test_names_as_people_write_them(word, name):
    assert find_gpu(word)[0].name == name


def test_a_memory_size_takes_the_nearest_gpus_rates_and_says_so():
    gpu, assumed = find_gpu("48GB")

    assert assumed
    assert gpu.name == "rtx-a6000"
    assert find_gpu("80GB")[0].memory_gib == 79.2
    assert find_gpu("60 gib")[0].memory_gib == pytest.approx(59.1)


def test_an_unknown_gpu_is_refused_with_the_names():
    with pytest.raises(RecipeError, match="--gpu: 'tpu' is not a GPU of the hardware book"):
        find_gpu("tpu")


def test_an_unknown_link_is_refused_with_the_names():
    with pytest.raises(RecipeError, match=r"--inter: 'token-ring' is not a link .* nvlink4"):
        find_link("token-ring", "--inter")


def test_gpus_must_spread_evenly_over_nodes():
    with pytest.raises(MeshError, match="10 ranks cannot be dealt evenly to 4 nodes"):
        build_cluster("h100", world_size=10, nodes=4)


def test_eight_gpus_make_a_node_unless_said_otherwise():
    assert build_cluster("h100", world_size=16).nodes == 2
    assert build_cluster("h100", world_size=16, nodes=4).gpus_per_node == 4


def test_a_wide_collective_uses_the_link_between_nodes():
    cluster = build_cluster("h100", world_size=16, inter="ethernet-100")

    assert cluster.link_over(8).name == "nvlink4"
    assert cluster.link_over(16).name == "ethernet-100"
    assert cluster.gbs_over(8) == 450
    assert cluster.gbs_over(16) == 12.5 / 8  # the GPUs of a node share it


def test_the_driver_names_this_machines_gpus(tmp_path):
    models = ("NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090", "NVIDIA A100-SXM4-40GB", "Odd 1")
    for number, model in enumerate(models):
        folder = tmp_path / f"0000:0{number}:00.0"
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ: 1\n")

    assert local_gpus(tmp_path) == ("h100-80", "rtx-4090", "a100-40", "unknown")


def test_a_machine_without_driver_has_no_gpus(tmp_path):
    assert local_gpus(tmp_path / "none") == ()


def test_the_calibration_is_complete():
    constants = calibration()

    assert 0 < constants.matmul < 1
    assert 0.9 <= constants.usable < 1
