"""A run that diverges while a checkpoint is on its way to the disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = """\
model_config: {{model_type: llama, hidden_size: 512, intermediate_size: 2048, num_hidden_layers: 4,
  num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 300}}
tokenizer_config: bytes
datasets:
  - {{path: synthetic, type: _synthetic, length: 40, sequence_length: 16, max_input_id: 250}}
sequence_len: 16
max_steps: 5
save_steps: 1
lr_scheduler: constant
learning_rate: 1.0e+38
max_grad_norm: null
device: cpu
export: false
dp_shard_size: {ranks}
output_dir: {run}
dataset_prepared_path: {run}-rows
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_save_is_finished_and_the_reason_is_told(tmp_path: Path, ranks: int) -> None:
    """The first step makes weights of which the second has no loss, moments after the save began;
    ended under its thread, the process would abort with another code and without the checkpoint."""
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(RECIPE.format(run=run, ranks=ranks), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "ndtrain", "train", str(recipe)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 7, done.stderr
    assert "step 2 has loss nan" in done.stderr
    assert (run / "checkpoints" / "step-000001" / "COMPLETE").exists()
