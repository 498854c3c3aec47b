import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def ndtrain(tmp_path: Path) -> Run:
    """Runs the real command in a process of its own, in an empty folder."""

    def run(
        *arguments: str, cwd: Path = tmp_path, **variables: str
    ) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **variables}
        return subprocess.run(
            [sys.executable, "-m", "ndtrain", *arguments],
            cwd=cwd,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            timeout=120,
        )

    return run


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A small recipe that is right."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model_config: {model_type: llama, hidden_size: 64, num_hidden_layers: 2,\n"
        "  num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 128}\n"
        "tokenizer_config: bytes\n"
        "learning_rate: 1e-4\n"
        "datasets:\n"
        "  - path: rows.jsonl\n"
        "    type: alpaca\n"
    )
    row = '{"instruction": "Say hello.", "input": "", "output": "Hello."}\n'
    (tmp_path / "rows.jsonl").write_text(row * 4)
    return path
