"""`ndtrain preprocess` and `validate --data`: what a user sees of the rows."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from ndtrain.cli import run

RECIPE = """\
model_config:
  model_type: llama
  hidden_size: 32
  intermediate_size: 64
  num_hidden_layers: 1
  num_attention_heads: 2
tokenizer_config: bytes
datasets:
  - path: {rows}
    type: alpaca
dataset_prepared_path: {cache}
sequence_len: 256
learning_rate: 1e-3
"""
PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{}\n\n### Response:\n"
)
HI = len(PROMPT.format("Say hi.")) + len("Hi!") + 1
BYE = len(PROMPT.format("Say bye.")) + len("Bye!") + 1
TOKENS = HI + BYE + HI
TRAINED = 4 + 5 + 4


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    rows = [
        {"instruction": "Say hi.", "output": "Hi!"},
        {"instruction": "Say bye.", "output": "Bye!"},
        {"instruction": "Say hi.", "output": "Hi!"},
        {"instruction": "Say all.", "output": "x" * 300},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(rows=tmp_path / "rows.jsonl", cache=tmp_path / "cache"))
    return path


class Done(NamedTuple):
    """How a command ended, and what it said."""

    returncode: int
    stdout: str
    stderr: str


def ndtrain(*arguments: str | Path) -> Done:
    """One command in this process, as the console script runs it."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run([*map(str, arguments)])
    return Done(code, out.getvalue(), err.getvalue())


def ndtrain_apart(*arguments: str | Path) -> Done:
    """The same in a process of its own, with all that anybody would see of it."""
    done = subprocess.run(
        [sys.executable, "-m", "ndtrain", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
        timeout=120,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def test_counts_and_marked_rows(recipe: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    done = ndtrain("preprocess", recipe, "--show", "1")
    assert done.returncode == 0, done.stderr
    assert f"{rows}: 4 rows read, 3 token rows, 1 of them duplicates" in done.stdout
    assert f"  dropped: 1 longer than sequence_len (first: {rows}:4)" in done.stdout
    share = f"{TRAINED / TOKENS:.1%}"
    counts = f"training rows: 3, {TOKENS} tokens, {share} of them trained, longest row {BYE}"
    assert counts in done.stdout
    assert f"--- {rows}:1: {HI} tokens, 4 trained" in done.stdout
    assert "### Instruction:\nSay hi.\n\n### Response:\n[[Hi!<|im_end|>]]\n" in done.stdout
    assert done.stdout.count("[[") == 2  # the legend and the one row
    assert f"prepared rows written to {tmp_path / 'cache'}" in done.stdout
    assert "prepared rows found ready in" in ndtrain("preprocess", recipe).stdout


def test_json(recipe: Path, tmp_path: Path) -> None:
    done = ndtrain("preprocess", recipe, "--json", "--show", "2")
    result = json.loads(done.stdout)
    assert (result["train_rows"], result["tokens"], result["trained_tokens"]) == (
        3,
        TOKENS,
        TRAINED,
    )
    assert result["sources"][0]["dropped"] == {"longer than sequence_len": 1}
    first, second = result["rows"]
    assert first["place"] == f"{tmp_path / 'rows.jsonl'}:1"
    assert [token for token in second["labels"] if token != -100] == [*b"Bye!", 258]
    assert first["text"].endswith("### Response:\n[[Hi!<|im_end|>]]")


def test_validate_reads_the_rows(recipe: Path) -> None:
    done = ndtrain("validate", recipe, "--data")
    assert done.returncode == 0, done.stderr
    assert f"training rows: 3, {TOKENS} tokens" in done.stdout
    assert (
        json.loads(ndtrain("validate", recipe, "--data", "--json").stdout)["data"]["trained_tokens"]
        == TRAINED
    )


@pytest.mark.parametrize(
    ("start", "command"),
    [(ndtrain_apart, ["preprocess"]), (ndtrain, ["validate", "--data"])],
    ids=["preprocess", "validate"],
)
def test_a_broken_row_is_one_line_and_exit_4(
    start: Callable[..., Done], command: list[str], recipe: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    with rows.open("a") as file:
        file.write('\n{"instruction": "x", "output": "cut')
    done = start(*command, recipe)
    assert done.returncode == 4
    assert f"{rows}:6: not valid JSON" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
