"""`ndtrain evaluate --tasks`: the harness gets the right model, and is asked for when missing."""

import importlib.util
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from ndtrain.cli import run
from ndtrain.train.harness import TaskResult, read_results, task_lines

RECIPE = """\
model_config: {model_type: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4,
  num_key_value_heads: 2, intermediate_size: 64, vocab_size: 300}
tokenizer_config: bytes
datasets:
  - path: rows.jsonl
    type: alpaca
adapter: lora
lora_r: 4
lora_target_linear: true
device: cpu
sequence_len: 512
learning_rate: 1e-2
micro_batch_size: 2
global_batch_size: 4
max_steps: 3
export: false
output_dir: run
"""

STUB = {
    "__init__.py": """\
__version__ = "0.0.stub"


def simple_evaluate(model, tasks, limit, task_manager, log_samples):
    import torch

    if tasks == ["offline"]:
        raise ConnectionError("no route to the hub")
    ids = torch.tensor([model.tokenizer("Hello.")["input_ids"]])
    loss = float(model.pretrained(input_ids=ids, labels=ids).loss)
    values = {"alias": "x", "loss,none": loss, "loss_stderr,none": 0.5, "rows,none": model.batch}
    return {
        "results": {name: values for name in tasks},
        "versions": {name: 2 for name in tasks},
        "n-shot": {name: 3 for name in tasks},
        "n-samples": {name: {"original": 9, "effective": limit} for name in tasks},
    }
""",
    "tasks.py": """\
from fnmatch import filter


class TaskManager:
    all_tasks = ("arc_easy", "arc_challenge", "offline")

    def __init__(self, include_defaults):
        pass

    def match_tasks(self, names):
        return filter(self.all_tasks, names[0])
""",
    "models/__init__.py": "",
    "models/huggingface.py": """\
class HFLM:
    def __init__(self, pretrained, tokenizer, batch_size):
        self.pretrained, self.tokenizer, self.batch = pretrained, tokenizer, batch_size
""",
}
"""The part of lm_eval's interface that is used, measuring one loss."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, its rows and the stub."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "recipe.yaml").write_text(RECIPE)
    rows = [{"instruction": "Say hello.", "input": "", "output": "Hello" * n} for n in range(1, 9)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    for name, text in STUB.items():
        path = folder / "stub" / "lm_eval" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture(scope="module")
def base(folder: Path) -> dict[str, Any]:
    """What the stub said before there was a checkpoint."""
    code, _, messages = evaluate(folder, "--tasks", "arc_easy", "--limit", "1")
    assert code == 0, messages
    kept: dict[str, Any] = json.loads((folder / "run/evaluation/tasks.json").read_text())
    return kept


@pytest.fixture(scope="module")
def trained(folder: Path, base: dict[str, Any]) -> Path:
    """The same folder after a run."""
    done = subprocess.run(
        [sys.executable, "-m", "ndtrain", "train", "recipe.yaml"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return folder


def evaluate(folder: Path, *words: str, stub: bool = True) -> tuple[int, str, str]:
    """Exit code, output and messages of one command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        if stub:
            patch.syspath_prepend(folder / "stub")
            for name in [one for one in sys.modules if one.partition(".")[0] == "lm_eval"]:
                patch.delitem(sys.modules, name)
        code = run(["evaluate", "recipe.yaml", *words])
    for name in [one for one in sys.modules if one.partition(".")[0] == "lm_eval" and stub]:
        del sys.modules[name]
    return code, out.getvalue(), err.getvalue()


def test_before_there_is_a_checkpoint_the_base_is_measured(base: dict[str, Any]) -> None:
    assert (base["harness"], base["step"], base["limit"]) == ("0.0.stub", 0, 1)
    assert base["model"].startswith("base model random weights")
    assert base["tasks"]["arc_easy"]["metrics"]["loss"] > 0


@pytest.mark.slow
def test_the_newest_checkpoint_is_measured(trained: Path, base: dict[str, Any]) -> None:
    code, said, messages = evaluate(trained, "--tasks", "arc_*", "--limit", "5")
    assert code == 0, messages
    lines = said.splitlines()
    assert "step-000003 (step 3)" in lines[0]
    assert [line.split()[0] for line in lines[2::2]] == ["arc_easy", "arc_challenge"]
    kept = json.loads((trained / "run" / "evaluation" / "tasks.json").read_text())
    assert (kept["harness"], kept["step"], kept["limit"]) == ("0.0.stub", 3, 5)
    easy = kept["tasks"]["arc_easy"]
    assert (easy["version"], easy["shots"], easy["samples"]) == ("2", 3, 5)
    assert easy["errors"] == {"loss": 0.5}
    assert easy["metrics"]["rows"] == 2
    # three steps at a high rate moved the adapter, and the harness got it
    assert easy["metrics"]["loss"] < base["tasks"]["arc_easy"]["metrics"]["loss"] - 0.05


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--tasks", "arc_esy"), 2, "'arc_esy' is no task of lm-evaluation-harness"),
        (("--tasks", "offline"), 4, "the rows of offline cannot be loaded: no route to the hub"),
    ],
)
def test_mistakes_are_named(words: Sequence[str], code: int, message: str, folder: Path) -> None:
    left, _, said = evaluate(folder, *words)
    assert left == code
    assert message in said
    assert "Traceback" not in said


def test_other_processes_beside_it_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    left, _, said = evaluate(folder, "--tasks", "arc_easy")
    assert left == 3
    assert "benchmarks run in one process, but torchrun started 2" in said


def test_a_missing_harness_says_how_to_install_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    left, _, said = evaluate(folder, "--tasks", "arc_easy", stub=False)
    assert left == 3
    assert 'pip install "ndtrain[lm-eval]"' in said


def test_the_real_harness_measures_a_task_of_ones_own(folder: Path) -> None:
    pytest.importorskip("lm_eval", reason="the optional package is not installed")
    rows = [{"q": f"{n} + 1 =", "choices": [f"{n + 1}", f"{n + 2}"], "a": 0} for n in range(8)]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "sums.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "choices",
        "doc_to_target": "a",
        "metric_list": [{"metric": "acc"}],
        "metadata": {"version": 1.0},
    }
    (folder / "sums.yaml").write_text(json.dumps(task))
    code, _, messages = evaluate(folder, "--tasks", "sums.yaml", "--limit", "4", stub=False)
    assert code == 0, messages
    kept = json.loads((folder / "run" / "evaluation" / "tasks.json").read_text())
    (sums,) = kept["tasks"].values()
    assert sums["samples"] == 4
    assert sums["metrics"]["acc"] in (0.0, 0.25, 0.5, 0.75, 1.0)


def test_groups_and_filters_are_read() -> None:
    told = {
        "results": {"a": {"acc,none": 0.5, "acc_stderr,none": "N/A", "em,strict": 1, "alias": "a"}},
        "groups": {"g": {"acc,none": 0.25, "acc_stderr,none": 0.1}},
        "n-samples": {"a": {"original": 9, "effective": 2000}},
    }
    results = read_results(told)
    assert results["a"] == TaskResult(None, None, 2000, {"acc": 0.5, "em,strict": 1.0}, {})
    assert results["g"] == TaskResult(None, None, None, {"acc": 0.25}, {"acc": 0.1})
    assert [line.split() for line in task_lines(results)] == [
        ["task", "metric", "value", "±", "questions"],
        ["a", "acc", "0.5000", "2,000"],
        ["a", "em,strict", "1.0000", "2,000"],
        ["g", "acc", "0.2500", "0.1000"],
    ]
