"""The public Python names: light until they train, and the same as the commands."""

import subprocess
import sys
from pathlib import Path

import pytest

from ndtrain.api import ExitCode, load_recipe, plan, train
from ndtrain.errors import MeshError, Problems

RECIPE = """\
model_config: {model_type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
  num_key_value_heads: 2, intermediate_size: 32, vocab_size: 300}
tokenizer_config: bytes
datasets:
  - path: synthetic
    length: 4
    sequence_length: 16
    min_input_id: 1
    max_input_id: 255
device: cpu
sequence_len: 16
learning_rate: 1e-3
micro_batch_size: 2
export: false
"""

LIGHT = """
import sys
from pathlib import Path
from ndtrain.api import load_recipe, plan
plan(load_recipe(Path(sys.argv[1])))
heavy = {"torch", "transformers", "datasets", "peft", "accelerate"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def test_loading_and_planning_import_nothing_heavy(recipe: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, str(recipe)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_plan_has_mesh_and_batch(recipe: Path) -> None:
    found = plan(load_recipe(recipe, ["dp_shard_size=2", "tensor_parallel_size=2"]))
    assert found.parallel.sizes == (1, 2, 1, 2)
    assert found.batch.global_batch == 4
    with pytest.raises(MeshError, match="3 were started"):
        plan(load_recipe(recipe, ["dp_shard_size=2"]), world_size=3)


def test_training_returns_the_exit_code_and_raises_what_is_wrong(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = [f"output_dir={tmp_path / 'run'}"]
    assert train(recipe, overrides=place, max_steps=1) is ExitCode.OK
    assert (tmp_path / "run" / "metrics.jsonl").is_file()
    with pytest.raises(Problems, match="learning_rat"):
        train(recipe, overrides=["learning_rat=1"])
