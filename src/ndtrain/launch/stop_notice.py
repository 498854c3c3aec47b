"""What a stop signal is answered with on the terminal, at once, however long the step takes."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from ndtrain.errors import ExitCode
from ndtrain.launch.lifeline import STOP_SIGNALS
from ndtrain.launch.status import State

DOUBLE_DELIVERY_SECONDS = 0.3
"""A launcher and a terminal may deliver one Ctrl-C twice; within this time it counts once."""


def stop_notice(number: int, state: State) -> str:
    """One line on what the signal will do.

    Args:
        number: the signal.
        state: of the run.
    """
    what = "one"
    if state == "evaluating":
        text = "Stopping within the evaluation, with a checkpoint of the steps that are done"
    elif state in ("training", "saving"):
        text = "Stopping after this step, with a checkpoint"
    elif state in ("starting", "preparing"):
        text = "Nothing is saved yet: stopping after the first step, with a checkpoint"
    else:
        text, what = "Training is over, and its last files are being written", "them"
    if number == signal.SIGINT:
        return f"{text}; Ctrl-C again ends at once without {what}."
    return f"{signal.Signals(number).name} arrived. {text}."


class StopNotices:
    """Answers the first stop signal on stderr, and ends the process at a second interrupt.

    Both from a thread of its own: a handler in Python waits for the call in progress, such as a
    whole backward pass, and may not take a lock. The thread may, and hears of a signal through the
    pipe into which the interpreter writes its number the moment it arrives.

    Args:
        state: of the run, at any time; None: give no answer, another rank does.
        elapsed: a clock that does not jump.

    Must be created and closed in the main thread, which alone may ask for that pipe.
    """

    def __init__(
        self,
        state: Callable[[], State] | None,
        *,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._elapsed = elapsed
        self._interrupted_at: float | None = None
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._earlier = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="stop-notices", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no longer."""
        signal.set_wakeup_fd(self._earlier)
        os.close(self._writing)
        self._thread.join()
        os.close(self._reading)

    def _listen(self) -> None:
        said: set[int] = set()
        while numbers := os.read(self._reading, 64):
            for number in numbers:
                if number == signal.SIGINT and self._is_second_interrupt():
                    _end_at_once()
                # a scheduler's second signal changes nothing, a Ctrl-C after it does
                news = not said or (number == signal.SIGINT and number not in said)
                if number in STOP_SIGNALS and news and self._state is not None:
                    said.add(number)
                    text = f"{_behind_the_echo(number)}{stop_notice(number, self._state())}"
                    print(text, file=sys.stderr, flush=True)

    def _is_second_interrupt(self) -> bool:
        now, first = self._elapsed(), self._interrupted_at
        if first is None:
            self._interrupted_at = now
        return first is not None and now - first > DOUBLE_DELIVERY_SECONDS


def _behind_the_echo(number: int) -> str:
    """A new line where the terminal stands behind the ^C that it has shown."""
    return "\n" if number == signal.SIGINT and sys.stderr.isatty() else ""


def _end_at_once() -> NoReturn:
    # Neither a print, whose lock the main thread may hold, nor sys.exit, which a collective or a
    # save in flight would hold up.
    text = f"{_behind_the_echo(signal.SIGINT)}Stopped at once; nothing more was saved.\n"
    os.write(2, text.encode())
    os._exit(ExitCode.SIGINT)
