"""The launcher's side: start the ranks, forward signals, end all when one fails, try again."""

import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn, TypeVar

import torch

from ndtrain import environment
from ndtrain.environment import LaunchedRank
from ndtrain.errors import CheckpointError, ExitCode
from ndtrain.launch.failure import Failure
from ndtrain.launch.lifeline import STOP_SIGNALS
from ndtrain.launch.options import LaunchOptions
from ndtrain.launch.rank_process import (
    STACK_SIGNAL,
    RankStart,
    rank_main,
    stacks_path,
)
from ndtrain.launch.rendezvous import Meeting
from ndtrain.launch.status import note_failure, rank_state_path
from ndtrain.launch.verdict import RankEnd, Verdict, judge

JobT = TypeVar("JobT")

POLL_SECONDS = 0.1
REPORT_SECONDS = 5.0
"""How long ranks may still report on their own after the first one has failed."""


def supervise(
    job: JobT, run_rank: Callable[[JobT, LaunchedRank | None], int], options: LaunchOptions
) -> int:
    """Start this node's ranks and answer for them until all have ended.

    Raises:
        NdtrainError: the first real failure, when no restart is left.
    """
    try:
        options.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot be written: {error.strerror}.",
            where=str(options.logs),
            hint="Set output_dir to a folder that you may write to.",
        ) from error
    meeting = Meeting(options)
    try:
        return _attempts(job, run_rank, options, meeting)
    finally:
        meeting.close()


def _attempts(
    job: JobT,
    run_rank: Callable[[JobT, LaunchedRank | None], int],
    options: LaunchOptions,
    meeting: Meeting,
) -> int:
    while True:
        verdict = meeting.join() or _Attempt(options, meeting).run(job, run_rank)
        if verdict.error is None:
            meeting.end(verdict)
            return verdict.exit_code
        # What another node has said about the run comes before its echo in our own ranks.
        final = meeting.verdict(after=verdict)
        if final is None and verdict.can_restart and meeting.next_attempt():
            _announce_restart(verdict, meeting, options)
            continue
        _fail(final or verdict, meeting, options)


def _announce_restart(verdict: Verdict, meeting: Meeting, options: LaunchOptions) -> None:
    print(
        f"{verdict.error}\nRestarting all ranks from the newest whole checkpoint "
        f"({options.max_restarts} restarts at most).",
        file=sys.stderr,
        flush=True,
    )


def _fail(verdict: Verdict, meeting: Meeting, options: LaunchOptions) -> NoReturn:
    assert verdict.error is not None
    meeting.end(verdict)
    try:
        note_failure(options.status, verdict.exit_code, str(verdict.error))
    except CheckpointError as error:
        # a full disk that ended the run takes no status either
        verdict.error.add_note(str(error))
    if verdict.traceback:
        verdict.error.add_note(verdict.traceback)
    raise verdict.error


class _Attempt:
    """One set of ranks, from start to the last one's end."""

    def __init__(self, options: LaunchOptions, meeting: Meeting) -> None:
        self._options = options
        self._meeting = meeting
        self._processes: dict[int, BaseProcess] = {}
        self._ends: dict[int, RankEnd] = {}
        self._reports: dict[int, Connection] = {}
        self._failures: dict[int, Failure] = {}
        self._signals: list[int] = []
        self._ended_by_us: set[int] = set()
        self._lifeline: Connection | None = None

    def run(self, job: JobT, run_rank: Callable[[JobT, LaunchedRank | None], int]) -> Verdict:
        """Start the ranks, watch them, and judge."""
        self._remove_old_reports()
        kills_before = memory_kills()
        with self._listening():
            try:
                self._start(job, run_rank)
                verdict = self._watch()
            finally:
                self._kill(list(self._running()))
                self._join()
                for connection in self._reports.values():
                    connection.close()
                if self._lifeline is not None:
                    self._lifeline.close()
        if verdict is not None:
            return verdict
        return judge(
            list(self._ends.values()),
            self._failures,
            logs=self._options.logs,
            status=self._options.status,
            timeout_seconds=self._options.timeout_seconds,
            memory_kills=memory_kills() - kills_before,
        )

    def _start(self, job: JobT, run_rank: Callable[[JobT, LaunchedRank | None], int]) -> None:
        method = start_method(self._options.device)
        context: ForkContext | SpawnContext = (
            multiprocessing.get_context("fork")
            if method == "fork"
            else multiprocessing.get_context("spawn")
        )
        local = self._options.local_world_size
        reading, self._lifeline = context.Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        collects = gc.isenabled()
        gc.disable()
        # A rank must not meet a signal with the launcher's own handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            for local_rank in range(local):
                rank = self._meeting.rank(local_rank)
                self._reports[rank.rank], report = context.Pipe(duplex=False)
                start = RankStart(
                    rank=rank,
                    parent=os.getpid(),
                    lifeline=reading,
                    launcher_end=self._lifeline.fileno() if method == "fork" else None,
                    report=report,
                    logs=self._options.logs,
                    status=self._options.status,
                    threads=threads_per_rank(local),
                    interface=self._meeting.interface,
                )
                process = context.Process(
                    target=rank_main, args=(start, job, run_rank), name=f"rank-{rank.rank}"
                )
                process.start()
                report.close()
                self._processes[rank.rank] = process
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            if collects:
                gc.enable()
            reading.close()

    def _watch(self) -> Verdict | None:
        """Until every rank has ended; a verdict only when this process decides it itself."""
        deadline: float | None = None
        forwarded: list[int] = []
        while running := self._running():
            sentinels = [process.sentinel for process in running.values()]
            wait([*sentinels, *self._reports.values()], POLL_SECONDS)
            self._collect()
            while self._signals:
                number = self._signals.pop(0)
                if number == signal.SIGINT and signal.SIGINT in forwarded:
                    self._kill(list(self._running()))
                    sys.stderr.write("Stopped at once; nothing more was saved.\n")
                    return Verdict(ExitCode.SIGINT)
                forwarded.append(number)
                self._signal(number)
            if deadline is None and (self._failed() or self._meeting.is_over()):
                deadline = time.monotonic() + REPORT_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                self._end_the_rest()
        return None

    def _collect(self) -> None:
        self._read_reports()
        for rank, process in self._processes.items():
            if rank not in self._ends and process.exitcode is not None:
                self._ends[rank] = RankEnd(
                    rank, process.exitcode, time.time(), rank in self._ended_by_us
                )

    def _failed(self) -> bool:
        return any(end.is_failure for end in self._ends.values())

    def _running(self) -> dict[int, BaseProcess]:
        return {rank: p for rank, p in self._processes.items() if rank not in self._ends}

    def _end_the_rest(self) -> None:
        """Ask for stacks first: a rank that others wait for is stuck somewhere."""
        rest = list(self._running())
        for rank in rest:
            self._signal(STACK_SIGNAL, only=rank)
        time.sleep(POLL_SECONDS)
        self._kill(rest)
        self._join()

    def _kill(self, ranks: list[int]) -> None:
        for rank in ranks:
            if self._processes[rank].exitcode is None:
                self._ended_by_us.add(rank)
                self._signal(signal.SIGKILL, only=rank)

    def _join(self) -> None:
        for process in self._processes.values():
            process.join()
        self._collect()

    def _signal(self, number: int, only: int | None = None) -> None:
        for rank, process in self._processes.items():
            if (only is None or rank == only) and process.exitcode is None and process.pid:
                # Not yet reaped, so the id cannot belong to another process.
                os.kill(process.pid, number)

    def _read_reports(self) -> None:
        for rank, report in list(self._reports.items()):
            if report.poll():
                # One message at most; a rank that ends without a word closes its end (EOFError),
                # one that is killed while it speaks leaves half of it (OSError).
                with report, suppress(EOFError, OSError):
                    self._failures[rank] = report.recv()
                del self._reports[rank]

    def _remove_old_reports(self) -> None:
        for local_rank in range(self._options.local_world_size):
            rank = self._meeting.rank(local_rank).rank
            for path in (rank_state_path, stacks_path):
                path(self._options.logs, rank).unlink(missing_ok=True)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Take stop signals into a list while the ranks run."""

        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        earlier = {number: signal.signal(number, note) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)


def start_method(device: str) -> Literal["fork", "spawn"]:
    """How to start ranks: fork, which reuses what is imported, unless CUDA is in use already."""
    if device == "cpu" or torch.version.cuda is None or _fork_is_clean():
        return "fork"
    return "spawn"


def _fork_is_clean() -> bool:
    """Whether a forked child could use CUDA: asks one, for only torch itself knows."""
    child = os.fork()
    if child == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitpid(child, 0)[1] == 0


def threads_per_rank(local_world_size: int) -> int | None:
    """CPU threads for each rank of this node, None when the user has decided."""
    if environment.lookup("OMP_NUM_THREADS") is not None:
        return None
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def memory_kills() -> int:
    """Processes the kernel has killed for memory so far, 0 where it does not tell."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
