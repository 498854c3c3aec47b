"""Out of how every rank ended: which failure is the cause, and the run's exit code."""

import json
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ndtrain.errors import ExitCode, MeshError, NdtrainError, OutOfMemoryError
from ndtrain.launch.failure import MEMORY_HINT, Failure, error_for_code, error_of
from ndtrain.launch.rank_process import gave_stacks, stacks_path, waits_for_others
from ndtrain.launch.status import RunStatus, rank_state_path, read_status

STOP_CODES = (ExitCode.SIGINT, ExitCode.SIGTERM)

RESTARTABLE = (ExitCode.FAULT, ExitCode.MESH)
"""Exit codes after which trying again can help: a lost rank, a broken connection."""

_STOPPED_BY = {signal.SIGINT: ExitCode.SIGINT, signal.SIGTERM: ExitCode.SIGTERM}
_SECONDS_APART = 0.5


@dataclass(frozen=True)
class RankEnd:
    """How a rank's process ended.

    Attributes:
        code: exit code, negative for the signal that killed it.
        time: when the launcher saw it.
        by_launcher: the launcher ended it after another one had failed.
    """

    rank: int
    code: int
    time: float
    by_launcher: bool = False

    @property
    def is_failure(self) -> bool:
        """Whether the run cannot go on, neither ended nor stopped as asked."""
        return self.code != 0 and self.code not in STOP_CODES


@dataclass(frozen=True)
class Verdict:
    """The outcome of one attempt: an exit code, and the error behind it if it failed.

    Attributes:
        is_hearsay: these ranks only noticed that others are gone.
    """

    exit_code: int
    error: NdtrainError | None = None
    traceback: str = ""
    is_hearsay: bool = False

    @property
    def can_restart(self) -> bool:
        """Whether the same ranks may be tried again."""
        return self.error is not None and self.exit_code in RESTARTABLE


def judge(
    ends: Sequence[RankEnd],
    failures: Mapping[int, Failure],
    *,
    logs: Path,
    status: Path,
    timeout_seconds: float,
    memory_kills: int = 0,
) -> Verdict:
    """The verdict over an attempt whose ranks have all ended.

    Args:
        ends: how each local rank ended.
        failures: what ranks left in their error files.
        memory_kills: processes the kernel killed for memory meanwhile.
    """
    if not any(end.is_failure for end in ends):
        return Verdict(max((end.code for end in ends), default=0))
    killed = sorted(
        (end for end in ends if end.code < 0 and not end.by_launcher), key=lambda end: end.time
    )
    first_hand = sorted((f for f in failures.values() if f.is_first_hand), key=lambda f: f.time)
    if first_hand and not (killed and killed[0].time + _SECONDS_APART < first_hand[0].time):
        return _verdict_of(first_hand[0], logs)
    if killed:
        return _killed(killed[0], logs, memory_kills)
    stopped = [end.code for end in ends if end.code in STOP_CODES]
    if stopped:
        # One rank was stopped before it could tell the others; they only miss it.
        return Verdict(max(stopped))
    waiting = {rank: f for rank, f in failures.items() if f.kind == "timeout"}
    if waiting:
        return _hung(ends, failures, logs=logs, status=status, timeout_seconds=timeout_seconds)
    peers = sorted(failures.values(), key=lambda f: f.time)
    if peers:
        return _verdict_of(peers[0], logs)
    end = next((end for end in ends if end.is_failure and not end.by_launcher), None)
    if end is None:
        error = MeshError("Another node has ended this attempt.")
        return Verdict(ExitCode.MESH, error, is_hearsay=True)
    return Verdict(
        ExitCode.FAULT,
        NdtrainError(
            f"Rank {end.rank} ended with exit code {end.code} and left no message.",
            where=str(logs / f"rank-{end.rank}.log"),
            hint="Look into its log.",
        ),
    )


def _verdict_of(failure: Failure, logs: Path) -> Verdict:
    error = error_of(failure)
    if failure.kind != "error":
        log = logs / f"rank-{failure.rank}.log"
        error = type(error)(
            f"{failure.message} (rank {failure.rank}, {failure.stage}, step {failure.step}).",
            where=str(log),
            hint="The whole traceback is in this log, or comes with --debug.",
        )
    return Verdict(failure.exit_code, error, failure.traceback, failure.kind == "peer")


def _killed(end: RankEnd, logs: Path, memory_kills: int) -> Verdict:
    number = signal.Signals(-end.code)
    if number in _STOPPED_BY:
        # Signalled before it listened, during start-up: nothing was lost.
        return Verdict(_STOPPED_BY[number])
    if number is signal.SIGKILL and memory_kills:
        return Verdict(
            ExitCode.MEMORY,
            OutOfMemoryError(
                f"Rank {end.rank} was killed by signal 9: the host ran out of memory.",
                where=str(logs / f"rank-{end.rank}.log"),
                hint=MEMORY_HINT,
            ),
        )
    reason = " (out of memory, or from outside)" if number is signal.SIGKILL else ""
    return Verdict(
        ExitCode.FAULT,
        NdtrainError(
            f"Rank {end.rank} was killed by signal {number.value}{reason}.",
            where=str(logs / f"rank-{end.rank}.log"),
            hint="Run the same command again: it continues from the newest whole checkpoint.",
        ),
    )


def _hung(
    ends: Sequence[RankEnd],
    failures: Mapping[int, Failure],
    *,
    logs: Path,
    status: Path,
    timeout_seconds: float,
) -> Verdict:
    """Ranks that waited in vain know where; those that said nothing are the missing ones."""
    first = min((f for f in failures.values() if f.kind == "timeout"), key=lambda f: f.time)
    silent = (end.rank for end in ends if end.rank not in failures)
    missing = sorted(rank for rank in silent if not waits_for_others(logs, rank))
    # Ranks of other groups may be at work still; one that does not even answer is the cause.
    missing = [rank for rank in missing if not gave_stacks(logs, rank)] or missing
    if missing:
        names = ", ".join(str(rank) for rank in missing)
        last = _last_seen(read_status(_state_path(missing[0], logs, status)))
        who = (
            f"rank{'s' if len(missing) > 1 else ''} {names} did not take part "
            f"(rank {missing[0]} {last})"
        )
        log = stacks_path(logs, missing[0])
        hint = "This file shows where it stood. If it was only slow, raise ddp_timeout."
    else:
        who = "every rank waited, so they had parted ways before"
        log = logs / f"rank-{first.rank}.log"
        hint = "Compare the ranks' logs; if one was only slow, raise ddp_timeout."
    return Verdict(
        ExitCode.MESH,
        MeshError(
            f"A collective did not finish within {timeout_seconds:g} s in {first.stage}, "
            f"step {first.step}: {who}.",
            where=str(log),
            hint=hint,
        ),
        first.traceback,
    )


def _state_path(rank: int, logs: Path, status: Path) -> Path:
    return status if rank == 0 else rank_state_path(logs, rank)


def _last_seen(status: RunStatus | None) -> str:
    if status is None:
        return "never reported"
    ago = max(0.0, time.time() - status.heartbeat)
    return f"was last seen {ago:.0f} s ago in {status.stage}, step {status.step}"


def write_verdict(verdict: Verdict, node: int) -> str:
    """A failed verdict as text for the other nodes."""
    error = verdict.error
    assert error is not None
    return json.dumps(
        {
            "exit_code": verdict.exit_code,
            "message": f"Node {node}: {error.message}",
            "where": error.where,
            "hint": error.hint,
        }
    )


def read_verdict(text: str) -> Verdict:
    """The verdict another node has written."""
    fields = json.loads(text)
    code = int(fields["exit_code"])
    error = error_for_code(code, fields["message"], where=fields["where"], hint=fields["hint"])
    return Verdict(code, error)
