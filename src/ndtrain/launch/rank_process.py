"""Inside one started rank: its environment, its log, its end, and the tie to its launcher."""

import contextlib
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, NoReturn, TypeVar

from ndtrain import environment
from ndtrain.environment import LaunchedRank
from ndtrain.launch.failure import describe_failure
from ndtrain.launch.lifeline import STOP_SIGNALS, die_with_parent
from ndtrain.launch.status import rank_state_path, read_status

JobT = TypeVar("JobT")

STACK_SIGNAL = signal.SIGUSR2
"""On this signal a rank writes the stacks of its threads beside its log."""


@dataclass(frozen=True)
class RankStart:
    """What a rank gets from its launcher beside the job.

    Attributes:
        parent: process id of the launcher.
        lifeline: a pipe whose other end only the launcher holds.
        launcher_end: the launcher's end, of which a fork makes a copy that must be closed.
        report: where this rank sends its failure.
        threads: CPU threads to use; None keeps what the user set.
        interface: network interface for gloo.
    """

    rank: LaunchedRank
    parent: int
    lifeline: Connection
    launcher_end: int | None
    report: Connection
    logs: Path
    status: Path
    threads: int | None
    interface: str | None


def rank_main(
    start: RankStart, job: JobT, run_rank: Callable[[JobT, LaunchedRank | None], int]
) -> NoReturn:
    """Run one rank and leave with its exit code; a failure is sent to the launcher."""
    # What the fork inherited is never collected here: its destructors may join threads that only
    # the launcher has. The launcher forks with collection off.
    gc.freeze()
    gc.enable()
    # A session of its own: a Ctrl-C in the terminal reaches the ranks once, through the launcher.
    os.setsid()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if start.launcher_end is not None:
        os.close(start.launcher_end)
    die_with_parent(start.parent, start.lifeline)
    log = _open_log(start)
    environment.export_rank(start.rank, threads=start.threads, interface=start.interface)
    _limit_threads(start.threads)
    try:
        code = int(run_rank(job, start.rank))
    except BaseException as error:
        code = _leave_failure(start, error, log)
    for stream in (sys.stdout, sys.stderr, log):
        # a disk without space for the log must not change the exit code
        with contextlib.suppress(OSError):
            stream.flush()
    # Not sys.exit: threads of a broken process group would hold the interpreter.
    os._exit(code)


def _open_log(start: RankStart) -> IO[str]:
    """The rank's log; ranks other than the first send all their output there."""
    path = start.logs / f"rank-{start.rank.rank}.log"
    log = path.open("a", buffering=1, encoding="utf-8", errors="replace")
    stacks = stacks_path(start.logs, start.rank.rank).open("w", encoding="utf-8")
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    if start.rank.rank > 0:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log
        faulthandler.enable(log)
    return log


def stacks_path(logs: Path, rank: int) -> Path:
    """Where a stuck rank's stacks are written."""
    return logs / f"rank-{rank}.stacks.txt"


def _stacks(logs: Path, rank: int) -> str:
    try:
        return stacks_path(logs, rank).read_text(encoding="utf-8")
    except OSError:
        return ""


def gave_stacks(logs: Path, rank: int) -> bool:
    """Whether a rank was able to say where it stands."""
    return bool(_stacks(logs, rank))


def waits_for_others(logs: Path, rank: int) -> bool:
    """Whether a rank's stack shows it inside a collective, or about to report one."""
    text = _stacks(logs, rank)
    # The thread that got the signal is the main one.
    main_thread = text.partition("Current thread")[2].partition("\n\n")[0]
    return "torch/distributed/" in main_thread or _leave_failure.__name__ in main_thread


def _limit_threads(threads: int | None) -> None:
    """Share the cores; torch, imported before the fork, has read its variables already."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _leave_failure(start: RankStart, error: BaseException, log: IO[str]) -> int:
    """Tell the launcher what went wrong, and the log too; returns the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    rank = start.rank.rank
    path = start.status if rank == 0 else rank_state_path(start.logs, rank)
    status = read_status(path)
    failure = describe_failure(
        error,
        rank=rank,
        stage=status.stage if status else "starting",
        step=status.step if status else 0,
    )
    start.report.send(failure)
    # a full disk takes no traceback; the launcher has it
    with contextlib.suppress(OSError):
        log.write(failure.traceback)
    return failure.exit_code
