"""A real run that gets no more memory: exit code 6, what was planned and what would fit."""

import json
import os
import re
import resource
import subprocess
import sys

import pytest

LIMIT = 6 * 2**30
RECIPE = """
model_config: {model_type: llama, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
  num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 250000}
tokenizer_config: bytes
datasets:
  - {path: synthetic, type: _synthetic, length: 8, sequence_length: 2048, max_input_id: 250}
sequence_len: 2048
micro_batch_size: 4
loss_chunk_tokens: 8192
max_steps: 1
learning_rate: 0.001
device: cpu
save_strategy: "no"
export: false
dp_shard_size: {ranks}
output_dir: {run}
dataset_prepared_path: {run}-rows
"""


def limit_memory() -> None:
    """The logits of 8192 tokens, 7.6 GiB, are more than the process may hold."""
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_out_of_memory_says_what_was_planned_and_what_would_fit(tmp_path, ranks):
    recipe = tmp_path / "recipe.yaml"
    run = tmp_path / "run"
    recipe.write_text(RECIPE.replace("{ranks}", str(ranks)).replace("{run}", str(run)))

    done = subprocess.run(
        [sys.executable, "-m", "ndtrain", "train", str(recipe)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit_memory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )

    assert done.returncode == 6, done.stderr
    error = done.stderr.strip()
    assert re.match(
        r"rank \d, training, step 0: the host ran out of memory "
        r"\(it tried to allocate 7\.63 GiB\)\. "
        r"Planned were \d+\.\d GiB of the \S+ GiB that are this rank's share: .*loss \d+\.\d",
        error,
    ), error
    first, *fixes = error.splitlines()
    assert first.endswith("What would fit, cheapest first:")
    assert fixes
    assert re.fullmatch(r"  1\. loss_chunk_tokens: 512 \(\d\.\d GiB, as fast\)", fixes[0])
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 6)
    assert status["error"] == error
