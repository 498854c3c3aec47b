import pytest
import yaml

from ndtrain.recipe.load import load_recipe
from ndtrain.recipe.schema import Recipe
from ndtrain.report.resolved import render_resolved

RECIPE = """\
# A title
model_config:
  model_type: llama
  hidden_size: 64
tokenizer_config: bytes
learning_rate: 1e-4
datasets:
  - path: synthetic
    length: 20
optimizer: sgd
optim_args: {momentum: 0.9}
val_set_size: 2
sample_prompts: ["yes", "1e5", "a: b # c", "two\\nlines", "é 🙂"]
"""


@pytest.fixture
def loaded(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return load_recipe(path, ["micro_batch_size=3", "datasets[0].seed=7"])


def test_it_runs_the_same_again(loaded, tmp_path):
    path = tmp_path / "resolved.yaml"
    path.write_text(render_resolved(loaded.recipe, loaded.origins), encoding="utf-8")
    assert load_recipe(path).recipe == loaded.recipe


def test_any_yaml_reader_sees_the_same_values(loaded):
    text = render_resolved(loaded.recipe, loaded.origins)
    assert Recipe.model_validate(yaml.safe_load(text)) == loaded.recipe


def test_each_value_names_its_origin(loaded):
    lines = render_resolved(loaded.recipe, loaded.origins).splitlines()
    file = loaded.path
    assert f"learning_rate: 0.0001  # {file}:6:1" in lines
    assert "micro_batch_size: 3  # --set" in lines
    assert "seed: 42  # default" in lines
    assert f"  hidden_size: 64  # {file}:4:3" in lines
    values = [line for line in lines if not line.startswith("#")]
    assert all("  # " in line for line in values)
    part = lines[lines.index(f"datasets:  # {file}:7:1") :]
    assert f"    length: 20  # {file}:9:5" in part
    assert "    seed: 7  # --set" in part
    assert "    split: train  # default" in part


def test_parts_set_as_a_whole_have_its_origin():
    recipe = Recipe.model_validate(
        {"base_model": "a/b", "learning_rate": 1, "datasets": [{"path": "synthetic"}]}
    )
    lines = render_resolved(recipe, {"datasets": "--set"}).splitlines()
    assert "  - path: synthetic  # --set" in lines
