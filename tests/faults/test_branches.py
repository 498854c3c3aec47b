"""Going back, going on elsewhere, stopping within an evaluation: one past, and the same result."""

import os
import signal
from pathlib import Path

import pytest
from faulty import Command, checkpoint_state, read_trace, start, starts, train, when, write_recipe

from ndtrain.launch.status import RunStatus, read_status
from ndtrain.report.metrics import read_history, read_metrics


def finish(recipe: Path, *options: str) -> Command:
    command = train(recipe, *options)
    assert command.wait() == 0, command.text()
    return command


def kept(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


def begun(folder: Path, *options: str, keys: str = "") -> tuple[Path, Path]:
    recipe = write_recipe(folder, keys=keys)
    finish(recipe, "--set", "save_total_limit=null", *options)
    return recipe, folder / "run"


def test_going_back_leaves_the_other_branch_behind(tmp_path: Path) -> None:
    recipe, run = begun(tmp_path, "--max-steps", "12")
    back = ("--set", "save_total_limit=1", "--set", "learning_rate=1e-3")
    old = run / "checkpoints" / "step-000003"
    told = finish(recipe, *back, "--resume", str(old), "--max-steps", "7").text()
    left = [f"step-{step:06d}.left" for step in (6, 9, 12)]
    assert f"Back at step 3: what this run had saved of other steps is kept as {', '.join(left)} in"
    assert ", ".join(left) in told
    assert kept(run) == sorted([*left, "step-000007"])
    # what goes on is the new branch, for a start as for whoever asks the run
    again = finish(recipe, *back, "--max-steps", "8").text()
    assert "resumes after step 7" in again
    losses = {one["step"]: one["loss"] for one in read_history(run / "metrics.jsonl").steps}
    assert sorted(losses) == list(range(1, 9))
    command = start(tmp_path, "export", str(run), str(tmp_path / "out"))
    assert command.wait() == 0, command.text()
    assert "step 8" in command.text()
    # a second way back finds the names taken
    finish(recipe, "--set", "save_total_limit=null", "--max-steps", "12")
    finish(recipe, "--resume", str(run / "checkpoints" / "step-000009"), "--max-steps", "10")
    assert "step-000012.left-2" in kept(run)


def test_a_lost_rank_goes_on_with_the_branch_it_was_on(tmp_path: Path) -> None:
    recipe, run = begun(tmp_path, "--max-steps", "12", keys="dp_shard_size: 2\n")
    old = run / "checkpoints" / "step-000003"
    # this branch saves nothing before its rank is lost
    options = ("--resume", str(old), "--max-restarts", "1", "--set", "save_steps=24")
    command = train(recipe, *options)
    assert when(run, command, lambda status: status.stage == "training" and status.step >= 3)
    os.kill(command.ranks()[1], signal.SIGKILL)
    assert command.wait() == 0, command.text()
    assert list(starts(run)) == [0, 3, 3]


def test_a_lost_rank_of_a_run_that_goes_on_elsewhere_does_not_begin_anew(tmp_path: Path) -> None:
    keys = "dp_shard_size: 2\n"
    recipe, run = begun(tmp_path, "--max-steps", "5", keys=keys)
    old = run / "checkpoints" / "step-000005"
    other = tmp_path / "other"
    options = ("--set", f"output_dir={other}", "--resume", str(old), "--max-restarts", "1")
    command = train(recipe, *options, "--set", "save_steps=24")
    assert when(other, command, lambda status: status.stage == "training" and status.step >= 5)
    os.kill(command.ranks()[0], signal.SIGKILL)
    assert command.wait() == 0, command.text()
    assert list(starts(other)) == [5, 5]


def test_a_run_that_goes_on_from_another_one_has_no_past_of_its_own(tmp_path: Path) -> None:
    recipe, run = begun(tmp_path, "--max-steps", "6")
    other = ("--set", f"output_dir={tmp_path / 'other'}")
    finish(recipe, *other, "--max-steps", "9")
    finish(recipe, *other, "--resume", str(run / "checkpoints" / "step-000006"), "--max-steps", "7")
    assert list(starts(tmp_path / "other")) == [0, 6]
    assert kept(tmp_path / "other") == [
        *(f"step-{step:06d}.left" for step in (3, 6)),
        "step-000007",
        "step-000009.left",
    ]


def test_a_finished_run_may_take_its_last_steps_again(tmp_path: Path) -> None:
    recipe, run = begun(tmp_path, "--set", "max_steps=6")
    options = ("--set", "max_steps=6", "--set", "save_total_limit=null")
    assert "is finished after 6 steps; nothing to do." in finish(recipe, *options).text()
    finish(recipe, *options, "--resume", str(run / "checkpoints" / "step-000003"))
    assert list(starts(run)) == [0, 3]
    assert kept(run) == ["step-000003", "step-000006", "step-000006.left"]


@pytest.mark.parametrize(
    "mesh",
    ["dp_shard_size: 2\n", pytest.param("tensor_parallel_size: 2\n", marks=pytest.mark.slow)],
)
def test_a_stop_within_an_evaluation_waits_for_no_more_rows(tmp_path: Path, mesh: str) -> None:
    keys = f"{mesh}sample_prompts: [Hello]\nearly_stopping_patience: 9\n"
    sizes = {"rows": 340, "steps": 9, "keys": keys}
    whole = tmp_path / "whole"
    whole.mkdir()
    held = ("--set", "val_set_size=280")
    finish(write_recipe(whole, **sizes), *held)

    recipe, run = write_recipe(tmp_path, **sizes), tmp_path / "run"
    for step in (0, 7):
        command = train(recipe, *held)

        def evaluating(status: RunStatus, step: int = step) -> bool:
            return status.state == "evaluating" and status.step == step

        assert when(run, command, evaluating), command.text()
        os.kill(command.pid, signal.SIGTERM)
        assert command.wait() == 143, command.text()
        status = read_status(run / "status.json")
        assert status is not None
        assert (status.state, status.step) == ("stopped", step)
        told = [one for one in read_metrics(run / "metrics.jsonl") if one["event"] == "eval"]
        assert step not in [one["step"] for one in told]
        # before the first step there is nothing to save, which is said
        assert ("there is nothing to save" in command.text()) == (step == 0)
    assert checkpoint_state(run)[0][-1] == 7
    finish(recipe, *held)
    assert read_trace(run) == read_trace(whole / "run")


def test_an_early_stop_stays_one_until_its_patience_changes(tmp_path: Path) -> None:
    keys = "early_stopping_patience: 1\neval_steps: 2\nlearning_rate: 1.0\n"
    recipe = write_recipe(tmp_path, keys="")
    recipe.write_text(
        "".join(
            line
            for line in recipe.read_text().splitlines(keepends=True)
            if not line.startswith(("eval_steps", "learning_rate"))
        )
        + keys
    )
    run = tmp_path / "run"
    assert "Stopped (early stopping)" in finish(recipe, "--set", "export=false").text()
    status = read_status(run / "status.json")
    assert status is not None
    ended = status.step
    for options in ((), ("--set", "logging_steps=2")):
        told = finish(recipe, *options).text()
        assert f"Stopped (early stopping) at step {ended}" in told
        wanted = f"used up at step {ended}: raise or remove it to train on."
        assert f"note   early_stopping_patience was {wanted}" in told
        assert f"\ntraining_steps: {ended}\n" in (run / "export" / "README.md").read_text()
    assert max(one["step"] for one in read_history(run / "metrics.jsonl").steps) == ended
    more = finish(recipe, "--set", "early_stopping_patience=100", "--max-steps", str(ended + 1))
    assert f"Stopped (--max-steps) at step {ended + 1}" in more.text()


def test_a_best_step_without_a_checkpoint_costs_no_model(tmp_path: Path) -> None:
    recipe, run = begun(tmp_path, "--max-steps", "9", "--set", "save_steps=9")
    best = read_history(run / "metrics.jsonl").evals[-1]["step"]
    assert best == 7
    told = finish(recipe, "--set", "load_best_model_at_end=true", "--max-steps", "10").text()
    assert "The best evaluation so far, at step 7, has no checkpoint in" in told
    assert "the best model is looked for from step 9 on" in told
    assert "\ntraining_steps: 10\n" in (run / "export" / "README.md").read_text()
