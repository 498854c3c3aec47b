"""After a real run the prediction stands beside the measurement, printed and in `plan.json`."""

import json
import os
import re
import subprocess
import sys

import pytest

RECIPE = """\
model_config: {{model_type: llama, hidden_size: 64, intermediate_size: 96, num_hidden_layers: 2,
  num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 64000}}
tokenizer_config: bytes
datasets:
  - {{path: synthetic, type: _synthetic, length: 40, sequence_length: 128, max_input_id: 250}}
sequence_len: 512
micro_batch_size: 4
max_steps: 6
learning_rate: 0.001
device: cpu
save_strategy: "no"
export: false
output_dir: {run}
dataset_prepared_path: {run}-rows
"""


@pytest.mark.slow
def test_prediction_and_measurement_stand_side_by_side(tmp_path):
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(RECIPE.format(run=run))

    done = subprocess.run(
        [sys.executable, "-m", "ndtrain", "train", str(recipe)],
        capture_output=True,
        text=True,
        check=False,
        # a cache of its own, in which nobody has measured this host
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr

    told = re.search(
        r"^plan   memory (\S+) GiB predicted, (\S+) measured \(([+−]\S+) %\)$",
        done.stdout,
        re.MULTILINE,
    )
    assert told
    plan = json.loads((run / "plan.json").read_text())
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in steps if record["event"] == "step"]
    measured = plan["measured"]
    assert measured["memory_gib"] == max(record["memory_gib"] for record in steps)
    assert measured["steps"] == 3  # the first three warm up
    assert measured["step_seconds"] == sorted(r["step_seconds"] for r in steps[3:])[1]
    predicted = plan["predicted"]
    assert predicted["device"] == "cpu"
    assert predicted["memory_gib"] == sum(plan["memory"].values()) / 2**30
    assert predicted["step_seconds"] is None
    error = predicted["memory_gib"] / measured["memory_gib"] - 1
    assert plan["prediction_error"] == {"memory": error, "step": None}
    assert abs(error) < 0.25
    assert float(told[1]) == round(predicted["memory_gib"], 2)
    assert float(told[2]) == round(measured["memory_gib"], 2)
    # rows of 128 tokens are trained, not the 512 that sequence_len allows
    logits = 4 * 128 * 64000 * 22
    assert logits < plan["memory"]["loss"] < 1.3 * logits
