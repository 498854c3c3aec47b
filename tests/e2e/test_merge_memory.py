"""Merging needs little memory, however large the model and however few its files."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ndtrain.model.shard_files import ShardFiles, TensorSpec, plan_shards

GIB = 2**30
LARGE = (128_000, 3072, 8192, 26)
"""Vocabulary, hidden and intermediate size, layers."""


def tensor_specs(sizes: tuple[int, int, int, int]) -> list[TensorSpec]:
    vocabulary, hidden, wide, layers = sizes
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name in ("q", "k", "v", "o"):
            rows = hidden if name in "qo" else hidden // 4
            shape = (hidden, hidden) if name == "o" else (rows, hidden)
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = shape
        for name in ("gate", "up"):
            shapes[f"{prefix}.mlp.{name}_proj.weight"] = (wide, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, wide)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{name}.weight"] = (hidden,)  # type: ignore[assignment]
    shapes["model.norm.weight"] = (hidden,)  # type: ignore[assignment]
    shapes["lm_head.weight"] = (vocabulary, hidden)
    return [TensorSpec(name, torch.bfloat16, shape) for name, shape in shapes.items()]


def write_base(folder: Path, sizes: tuple[int, int, int, int], shard_bytes: int) -> int:
    """Random weights of the real shapes; returns their bytes."""
    vocabulary, hidden, wide, layers = sizes
    folder.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256,
        "vocab_size": vocabulary,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    specs = tensor_specs(sizes)
    row = torch.randn(2**20, dtype=torch.float32).to(torch.bfloat16)
    with ShardFiles(folder, specs, shard_bytes=shard_bytes) as files:
        for spec in specs:
            columns = spec.shape[1] if len(spec.shape) > 1 else 1
            step = max(1, row.numel() // columns)
            files.write(
                spec.name,
                (
                    row[: min(step, spec.shape[0] - start) * columns]
                    for start in range(0, spec.shape[0], step)
                ),
            )
    return sum(spec.nbytes for spec in specs)


def write_adapter(
    folder: Path, base: Path, sizes: tuple[int, int, int, int], *, whole: str | None = None
) -> None:
    """Rank 16 on every linear, the head and the embedding; `whole` names a weight trained whole."""
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 16,
        "lora_alpha": 32,
        "target_modules": ["all"],
        "base_model_name_or_path": str(base),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for spec in tensor_specs(sizes):
        if len(spec.shape) != 2:
            continue
        rows, columns = spec.shape
        prefix = "base_model.model." + spec.name.removesuffix(".weight")
        if spec.name == whole:
            tensors[f"{prefix}.weight"] = torch.ones(rows, columns, dtype=torch.bfloat16)
        elif "embed_tokens" in spec.name:
            tensors[f"{prefix}.lora_embedding_A"] = torch.randn(16, rows) * 0.01
            tensors[f"{prefix}.lora_embedding_B"] = torch.randn(columns, 16) * 0.01
        else:
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(16, columns) * 0.01
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, 16) * 0.01
    save_file(tensors, folder / "adapter_model.safetensors")


MEASURE = """
import re, resource, sys, threading
from ndtrain.cli import run

over, own = threading.Event(), []

def watch():
    while not over.wait(0.002):
        with open("/proc/self/status") as status:
            own.append(int(re.search(r"RssAnon:\\s+(\\d+)", status.read())[1]))

watcher = threading.Thread(target=watch)
watcher.start()
code = run(["merge", *sys.argv[1:]])
over.set()
watcher.join()
assert code == 0
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, max(own) * 1024)
"""


@dataclass(frozen=True)
class Peak:
    """Most memory that a process had: `own` without pages of files, which can be taken back."""

    resident: int
    own: int


def peak_of_merging(
    folder: Path,
    sizes: tuple[int, int, int, int],
    shard_bytes: int,
    *,
    whole: str | None = None,
) -> Peak:
    nbytes = write_base(folder / "base", sizes, shard_bytes)
    write_adapter(folder / "adapter", folder / "base", sizes, whole=whole)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder / "adapter"), str(folder / "merged")],
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = sum(file.stat().st_size for file in (folder / "merged").glob("*.safetensors"))
    assert nbytes <= written < 1.01 * nbytes
    return Peak(*map(int, done.stdout.split("peak ")[1].split()))


@pytest.mark.slow
def test_the_peak_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A gigabyte more in one file, in two tensors, one adapted and one trained whole.

    Less than half of it shows in memory.
    """
    peaks = []
    for vocabulary in (8192, 8192 * 64):
        folder = tmp_path / str(vocabulary)
        folder.mkdir()
        sizes = (vocabulary, 512, 1024, 2)
        peaks.append(peak_of_merging(folder, sizes, 64 * GIB, whole="lm_head.weight"))
        shutil.rmtree(folder)
    assert peaks[1].own - peaks[0].own < GIB // 2


@pytest.mark.slow
@pytest.mark.parametrize(("files", "shard_bytes"), [(1, 64 * GIB), (12, 17 * GIB // 32)])
def test_three_billion_parameters_stay_below_three_gib(
    files: int, shard_bytes: int, tmp_path: Path
) -> None:
    specs = tensor_specs(LARGE)
    assert sum(spec.nbytes for spec in specs) > 6e9
    assert len(plan_shards(specs, shard_bytes)) == files
    assert peak_of_merging(tmp_path, LARGE, shard_bytes).resident < 3 * GIB
