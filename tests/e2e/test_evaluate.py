"""`ndtrain evaluate` says the loss that training said: of the base model and of a checkpoint."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ndtrain.cli import run
from ndtrain.recipe.load import load_recipe
from ndtrain.report.run_directory import RunDirectory
from ndtrain.train.evaluation import DatasetLoss, result_lines, total_loss

RECIPE = """\
model_config: {model_type: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4,
  num_key_value_heads: 2, intermediate_size: 64, vocab_size: 300}
tokenizer_config: bytes
datasets:
  - path: synthetic
    length: 16
    sequence_length: 32
    min_input_id: 1
    max_input_id: 255
test_datasets:
  - path: rows.jsonl
    type: alpaca
device: cpu
sequence_len: 512
learning_rate: 1e-2
micro_batch_size: 2
global_batch_size: 4
max_steps: 3
export: false
output_dir: run
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    row = {"instruction": "Say hello.", "input": "", "output": "Hello."}
    lines = [json.dumps({**row, "output": "Hello" * number}) for number in (1, 2, 3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def ndtrain(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ndtrain", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def result(folder: Path) -> dict:
    return json.loads((folder / "run" / "evaluation" / "result.json").read_text())


@pytest.mark.slow
def test_base_model_and_checkpoint_give_the_losses_of_the_run(folder: Path) -> None:
    said = ndtrain(folder, "evaluate", "recipe.yaml")
    assert said.startswith("base model random weights (no checkpoint in run/checkpoints)")
    base = result(folder)
    assert base["checkpoint"] is None

    ndtrain(folder, "train", "recipe.yaml")
    events = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    evals = [event for event in events if event["event"] == "eval"]
    assert base["loss"] == pytest.approx(evals[0]["loss"], rel=1e-6)
    said = ndtrain(folder, "evaluate", "recipe.yaml", "--checkpoint", "base")
    assert said.splitlines()[0] == "base model random weights"
    assert result(folder) == base
    status = (folder / "run" / "status.json").read_text()

    # on another mesh, from the newest checkpoint
    said = ndtrain(folder, "evaluate", "recipe.yaml", "--set", "dp_shard_size=2")
    assert "step-000003 (step 3)" in said
    trained = result(folder)
    assert trained["step"] == 3
    assert trained["loss"] == pytest.approx(evals[-1]["loss"], rel=1e-5)
    assert trained["loss"] != pytest.approx(base["loss"], rel=1e-3)
    (one,) = trained["datasets"].values()
    assert (one["rows"], one["tokens"]) == (3, evals[-1]["tokens"])
    assert (folder / "run" / "status.json").read_text() == status


def test_a_run_directory_is_evaluated_by_its_recorded_recipe(folder: Path) -> None:
    """Also one that was moved: its checkpoints and results are looked for where it is."""
    loaded = load_recipe(folder / "recipe.yaml", check=False)
    moved = RunDirectory(folder / "moved: run")
    moved.create()
    moved.write_resolved(loaded.recipe, loaded.origins)

    said = ndtrain(folder, "evaluate", "moved: run", "--set", "micro_batch_size=1")

    assert said.startswith("base model random weights (no checkpoint in moved: run/checkpoints)")
    kept = json.loads((moved.path / "evaluation" / "result.json").read_text())
    assert kept["datasets"]["rows"]["rows"] == 3
    assert not (folder / "run").exists()


def test_a_recipe_without_held_out_rows_says_what_to_set(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert run(["evaluate", "recipe.yaml", "--set", "test_datasets=[]"]) == 2
    said = capsys.readouterr().err
    assert "holds out no rows" in said
    assert "val_set_size" in said


def test_the_total_weighs_datasets_by_their_tokens() -> None:
    results = {"a": DatasetLoss(2, 30, 1.0), "b": DatasetLoss(1, 10, 3.0)}
    assert total_loss(results) == DatasetLoss(3, 40, 1.5)
    lines = list(result_lines(results))
    assert lines[0].split() == ["dataset", "rows", "tokens", "loss", "perplexity"]
    assert lines[3].split() == ["all", "3", "40", "1.5000", "4.482"]
    assert len(list(result_lines({"a": results["a"]}))) == 2


def test_perplexity_of_a_huge_loss_is_infinite() -> None:
    assert DatasetLoss(1, 1, 1e6).perplexity == math.inf
