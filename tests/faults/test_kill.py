"""Ranks, launchers and whole runs are killed; the same command then finishes, bit for bit."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty import (
    Command,
    Moment,
    Trace,
    alive,
    checkpoint_state,
    read_trace,
    start,
    train,
    when,
    write_recipe,
)

from ndtrain.launch.status import RunStatus, read_status


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("undisturbed")
    command = train(write_recipe(folder))
    assert command.wait() == 0, command.text()
    return read_trace(folder / "run")


Since = Callable[[int, Path], Moment]
"""A moment, given the step at which a start begins and the run directory."""


def at(stage: str, offset: int = 0) -> Since:
    """In a stage, some steps after the start's first."""
    return lambda first, run: lambda status: stage in status.stage and status.step >= first + offset


def inside_save(offset: int = 0) -> Since:
    """While files of a checkpoint are being written, some steps after the start's first."""

    def since(first: int, run: Path) -> Moment:
        def now(status: RunStatus) -> bool:
            unfinished = (run / "checkpoints").glob(".unfinished-*")
            return status.step >= first + offset and any(unfinished)

        return now

    return since


SAVES = [at("saving"), *(inside_save(offset) for offset in (0, 1, 3, 4, 6, 2, 5, 7, 9))]
TRAINING = [at("training", offset) for offset in (0, 1, 2, 4, 5, 7, 8, 10)]
OTHERS = [at("starting"), at("evaluating"), at("evaluating", 3), at("starting"), at("exporting")]
MOMENTS = [*SAVES, *TRAINING, *OTHERS]


def finish(recipe: Path) -> Command:
    command = train(recipe)
    assert command.wait() == 0, command.text()
    return command


def begun_at(run: Path) -> int:
    """Where the next start will go on."""
    whole, _ = checkpoint_state(run)
    return max(whole, default=0)


def disturb(folder: Path, moments: list[Since], draw: random.Random) -> dict[str, int]:
    """Kill a random rank at each moment, start again, and let the last start finish."""
    recipe, run = write_recipe(folder), folder / "run"
    counts = {"kills": 0, "inside a save": 0, "half checkpoints": 0}
    for moment in moments:
        command = train(recipe)
        if not when(run, command, moment(begun_at(run), run)):
            assert command.wait() == 0, command.text()
            break
        ranks = command.ranks()
        rank = draw.randrange(4)
        os.kill(ranks[rank], signal.SIGKILL)
        inside = list((run / "checkpoints").glob(".unfinished-*"))
        began = time.monotonic()
        code = command.wait(30)
        if code == 0:
            # It was killed in its very last moment, after its work was done.
            break
        assert code == 1, command.text()
        assert time.monotonic() - began < 15
        assert f"Rank {rank} was killed by signal 9" in command.text()
        assert not alive(ranks)
        status = read_status(run / "status.json")
        assert status is not None
        assert (status.state, status.exit_code) == ("failed", 1)
        counts["kills"] += 1
        counts["inside a save"] += bool(inside)
        counts["half checkpoints"] += len(checkpoint_state(run)[1])
    finish(recipe)
    return counts


def test_three_kills(tmp_path: Path, undisturbed: Trace) -> None:
    moments = [inside_save(), at("training", 4), at("evaluating")]
    counts = disturb(tmp_path, moments, random.Random(1))
    assert counts["kills"] == 3
    assert counts["half checkpoints"] == 0
    assert read_trace(tmp_path / "run") == undisturbed


@pytest.mark.slow
def test_thirty_kills_lose_nothing(tmp_path: Path, undisturbed: Trace) -> None:
    draw = random.Random(2026)
    totals = {"kills": 0, "inside a save": 0, "half checkpoints": 0}
    runs_lost = number = 0
    while totals["kills"] < 30 or totals["inside a save"] < 10:
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        pool = SAVES if number % 2 else MOMENTS
        counts = disturb(folder, draw.sample(pool, 5), draw)
        totals = {name: totals[name] + counts[name] for name in totals}
        runs_lost += read_trace(folder / "run") != undisturbed
        number += 1
        assert number < 20, totals
    print(f"\n{totals | {'runs lost': runs_lost}}")
    assert runs_lost == 0
    assert totals["half checkpoints"] == 0


def signal_and_finish(
    folder: Path, moment: Moment, number: signal.Signals, target: int | None
) -> None:
    """Signal the launcher (target None) or a rank, expect an agreed stop, and finish the run."""
    recipe, run = write_recipe(folder), folder / "run"
    command = train(recipe)
    assert when(run, command, moment), command.text()
    ranks = command.ranks()
    os.kill(command.pid if target is None else ranks[target], number)
    code = command.wait(60)
    assert code == (130 if number is signal.SIGINT else 143), command.text()
    assert not alive(ranks)
    status = read_status(run / "status.json")
    assert status is not None
    whole, broken = checkpoint_state(run)
    assert broken == []
    if status.state == "stopped":
        assert max(whole, default=0) == status.step
    finish(recipe)


STOPS: list[tuple[str, int, signal.Signals, int | None]] = [
    # stage, step, signal, rank or launcher
    ("training", 5, signal.SIGTERM, None),
    ("training", 10, signal.SIGTERM, 2),
    ("evaluating", 7, signal.SIGTERM, None),
    ("evaluating", 0, signal.SIGTERM, 3),
    ("is saved", 3, signal.SIGTERM, None),
    ("saving", 6, signal.SIGTERM, 1),
    ("starting", 0, signal.SIGTERM, None),
    ("training", 8, signal.SIGUSR1, 0),
    ("training", 13, signal.SIGINT, None),
    ("is saved", 9, signal.SIGINT, None),
]


@pytest.mark.parametrize(
    ("stage", "step", "number", "target"),
    [
        pytest.param(*stop, marks=[] if position == 1 else [pytest.mark.slow])
        for position, stop in enumerate(STOPS)
    ],
)
def test_a_stop_anywhere_is_complete_and_continues(
    tmp_path: Path,
    undisturbed: Trace,
    stage: str,
    step: int,
    number: signal.Signals,
    target: int | None,
) -> None:
    def moment(status: RunStatus) -> bool:
        return stage in status.stage and status.step >= step

    signal_and_finish(tmp_path, moment, number, target)
    assert read_trace(tmp_path / "run") == undisturbed


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    command = train(recipe)
    assert when(run, command, lambda status: status.stage == "training" and status.step >= 2)
    ranks = command.ranks()
    # The first rank cannot answer the first interrupt.
    os.kill(ranks[0], signal.SIGSTOP)
    os.kill(command.pid, signal.SIGINT)
    time.sleep(0.5)
    began = time.monotonic()
    os.kill(command.pid, signal.SIGINT)
    assert command.wait(20) == 130
    assert time.monotonic() - began < 5
    assert "nothing more was saved" in command.text()
    assert not alive(ranks)


def test_a_second_interrupt_does_not_wait_for_a_long_step(tmp_path: Path) -> None:
    """One process, inside a call of torch that takes several times as long as is allowed here."""
    run = tmp_path / "run"
    row = {"text": "tensor " * 4000}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model_config: {model_type: llama, hidden_size: 512, intermediate_size: 64, "
        "num_hidden_layers: 1, num_attention_heads: 16, head_dim: 128, vocab_size: 300}\n"
        f"tokenizer_config: bytes\ndatasets: [{{path: {tmp_path}/rows.jsonl, type: completion}}]\n"
        f"sequence_len: 20000\nlearning_rate: 1e-4\nmax_steps: 2\ndevice: cpu\noutput_dir: {run}\n"
    )
    command = train(recipe)
    deadline = time.monotonic() + 60
    while (status := read_status(run / "status.json")) is None or status.stage != "training":
        assert command.poll() is None, command.text()
        assert time.monotonic() < deadline, command.text()
        time.sleep(0.05)
    time.sleep(3)  # into the attention
    os.kill(command.pid, signal.SIGINT)
    time.sleep(0.5)
    began = time.monotonic()
    os.kill(command.pid, signal.SIGINT)
    assert command.wait(120) == 130
    assert time.monotonic() - began < 5
    assert "Ctrl-C again ends at once without one." in command.text()
    assert command.text().endswith("Stopped at once; nothing more was saved.\n")
    assert checkpoint_state(run) == ([], [])


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_no_rank_outlives_its_launcher(
    tmp_path: Path, undisturbed: Trace, number: signal.Signals
) -> None:
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    command = train(recipe)
    assert when(run, command, lambda status: status.stage == "training" and status.step >= 4)
    ranks = command.ranks()
    assert len(ranks) == 4
    os.kill(command.pid, number)
    command.wait(20)
    deadline = time.monotonic() + 10
    while alive(ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(ranks)
    finish(recipe)
    assert read_trace(run) == undisturbed


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_after_the_timeout(tmp_path: Path) -> None:
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    command = train(recipe, "--set", "ddp_timeout=10")
    assert when(run, command, lambda status: status.stage == "training" and status.step >= 4)
    ranks = command.ranks()
    os.kill(ranks[2], signal.SIGSTOP)
    began = time.monotonic()
    assert command.wait(60) == 3, command.text()
    assert time.monotonic() - began < 10 + 15
    text = command.text()
    assert "A collective did not finish within 10 s in " in text
    assert "rank 2 did not take part (rank 2 was last seen" in text
    assert not alive(ranks)


@pytest.mark.slow
def test_restarts_need_no_person(tmp_path: Path, undisturbed: Trace) -> None:
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    command = train(recipe, "--max-restarts", "2")
    for step in (4, 11):
        assert when(
            run,
            command,
            lambda status, step=step: status.stage == "training" and status.step >= step,
        ), command.text()
        os.kill(command.ranks()[1], signal.SIGKILL)
    assert command.wait() == 0, command.text()
    assert command.text().count("Restarting all ranks") == 2
    assert read_trace(run) == undisturbed


def test_a_finished_run_started_again_touches_nothing(tmp_path: Path) -> None:
    recipe, run = write_recipe(tmp_path, steps=4), tmp_path / "run"
    finish(recipe)

    def state() -> dict[Path, tuple[int, int]]:
        found = (path for path in run.rglob("*") if path.is_file())
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in found}

    before = state()
    command = finish(recipe)
    assert "finished after 4 steps; nothing to do" in command.text()
    assert state() == before


def test_a_finished_run_with_other_keys_touches_nothing_and_names_them(tmp_path: Path) -> None:
    recipe, run = write_recipe(tmp_path, steps=4, keys=""), tmp_path / "run"
    finish(recipe)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    command = train(recipe, "--set", "learning_rate=5e-4", "--set", "save_steps=2")
    assert command.wait() == 0, command.text()
    assert command.text().splitlines()[-1] == (
        f"{run} is finished after 4 steps; nothing to do. Changed since then, and not trained: "
        "learning_rate: 0.003 -> 0.0005; save_steps: 3.0 -> 2.0. "
        "Train it anew with --restart, or on with a higher num_epochs or max_steps."
    )
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    command = train(recipe, "--set", "max_steps=6")
    assert command.wait() == 0, command.text()
    status = read_status(run / "status.json")
    assert status is not None
    assert (status.state, status.step) == ("finished", 6)


@pytest.mark.slow
def test_max_time_saves_and_exits_143(tmp_path: Path, undisturbed: Trace) -> None:
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    command = train(recipe, "--max-time", "1s")
    assert command.wait() == 143, command.text()
    status = read_status(run / "status.json")
    assert status is not None
    assert status.state == "stopped"
    # none is saved where the time is over within the first evaluation
    assert max(checkpoint_state(run)[0], default=0) == status.step
    finish(recipe)
    assert read_trace(run) == undisturbed


def test_help_needs_no_ranks(tmp_path: Path) -> None:
    command = start(tmp_path, "train", "--help")
    assert command.wait() == 0
    assert "--max-restarts" in command.text()
