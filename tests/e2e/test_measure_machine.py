"""`ndtrain plan --measure` on this machine's processor, over gloo, and the plans after it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = """\
model_config: {model_type: llama, hidden_size: 64, intermediate_size: 96, num_hidden_layers: 2,
  num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 512}
tokenizer_config: bytes
datasets: [{path: synthetic}]
sequence_len: 256
learning_rate: 0.001
device: cpu
dp_shard_size: 2
"""
WITHOUT_TORCH = """
import sys
from ndtrain.cli import run
code = run(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(code)
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A recipe for two processes, and a cache of its own."""
    folder = tmp_path_factory.mktemp("machine")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE)
    return recipe, {**os.environ, "XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"}


def has_driver():
    return Path("/proc/driver/nvidia/gpus").is_dir()


def command(machine, *start, code=0):
    recipe, environ = machine
    done = subprocess.run(
        [sys.executable, *start, str(recipe)],
        capture_output=True,
        text=True,
        check=False,
        env=environ,
    )
    assert done.returncode == code, done.stderr
    return done


def test_a_machine_is_measured_once_and_planned_with_afterwards(machine):
    measured = command(machine, "-m", "ndtrain", "plan", "--measure", "--json")

    assert measured.stderr.startswith("measured 2 × ")
    cluster = json.loads(measured.stdout)["cluster"]
    assert cluster["rates"] == "measured"
    (kept,) = (machine[0].parent / "ndtrain" / "machines").iterdir()
    rates = json.loads(kept.read_text())
    assert rates["count"] == 2
    assert set(rates["exchanges"]) == {"all_gather", "all_reduce", "all_to_all"}
    # a core of any age: between 1 GFLOP/s and 10 TFLOP/s, 0.1 and 1000 GB/s
    assert 0.001 < rates["matmul_tf"] < 10
    assert all(0.01 < value < 1000 for value in (rates["memory_gbs"], *rates["exchanges"].values()))
    assert rates["latency_us"] > 0
    assert cluster["gpu"]["bf16_tf"] == pytest.approx(rates["matmul_tf"] / 0.804)
    assert cluster["intra"]["measured"] == rates["exchanges"]

    before = kept.stat().st_mtime_ns
    later = command(machine, "-c", WITHOUT_TORCH, "plan")

    assert "2 processes on this host" in later.stdout
    assert f"Rates measured on this machine on {rates['date']}." in later.stdout
    assert kept.stat().st_mtime_ns == before
    valid = command(machine, "-c", WITHOUT_TORCH, "validate", "--json")
    assert json.loads(valid.stdout)["memory_gib"]["total"] > 0


def test_measuring_and_naming_another_gpu_contradict(machine):
    refused = command(machine, "-m", "ndtrain", "plan", "--measure", "--gpu", "h100-80", code=2)

    assert refused.stderr.strip() == (
        "--measure: --measure measures this machine, and --gpu h100-80 asks for another. "
        "Leave one of them out."
    )


@pytest.mark.skipif(has_driver(), reason="this machine has a GPU to measure")
def test_a_gpu_is_not_measured_where_there_is_none(machine):
    refused = command(machine, "-m", "ndtrain", "plan", "--set", "device=cuda", "--measure", code=3)

    assert refused.stderr.strip() == (
        "--measure: the recipe asks for CUDA, and this machine has no NVIDIA driver. Measure on "
        "the machine that trains, or name its GPU with --gpu."
    )
