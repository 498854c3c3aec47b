"""Which of several failures is the cause."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from ndtrain.errors import CheckpointError, DataError, ExitCode, MeshError, NdtrainError
from ndtrain.launch.failure import Failure, describe_failure
from ndtrain.launch.rank_process import stacks_path
from ndtrain.launch.status import StatusWriter, rank_state_path
from ndtrain.launch.verdict import RankEnd, Verdict, judge, read_verdict, write_verdict

PEER = RuntimeError("[..] Connection closed by peer [127.0.0.1]:1")
TIMEOUT = RuntimeError("Timed out waiting 2000ms for recv operation to complete")


def fail(rank: int, error: Exception, when: float) -> Failure:
    fields = vars(describe_failure(error, rank=rank, stage="training", step=7))
    return Failure(**(fields | {"time": when}))


def verdict(
    tmp_path: Path, ends: list[RankEnd], *failures: Failure, memory_kills: int = 0
) -> Verdict:
    return judge(
        ends,
        {failure.rank: failure for failure in failures},
        logs=tmp_path,
        status=tmp_path / "status.json",
        timeout_seconds=30,
        memory_kills=memory_kills,
    )


def ends(*codes: int, when: float = 100.0) -> list[RankEnd]:
    return [RankEnd(rank, code, when) for rank, code in enumerate(codes)]


def test_all_zero_is_success(tmp_path: Path) -> None:
    assert verdict(tmp_path, ends(0, 0)) == Verdict(0)


@pytest.mark.parametrize("code", [130, 143])
def test_an_agreed_stop_is_no_failure(tmp_path: Path, code: int) -> None:
    assert verdict(tmp_path, ends(code, code)) == Verdict(code)


def test_the_cause_wins_over_its_echoes_even_when_they_are_earlier(tmp_path: Path) -> None:
    found = verdict(
        tmp_path,
        ends(3, 4, 3),
        fail(0, PEER, 99.0),
        fail(1, DataError("row 7."), 99.5),
        fail(2, TIMEOUT, 98.0),
    )
    assert isinstance(found.error, DataError)
    assert found.exit_code == ExitCode.DATA
    assert not found.can_restart


def test_a_kill_wins_over_echoes(tmp_path: Path) -> None:
    found = verdict(tmp_path, ends(3, -9), fail(0, PEER, 99.9))
    assert "Rank 1 was killed by signal 9 (out of memory, or from outside)" in str(found.error)
    assert found.can_restart


def test_a_kill_for_memory_is_named_as_such(tmp_path: Path) -> None:
    found = verdict(tmp_path, ends(-9), memory_kills=1)
    assert found.exit_code == ExitCode.MEMORY
    assert "the host ran out of memory" in str(found.error)


def test_a_kill_by_the_launcher_itself_is_no_cause(tmp_path: Path) -> None:
    killed = RankEnd(0, -9, 100.0, by_launcher=True)
    found = verdict(tmp_path, [killed, RankEnd(1, 1, 99.0)], fail(1, KeyError("x"), 99.0))
    assert "KeyError: 'x' (rank 1, training, step 7)" in str(found.error)
    assert found.exit_code == ExitCode.FAULT


@pytest.mark.parametrize(("number", "code"), [(15, 143), (2, 130)])
def test_a_stop_during_start_up_is_a_stop(tmp_path: Path, number: int, code: int) -> None:
    assert verdict(tmp_path, ends(-number, 3), fail(1, PEER, 101.0)) == Verdict(code)


def test_a_hang_names_stage_timeout_and_the_missing_rank(tmp_path: Path) -> None:
    StatusWriter(rank_state_path(tmp_path, 1), "run").enter("evaluating", step=6)
    killed = RankEnd(1, -9, 140.0, by_launcher=True)
    found = verdict(tmp_path, [RankEnd(0, 3, 130.0), killed], fail(0, TIMEOUT, 129.0))
    text = str(found.error)
    assert isinstance(found.error, MeshError)
    assert "did not finish within 30 s in training, step 7" in text
    assert "rank 1 did not take part (rank 1 was last seen" in text
    assert "in evaluating, step 6)" in text


def test_a_rank_that_does_not_answer_comes_before_one_at_work(tmp_path: Path) -> None:
    """Rank 2 belongs to another group and computes; rank 1 cannot even write its stacks."""
    by_us = [RankEnd(rank, -9, 140.0, by_launcher=True) for rank in (1, 2)]
    working = "Current thread 0x1 (most recent call first):\n  File model.py, line 3 in forward\n\n"
    stacks_path(tmp_path, 1).write_text("")
    stacks_path(tmp_path, 2).write_text(working)
    hung = [RankEnd(0, 3, 130.0), *by_us]
    assert "rank 1 did not take part" in str(verdict(tmp_path, hung, fail(0, TIMEOUT, 129.0)).error)
    stacks_path(tmp_path, 1).write_text(working)
    found = verdict(tmp_path, hung, fail(0, TIMEOUT, 129.0))
    assert "ranks 1, 2 did not take part" in str(found.error)


def test_ranks_that_only_lost_another_node_know_nothing(tmp_path: Path) -> None:
    assert verdict(tmp_path, ends(3, 3), fail(0, PEER, 1.0), fail(1, PEER, 2.0)).is_hearsay
    by_us = [RankEnd(0, -9, 1.0, by_launcher=True)]
    assert verdict(tmp_path, by_us).is_hearsay


def test_a_silent_exit_points_to_the_log(tmp_path: Path) -> None:
    found = verdict(tmp_path, ends(0, 77))
    assert "Rank 1 ended with exit code 77" in str(found.error)
    assert found.exit_code == ExitCode.FAULT


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (DataError("x"), "error", 4),
        (torch.OutOfMemoryError("CUDA out of memory"), "error", 6),
        (MemoryError(), "error", 6),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 bytes"), "error", 6),
        (PEER, "peer", 3),
        (TIMEOUT, "timeout", 3),
        (ValueError("timed out is only a word here"), "fault", 1),
        (KeyboardInterrupt(), "error", 130),
    ],
)
def test_failures_by_kind(error: BaseException, kind: str, code: int) -> None:
    found = describe_failure(error)
    assert (found.kind, found.exit_code) == (kind, code)


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (PEER, "peer"),
        (TIMEOUT, "timeout"),
        (CheckpointException("save", {1: (PEER, None)}), "peer"),  # type: ignore[dict-item]
        (CheckpointException("save", {1: (OSError(28, "full"), None)}), "error"),  # type: ignore[dict-item]
        (OSError(28, "No space left on device"), "error"),
    ],
)
def test_a_save_that_lost_a_rank_is_an_echo(cause: BaseException, kind: str) -> None:
    error = CheckpointError("could not be written.")
    error.__cause__ = cause
    assert describe_failure(error).kind == kind


def test_a_full_disk_is_named_wherever_it_strikes() -> None:
    found = describe_failure(OSError(28, "No space left on device", "runs/a/metrics.jsonl"))
    assert (found.kind, found.exit_code, found.where) == ("error", 5, "runs/a/metrics.jsonl")
    assert found.message == "cannot be written: No space left on device."
    assert describe_failure(OSError(2, "No such file or directory", "a")).kind == "fault"


def test_a_verdict_crosses_nodes() -> None:
    sent = Verdict(4, DataError("row 7.", where="a:7", hint="Fix it."))
    got = read_verdict(write_verdict(sent, node=1))
    assert str(got.error) == "a:7: Node 1: row 7. Fix it."
    assert isinstance(got.error, DataError)
    unknown = read_verdict(write_verdict(Verdict(99, NdtrainError("?")), node=0))
    assert (unknown.exit_code, type(unknown.error)) == (99, NdtrainError)
