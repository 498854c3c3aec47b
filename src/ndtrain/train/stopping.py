"""Stopping a run from outside: signals and `--max-time`, agreed on by every rank.

A signal only sets a flag. Once a step (and inside evaluation) the ranks take the maximum of
their flags, so that all of them stop at the same place and save one complete checkpoint,
whichever rank was signalled. A second interrupt ends the process at once (see stop_notice.py).
"""

import signal
import time
from collections.abc import Callable
from enum import IntEnum
from types import FrameType

import torch
import torch.distributed as dist

from ndtrain.errors import ExitCode
from ndtrain.launch.status import State
from ndtrain.launch.stop_notice import StopNotices


class StopReason(IntEnum):
    """Why a run stops before its end; of several reasons the highest wins."""

    MAX_TIME = 1
    SIGUSR1 = 2
    SIGTERM = 3
    SIGINT = 4

    @property
    def exit_code(self) -> ExitCode:
        """The process exit code of this stop."""
        return ExitCode.SIGINT if self is StopReason.SIGINT else ExitCode.SIGTERM

    @property
    def words(self) -> str:
        """The reason as a user reads it."""
        return "--max-time was reached" if self is StopReason.MAX_TIME else f"{self.name} arrived"


_REASON_OF = {
    signal.SIGUSR1: StopReason.SIGUSR1,
    signal.SIGTERM: StopReason.SIGTERM,
    signal.SIGINT: StopReason.SIGINT,
}


class Stopper:
    """Listens for stop signals and lets the ranks agree on one.

    Args:
        group: process group with a CPU backend; None is the default group.
        max_seconds: longest time to run, counted from the creation of the object.
        elapsed: a clock that does not jump.
        state: of the run, on the rank that answers a signal on the terminal; None: stay silent.
    """

    def __init__(
        self,
        *,
        group: dist.ProcessGroup | None = None,
        max_seconds: float | None = None,
        elapsed: Callable[[], float] = time.monotonic,
        state: Callable[[], State] | None = None,
    ) -> None:
        self._group = group
        self._elapsed = elapsed
        self._deadline = None if max_seconds is None else elapsed() + max_seconds
        self._signalled: StopReason | None = None
        self._earlier = {number: signal.signal(number, self._on_signal) for number in _REASON_OF}
        self._notices: StopNotices | None = StopNotices(state)

    def local_reason(self) -> StopReason | None:
        """What this rank alone knows."""
        if self._signalled is not None:
            return self._signalled
        if self._deadline is not None and self._elapsed() >= self._deadline:
            return StopReason.MAX_TIME
        return None

    def agreed(self) -> StopReason | None:
        """The reason on which all ranks agree; every rank must call it at the same place."""
        local = self.local_reason()
        if not dist.is_initialized() or dist.get_world_size(self._group) == 1:
            return local
        flag = torch.tensor(int(local or 0), dtype=torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        code = int(flag)
        return StopReason(code) if code else None

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        if self._notices is not None:
            self._notices.close()
            self._notices = None
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        reason = _REASON_OF[signal.Signals(number)]
        self._signalled = max(self._signalled or reason, reason)
