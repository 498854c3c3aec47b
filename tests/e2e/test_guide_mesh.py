"""All four axes at once on 16 processes, from the command line: train, stop, go on, export."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
MESH = {
    "dp_replicate_size": 2,
    "dp_shard_size": 2,
    "context_parallel_size": 2,
    "tensor_parallel_size": 2,
}
STEPS = 4


def ndtrain(*arguments: object, cwd: Path) -> str:
    """A command in a process of its own; what it printed."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_rows(folder: Path) -> Path:
    rows = [
        {
            "instruction": f"Count from {first} to {first + 4}.",
            "input": "Only the numbers." if first % 3 == 0 else "",
            "output": ", ".join(str(first + step) for step in range(5)) + "." * (first % 5),
        }
        for first in range(60)
    ]
    path = folder / "rows.json"
    path.write_text(json.dumps(rows))
    return path


def write_recipe(folder: Path, name: str, rows: Path, **keys: Any) -> Path:
    values: dict[str, Any] = {
        "model_config": {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 92,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 321,
            "initializer_range": 0.1,
        },
        "tokenizer_config": "bytes",
        "datasets": [{"path": str(rows), "type": "alpaca"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "sequence_len": 256,
        "sample_packing": True,
        "global_batch_size": 8,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-6,
        "device": "cpu",
        "output_dir": str(folder / name),
        **keys,
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(values))
    return path


def losses(run: Path) -> dict[int, float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return {
        line["step"]: line["loss"]
        for line in map(json.loads, lines)
        if "loss" in line and line.get("kind", "train") in ("train", "step")
    }


def logits(export: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    with torch.no_grad():
        return model(input_ids=torch.arange(64)[None] * 5 % 300).logits


@pytest.mark.slow
def test_two_of_each_axis_train_stop_go_on_and_export_what_one_process_does(
    tmp_path: Path,
) -> None:
    rows = write_rows(tmp_path)
    meshed = write_recipe(tmp_path, "meshed", rows, micro_batch_size=1, **MESH)
    alone = write_recipe(tmp_path, "alone", rows, micro_batch_size=2)

    ndtrain("train", meshed, "--max-steps", 2, cwd=tmp_path)
    assert json.loads((tmp_path / "meshed" / "status.json").read_text())["step"] == 2
    ndtrain("train", meshed, cwd=tmp_path)
    ndtrain("train", alone, cwd=tmp_path)

    together, one = losses(tmp_path / "meshed"), losses(tmp_path / "alone")
    assert sorted(together) == sorted(one) == list(range(1, STEPS + 1))
    assert list(together.values()) == pytest.approx(list(one.values()), rel=1e-5)
    torch.testing.assert_close(
        logits(tmp_path / "meshed" / "export"),
        logits(tmp_path / "alone" / "export"),
        rtol=0,
        atol=2e-4,
    )
