"""Sweep files: what they mean, what is refused before anything runs, and a real sweep of three."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ndtrain import cli
from ndtrain.errors import MeshError, Problems, RecipeError
from ndtrain.train.sweep import (
    SweepResult,
    check_runs,
    plan_runs,
    read_sweep,
    result_lines,
    run_sweep,
)

RECIPE = """\
model_config: {model_type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
  num_key_value_heads: 2, intermediate_size: 32, vocab_size: 300}
tokenizer_config: bytes
datasets:
  - path: synthetic
    length: 8
    sequence_length: 16
    min_input_id: 1
    max_input_id: 255
val_set_size: 2
device: cpu
sequence_len: 16
learning_rate: 1e-3
max_steps: 2
export: false
output_dir: runs
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def sweep(text: str, folder: Path) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(text)
    return path


def test_lists_are_combined_and_pairs_stay_together(tmp_path: Path) -> None:
    text = "learning_rate: [1e-3, 2e-3]\n_:\n  - {lora_r: 8, lora_alpha: 16}\n  - {lora_r: 32}\n"
    assert read_sweep(sweep(text, tmp_path)) == [
        {"learning_rate": 1e-3, "lora_r": 8, "lora_alpha": 16},
        {"learning_rate": 1e-3, "lora_r": 32},
        {"learning_rate": 2e-3, "lora_r": 8, "lora_alpha": 16},
        {"learning_rate": 2e-3, "lora_r": 32},
    ]


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("seed: [1]\nlearning_rate: 1e-3\n", ":2:1", "'learning_rate' needs a list of values, not"),
        ("learning_rate: []\n", ":1:1", "needs a list of values"),
        ("_: [{a: 1}, 2]\n", ":1:13", "an entry under '_' is a mapping of recipe keys, not '2'"),
        ("seed: [1]\n_:\n  - {seed: 2}\n", "", "'seed' is given as a list and under '_'"),
        ("output_dir: [a, b]\n", "", "'output_dir' cannot be swept"),
        ("", ":1:1", "the sweep is empty"),
        ("- seed\n", ":1:1", "the sweep is a list at the top"),
    ],
)
def test_what_is_no_sweep_is_refused(text: str, place: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        read_sweep(sweep(text, tmp_path))
    assert caught.value.where == f"{tmp_path / 'sweep.yaml'}{place}"


def test_a_sweep_file_that_is_missing_is_not_called_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"there is no such sweep file\.$"):
        read_sweep(tmp_path / "sweep.yaml")


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Problems, match=r"sweep\.yaml:2:1: seed: duplicate key"):
        read_sweep(sweep("seed: [1]\nseed: [2]\n", tmp_path))


@pytest.mark.parametrize("options", [["--nnodes", "2"], ["--resume", "runs/sweep-001"]])
def test_options_of_one_run_alone_are_refused(
    recipe: Path, tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sweep("seed: [1, 2]\n", tmp_path)
    assert cli.run(["train", "recipe.yaml", "--sweep", "sweep.yaml", *options]) == 2
    assert capsys.readouterr().err.startswith("--sweep: a sweep runs on one machine")


def test_options_reach_every_run_and_a_dry_run_starts_none(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(RECIPE.replace("max_steps: 2", "num_epochs: 3"))
    sweep("seed: [1, 2]\n", tmp_path)
    command = ["train", "recipe.yaml", "--sweep", "sweep.yaml"]
    assert cli.run([*command, "--dry-run"]) == 0
    said = capfd.readouterr().out.splitlines()
    assert [line for line in said if line.startswith("run ")] == [
        "run    runs/sweep-001",
        "run    runs/sweep-002",
    ]
    assert not (tmp_path / "runs").exists()
    done = subprocess.run(
        [sys.executable, "-m", "ndtrain", *command, "--max-steps", "1", "--max-time", "200"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads((tmp_path / "runs" / "sweep.json").read_text())["runs"]
    assert [run["steps"] for run in runs] == [1, 1]


def test_overrides_carry_every_kind_of_value(recipe: Path, tmp_path: Path) -> None:
    values = {"lora_target_modules": ["q_proj"], "chat_template": "it's: a", "bf16": False}
    (run,) = plan_runs([values], tmp_path / "a b", ["seed=1"])
    assert run.overrides == (
        "seed=1",
        'lora_target_modules=["q_proj"]',
        'chat_template="it\'s: a"',
        "bf16=false",
        f'output_dir="{tmp_path / "a b" / "sweep-001"}"',
    )


def test_every_broken_set_is_named_before_any_run(recipe: Path, tmp_path: Path) -> None:
    text = "learning_rate: [1e-3, 0]\ntensor_parallel_size: [1, 3]\n"
    runs = plan_runs(read_sweep(sweep(text, tmp_path)), tmp_path / "runs", [])
    with pytest.raises(Problems) as caught:
        check_runs(recipe, runs)
    said = str(caught.value)
    assert "sweep-001" not in said
    for name in (
        "sweep-002 (learning_rate=0.001, tensor_parallel_size=3)",
        "sweep-003",
        "sweep-004",
    ):
        assert name in said
    assert not (tmp_path / "runs").exists()


def test_the_table_names_the_best_run_that_ended_well(tmp_path: Path) -> None:
    runs = plan_runs([{"seed": 1}, {"seed": 2}, {"seed": 3}], tmp_path, [])
    results = [
        SweepResult(runs[0], 0, 5, 2.0, 2.5),
        SweepResult(runs[1], 0, 5, 1.0, 1.25),
        SweepResult(runs[2], 7, 3, None, 0.5),
    ]
    lines = list(result_lines(results))
    assert lines[0].split() == ["run", "seed", "steps", "loss", "best", "eval", "exit"]
    assert lines[3].split() == ["sweep-003", "3", "3", "-", "0.5000", "7"]
    assert lines[4] == f"best by eval loss: sweep-002, 1.2500, {tmp_path / 'sweep-002'}"


def test_inside_a_launcher_it_is_refused(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match="--sweep"):
        run_sweep(recipe, sweep("seed: [1, 2]\n", tmp_path), [], debug=False)


@pytest.mark.slow
def test_a_failed_run_is_reported_and_the_others_go_on(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text("{\n")
    text = "datasets.0.path: [synthetic, broken.jsonl, synthetic]\n"
    sweep(text, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "ndtrain", "train", "recipe.yaml", "--sweep", "sweep.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 4, done.stdout + done.stderr
    assert "sweep-002 ended with exit code 4; the others go on." in done.stdout
    runs = json.loads((tmp_path / "runs" / "sweep.json").read_text())["runs"]
    assert [(run["exit_code"], run["steps"]) for run in runs] == [(0, 2), (4, 0), (0, 2)]
    assert runs[0]["loss"] == runs[2]["loss"]
    assert "best by eval loss: sweep-001" in done.stdout


@pytest.mark.slow
def test_ctrl_c_saves_the_current_run_and_stops_the_sweep(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(RECIPE.replace("max_steps: 2", "num_epochs: 100000"))
    sweep("seed: [1, 2]\n", tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "ndtrain", "train", "recipe.yaml", "--sweep", "sweep.yaml"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "runs" / "sweep-001" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and '"step": 3' in metrics.read_text()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "Stopped; the same command continues with sweep-001." in said
    (run,) = json.loads((tmp_path / "runs" / "sweep.json").read_text())["runs"]
    assert run["exit_code"] == 130
    saved = tmp_path / "runs" / "sweep-001" / "checkpoints" / f"step-{run['steps']:06d}"
    assert (saved / "COMPLETE").exists()
    assert not (tmp_path / "runs" / "sweep-002").exists()


def test_other_values_are_not_told_the_losses_of_older_ones(recipe: Path) -> None:
    first = sweep("learning_rate: [1e-3, 1e-4]\n", recipe.parent)
    assert run_sweep(recipe, first, [], dry_run=False) == 0
    table = (recipe.parent / "runs" / "sweep.json").read_text()

    other = sweep("learning_rate: [5e-2, 1e-4]\n", recipe.parent)
    with pytest.raises(Problems) as caught:
        run_sweep(recipe, other, [])
    (problem,) = caught.value.problems
    assert "sweep-001 (learning_rate=0.05)" in str(problem)
    assert "learning_rate: 0.001 -> 0.05" in str(problem)
    assert "--restart" in str(problem)
    assert (recipe.parent / "runs" / "sweep.json").read_text() == table

    longer = sweep("learning_rate: [1e-3, 1e-4]\nseed: [42]\n", recipe.parent)
    check_runs(recipe, plan_runs(read_sweep(longer), recipe.parent / "runs", ()))
