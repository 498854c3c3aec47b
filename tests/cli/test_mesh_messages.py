"""A mesh that a model cannot be split over is refused from the command line, with what works."""

from pathlib import Path

import pytest

RECIPE = """\
model_config: {model_type: llama, hidden_size: 72, num_hidden_layers: 2,
  num_attention_heads: 9, num_key_value_heads: 3, intermediate_size: 128}
tokenizer_config: bytes
learning_rate: 1e-4
device: cpu
tensor_parallel_size: 2
datasets:
  - path: rows.jsonl
    type: alpaca
"""
ROW = '{"instruction": "Say hello.", "input": "", "output": "Hello."}\n'


@pytest.fixture
def nine_heads(tmp_path: Path) -> str:
    (tmp_path / "rows.jsonl").write_text(ROW * 8)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return "recipe.yaml"


@pytest.mark.parametrize("command", ["validate", "train", "parity"])
def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_work(
    command: str, nine_heads: str, tmp_path: Path, ndtrain
) -> None:
    done = ndtrain(command, nine_heads)
    said = done.stdout + done.stderr
    assert done.returncode == 3, said
    assert "recipe.yaml:6:" in said
    assert "tensor_parallel_size is 2, but the model has 9 query heads" in said
    assert "Use 1, 3 or 9." in said
    assert "Traceback" not in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("size", ["1", "3", "9"])
def test_the_sizes_it_names_do_work(size: str, nine_heads: str, ndtrain) -> None:
    done = ndtrain("train", nine_heads, "--set", f"tensor_parallel_size={size}", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"tp {size} = {size} rank" in done.stdout


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ("num_attention_heads: 8, num_key_value_heads: 6", "Use 1 or 2."),
        ("num_attention_heads: 8, num_key_value_heads: 3", "Use 1."),
    ],
)
def test_key_value_heads_limit_the_sizes_too(
    sizes: str, said: str, nine_heads: str, tmp_path: Path, ndtrain
) -> None:
    text = RECIPE.replace("num_attention_heads: 9, num_key_value_heads: 3", sizes)
    (tmp_path / "recipe.yaml").write_text(text.replace("parallel_size: 2", "parallel_size: 4"))
    done = ndtrain("validate", nine_heads)
    assert done.returncode == 3
    assert said in done.stdout + done.stderr
