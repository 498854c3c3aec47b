"""What a run says and leaves when it stops before its end, and when it is started again."""

import json
import os
import signal
from pathlib import Path

import pytest
from faulty import Command, train, when, write_recipe

from ndtrain.cli import run as ndtrain
from ndtrain.report.metrics import read_history, read_metrics
from ndtrain.train.speaker import find_speaker


def begun(folder: Path, *options: str) -> tuple[Path, Path]:
    """A run of one rank that a first start left; its recipe and its folder."""
    recipe = write_recipe(folder, keys="")
    finish(recipe, *options)
    return recipe, folder / "run"


def finish(recipe: Path, *options: str) -> Command:
    command = train(recipe, *options)
    assert command.wait() == 0, command.text()
    return command


def contents(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_the_card_tells_the_last_step_and_an_only_evaluation(tmp_path: Path) -> None:
    _, run = begun(tmp_path, "--max-steps", "4", "--set", "logging_steps=5")
    records = read_metrics(run / "metrics.jsonl")
    last_step = max(place for place, one in enumerate(records) if one["event"] == "step")
    proved = [one.get("text", "").startswith("The export was reloaded") for one in records]
    assert last_step < proved.index(True)
    history = read_history(run / "metrics.jsonl")
    first, last = history.steps
    assert (first["step"], last["step"]) == (1, 4)
    measured = history.evals[0]["loss"]
    moved = f"{100 * (last['loss'] - first['loss']) / first['loss']:+.1f} %".replace("-", "−")
    card = (run / "export" / "README.md").read_text().splitlines()
    assert f"| held-out | {measured:.4f} | | measured once, at step 0 |" in card
    assert f"| training | {first['loss']:.4f} | {last['loss']:.4f} | {moved} |" in card
    assert "| steps | 4 |" in card
    assert f"| trained tokens | {last['seen_tokens']} |" in card
    assert ndtrain(["export", str(run), str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "README.md").read_text().splitlines() == card


def test_the_card_of_an_older_checkpoint_tells_its_own_numbers(tmp_path: Path) -> None:
    _, run = begun(tmp_path, "--max-steps", "8")
    old = run / "checkpoints" / "step-000003"
    assert ndtrain(["export", str(old), str(tmp_path / "old")]) == 0
    steps = read_history(run / "metrics.jsonl").steps
    card = (tmp_path / "old" / "README.md").read_text()
    assert f"| training | {steps[0]['loss']:.4f} | {steps[2]['loss']:.4f} | " in card
    assert "| steps | 3 |" in card
    assert f"| trained tokens | {steps[2]['seen_tokens']} |" in card


def test_the_best_model_of_a_run_that_only_gets_worse_is_a_trained_one(tmp_path: Path) -> None:
    """The model before training is measured too, but there is no checkpoint of it."""
    keys = ("max_steps=4", "eval_steps=1", "learning_rate=1.0", "load_best_model_at_end=true")
    options = [word for key in keys for word in ("--set", key)]
    _, run = begun(tmp_path, *options)
    losses = [one["loss"] for one in read_history(run / "metrics.jsonl").evals]
    assert len(losses) == 5
    assert losses[0] == min(losses)
    best = 1 + losses[1:].index(min(losses[1:]))
    card = (run / "export" / "README.md").read_text()
    assert f"\ntraining_steps: {best}\n" in card


def test_after_an_interrupt_an_older_export_is_said_to_be_one(tmp_path: Path) -> None:
    # so many steps that it cannot end before the signal arrives
    recipe, run = write_recipe(tmp_path, steps=2000, keys="dp_shard_size: 2\n"), tmp_path / "run"
    finish(recipe, "--max-steps", "2")
    command = train(recipe)
    assert when(run, command, lambda status: status.stage == "training" and status.step >= 3)
    with command.paused():
        os.kill(command.pid, signal.SIGINT)
    assert command.wait() == 130, command.text()
    stopped = json.loads((run / "status.json").read_text())["step"]
    *_, files, note, following = command.text().splitlines()
    assert files.startswith(f"files  {run}/: export (of step 2), report.html, ")
    assert note == f"note   For the model of step {stopped}: ndtrain export {run} DEST"
    assert following == f"next   the same command again resumes after step {stopped}"
    # whoever asks the run is answered by what was trained last
    found = find_speaker(str(run))
    assert found.run is not None
    assert found.run.checkpoint.step == stopped
    assert find_speaker(str(run / "export")).run is None


@pytest.mark.parametrize("named", [False, True])
def test_a_start_that_would_end_in_the_past_touches_nothing(tmp_path: Path, named: bool) -> None:
    recipe, run = begun(tmp_path, "--max-steps", "5")
    before = contents(run)
    newest = run / "checkpoints" / "step-000005"
    options = ("--resume", str(newest)) if named else ()
    command = finish(recipe, "--max-steps", "2", *options)
    assert command.text() == (
        f"{newest} is past step 2 (--max-steps); nothing to do. "
        "To train on, leave --max-steps out or raise it.\n"
    )
    assert contents(run) == before
    # at the step itself the export may be all that is left to do
    assert "Stopped (--max-steps) at step 5" in finish(recipe, "--max-steps", "5").text()


def test_a_rate_that_changed_on_the_way_stands_in_card_and_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run = begun(tmp_path, "--max-steps", "2")
    again = finish(recipe, "--max-steps", "3", "--set", "learning_rate=1e-4")
    assert (
        "note   Changed since the checkpoint, and the result with it: "
        "learning_rate: 0.003 -> 0.0001." in again.text()
    )
    finish(recipe, "--max-steps", "4", "--set", "learning_rate=1e-4")
    starts = read_history(run / "metrics.jsonl").starts
    rates = {"learning_rate": {"before": 0.003, "after": 0.0001}}
    assert [start["changed"] for start in starts] == [{}, rates, {}]
    card = (run / "export" / "README.md").read_text().splitlines()
    assert "| learning rate | 0.0001 |" in card
    assert "| changed after step 2 | learning_rate: 0.003 -> 0.0001 |" in card
    assert ndtrain(["compare", str(run), str(run)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[3:5] == [
        f"changed {label} after step 2: learning_rate: 0.003 -> 0.0001" for label in "AB"
    ]
