"""Axolotl's two recipes for several axes train as they are, but for model, rows and length.

Their values are rebuilt here; 16 and 8 processes on a CPU stand for the GPUs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ndtrain.model.byte_tokenizer import build_byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]

HSDP_TP = """\
base_model: meta-llama/Llama-3.1-8B

plugins:
  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin

dp_shard_size: 4
dp_replicate_size: 2
tensor_parallel_size: 2
# context_parallel_size: 2

dataset_prepared_path: last_run_prepared

special_tokens:
  pad_token: <|end_of_text|>

fsdp_version: 2
fsdp_config:
  offload_params: false
  state_dict_type: FULL_STATE_DICT
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
  reshard_after_forward: true

datasets:
  - path: tatsu-lab/alpaca
    type: alpaca

output_dir: ./outputs/ndp-out/

sequence_len: 2048
sample_packing: true
attn_implementation: flash_attention_2

gradient_accumulation_steps: 1
micro_batch_size: 1
num_epochs: 2
optimizer: adamw_torch_fused
lr_scheduler: constant_with_warmup
learning_rate: 2e-6

bf16: true
tf32: true

logging_steps: 1
saves_per_epoch: 1
warmup_ratio: 0.1
"""

FSDP_TP_CP = (
    HSDP_TP.replace("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B")
    .replace("dp_shard_size: 4", "dp_shard_size: 2")
    .replace("dp_replicate_size: 2", "# dp_replicate_size: 1")
    .replace("# context_parallel_size", "context_parallel_size")
    .replace("  pad_token: <|end_of_text|>\n", "")
    .replace("LlamaDecoderLayer", "Qwen3DecoderLayer")
    .replace("sequence_len: 2048", "sequence_len: 8192")
)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 320,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "architecture", "mesh"),
    [
        (HSDP_TP, "llama", "dp_replicate 2 × dp_shard 4 × cp 1 × tp 2 = 16 ranks"),
        (FSDP_TP_CP, "qwen3", "dp_replicate 1 × dp_shard 2 × cp 2 × tp 2 = 8 ranks"),
    ],
    ids=["hsdp x tp", "fsdp x tp x cp"],
)
def test_recipes_for_axolotl_train(text: str, architecture: str, mesh: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **SIZES))
    model.save_pretrained(tmp_path / "model")
    build_byte_tokenizer().save_pretrained(tmp_path / "model")
    rows = [
        {"instruction": f"Say {number}.", "input": "", "output": f"{number}."}
        for number in range(60)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    for line in text.splitlines():
        for key, value in (
            ("base_model: ", str(tmp_path / "model")),
            ("  - path: ", str(tmp_path / "rows.json")),
            ("sequence_len: ", "256"),
        ):
            if line.startswith(key):
                text = text.replace(line, key + value)
    (tmp_path / "recipe.yaml").write_text(text)

    done = subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), "train", "recipe.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert mesh in done.stdout
    run = tmp_path / "outputs" / "ndp-out"
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "finished"
    assert status["step"] > 2
    trained = AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32)
    moved = [
        not torch.equal(before.to(after.dtype), after)
        for before, after in zip(
            model.state_dict().values(),
            (trained.state_dict()[name] for name in model.state_dict()),
            strict=True,
        )
        if before.shape == after.shape
    ]
    assert any(moved)
