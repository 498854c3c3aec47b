"""`status.json`: what a run is doing now, for people, schedulers and the launcher.

The main rank writes it beside the run; the others write `logs/rank-N.state.json`, so that a
hanging collective can be reported with what each missing rank did last.
"""

import json
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from ndtrain.report.atomic import write_failure

State = Literal[
    "starting",
    "preparing",
    "training",
    "evaluating",
    "saving",
    "exporting",
    "finished",
    "stopped",
    "failed",
]

FORMAT_VERSION = 1
HEARTBEAT_SECONDS = 0.2
"""Shortest time between two writes that only move the step or the heartbeat."""


@dataclass(frozen=True)
class RunStatus:
    """One moment of a run.

    Attributes:
        stage: what exactly goes on, such as "saving step 200".
        heartbeat: seconds since the epoch at the last write.
        run_id: the same over every restart and resume of one run.
    """

    state: State
    stage: str
    step: int
    run_id: str
    pid: int
    heartbeat: float
    exit_code: int | None = None
    error: str | None = None
    v: int = FORMAT_VERSION


def new_run_id() -> str:
    """A name for a run that no other run has."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:8]}"


def read_status(path: Path) -> RunStatus | None:
    """The status in `path`, None when there is none or it is not one of ours."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return RunStatus(**fields)
    except (OSError, ValueError, TypeError):
        return None


def choose_run_id(status_path: Path, *, fresh: bool) -> str:
    """The identity of the run in this folder: a new one when it starts over.

    Args:
        fresh: the user asked to begin anew (`--restart`, `--resume never`).
    """
    earlier = None if fresh else read_status(status_path)
    return earlier.run_id if earlier is not None else new_run_id()


def write_status(path: Path, status: RunStatus) -> None:
    """Replace the file in one step; no fsync, because a lost heartbeat costs nothing.

    Raises:
        CheckpointError: the run directory cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(json.dumps(asdict(status)) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise write_failure(path, error) from error


class StatusWriter:
    """Keeps one rank's status file up to date, cheaply.

    Args:
        path: `status.json` on the main rank, see `rank_state_path` for the others.
        now: clock of the heartbeat.
        elapsed: clock of the write interval, which must not jump.
    """

    def __init__(
        self,
        path: Path,
        run_id: str,
        *,
        step: int = 0,
        now: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._now = now
        self._elapsed = elapsed
        self._written_at = 0.0
        self.status = RunStatus(
            state="starting",
            stage="starting",
            step=step,
            run_id=run_id,
            pid=os.getpid(),
            heartbeat=now(),
        )
        self._write()

    def enter(self, state: State, stage: str = "", *, step: int | None = None) -> None:
        """Note a new state at once; `stage` defaults to the state's own name."""
        self.status = replace(
            self.status,
            state=state,
            stage=stage or state,
            step=self.status.step if step is None else step,
        )
        self._write()

    def beat(self, step: int) -> None:
        """Note that `step` was reached, written only so often."""
        self.status = replace(self.status, step=step)
        if self._elapsed() - self._written_at >= HEARTBEAT_SECONDS:
            self._write()

    def end(self, state: State, exit_code: int, error: str | None = None) -> None:
        """Note how the run ended."""
        self.status = replace(
            self.status, state=state, stage=state, exit_code=exit_code, error=error
        )
        self._write()

    def _write(self) -> None:
        self.status = replace(self.status, heartbeat=self._now())
        write_status(self._path, self.status)
        self._written_at = self._elapsed()


def rank_state_path(logs: Path, rank: int) -> Path:
    """Where a rank other than the main one keeps its status."""
    return logs / f"rank-{rank}.state.json"


def note_failure(path: Path, exit_code: int, error: str) -> None:
    """Mark the run as failed from outside, for a rank that could not do so itself."""
    status = read_status(path)
    if status is None:
        status = RunStatus("failed", "starting", 0, new_run_id(), os.getpid(), time.time())
    write_status(
        path,
        replace(status, state="failed", exit_code=exit_code, error=error, heartbeat=time.time()),
    )
