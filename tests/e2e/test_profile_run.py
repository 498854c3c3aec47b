"""A run with `profile:` says where its steps went: in files, in metrics and at its end."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

RECIPE = """\
model_config: {{model_type: llama, hidden_size: 64, intermediate_size: 96, num_hidden_layers: 1,
  num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 300}}
tokenizer_config: bytes
datasets:
  - {{path: synthetic, type: _synthetic, length: 40, sequence_length: 64, max_input_id: 250}}
sequence_len: 64
max_steps: 5
save_steps: 4
learning_rate: 0.001
device: cpu
export: false
profile: {{steps: [2, 3]}}
output_dir: {run}
dataset_prepared_path: {run}-rows
"""


def train(recipe: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ndtrain", "train", str(recipe), *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_profiled_run_and_one_that_resumes_after_it(tmp_path: Path) -> None:
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(RECIPE.format(run=run))
    said = train(recipe, "--max-steps", "4").splitlines()

    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (record,) = [one for one in records if one["event"] == "profile"]
    place = records.index(record)
    assert (records[place - 1]["event"], records[place - 1]["step"]) == ("step", 3)
    assert (record["first_step"], record["step"], record["device"]) == (2, 3, "cpu")
    assert record["files"] == ["profile.txt", "trace.json.gz"]
    assert sum(record["shares"].values()) > 1 - 1e-9
    assert {"matmul", "attention", "optimizer", "other kernels"} <= set(record["shares"])
    assert 0 < record["data_wait"] < 1

    told = (run / "profile.txt").read_text().splitlines()
    each = 1000 * record["step_seconds"]
    assert told[0] == f"Steps 2 to 3, {each:.1f} ms each, on the main rank:"
    assert told[1] == f"waiting for data: {100 * record['data_wait']:.1f} % of these steps"
    table = told[told.index("") + 1 :]
    assert table[0].split() == ["ms/step", "calls/step", "kind", "kernel"]
    assert any(line.endswith("aten::mm") for line in table)
    assert not any("Optimizer.step" in line or "next batch" in line for line in table)

    with gzip.open(run / "trace.json.gz", "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    assert sum(one.get("name") == "ndtrain: next batch" for one in events) == 2

    first, last = (line for line in said if line.startswith("time   "))
    assert first == f"{last} ({run / 'profile.txt'}, {run / 'trace.json.gz'})"
    assert "% of the operators' time, waiting for data " in last
    assert "Where a step goes" in (run / "report.html").read_text()

    before = (run / "profile.txt").read_bytes()
    said = train(recipe).splitlines()
    assert any("resumes after step 4 of 5" in line for line in said)
    # the run as a whole still knows
    assert [line for line in said if line.startswith("time   ")] == [last]
    assert (run / "profile.txt").read_bytes() == before
