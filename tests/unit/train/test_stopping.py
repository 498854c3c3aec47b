"""Stop reasons, durations and signals in one process; several ranks are in unit/launch."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ndtrain.train.stopping import Stopper, StopReason


@pytest.fixture
def stopper() -> Iterator[Stopper]:
    stopper = Stopper()
    yield stopper
    stopper.close()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130)]
)
def test_a_signal_is_a_reason_with_its_exit_code(
    stopper: Stopper, number: signal.Signals, code: int
) -> None:
    assert stopper.agreed() is None
    os.kill(os.getpid(), number)
    reason = stopper.agreed()
    assert reason is not None
    assert (reason.name, reason.exit_code) == (number.name, code)


def test_max_time_stops_by_a_clock_that_does_not_jump() -> None:
    now = [0.0]
    stopper = Stopper(max_seconds=10, elapsed=lambda: now[0])
    try:
        now[0] = 9.9
        assert stopper.agreed() is None
        now[0] = 10.0
        assert stopper.agreed() is StopReason.MAX_TIME
        assert StopReason.MAX_TIME.exit_code == 143
    finally:
        stopper.close()


def test_close_gives_the_handlers_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    Stopper().close()
    assert signal.getsignal(signal.SIGTERM) is before


SECOND_INTERRUPT = """
import os, signal, time
from ndtrain.train.stopping import Stopper
stopper = Stopper()
os.kill(os.getpid(), signal.SIGINT)
time.sleep({pause})
os.kill(os.getpid(), signal.SIGINT)
time.sleep(1)
print("still here", stopper.agreed().name)
"""


def test_a_second_interrupt_ends_at_once_and_says_so() -> None:
    code = SECOND_INTERRUPT.format(pause=0.5)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert "still here" not in done.stdout
    assert "nothing more was saved" in done.stderr


def test_one_interrupt_delivered_twice_counts_once() -> None:
    code = SECOND_INTERRUPT.format(pause=0.01)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "still here SIGINT\n")


def test_listening_costs_next_to_nothing(stopper: Stopper) -> None:
    began = time.perf_counter()
    for _ in range(1000):
        stopper.agreed()
    assert time.perf_counter() - began < 1


FIRST_SIGNAL = """
import os, signal, sys, time
from ndtrain.train.stopping import Stopper
stopper = Stopper(state=lambda: {state!r})
os.kill(os.getpid(), signal.{name})
os.kill(os.getpid(), signal.{name})
print("flag", stopper.agreed().name, flush=True)
stopper.close()
"""

STARTING = "Nothing is saved yet: stopping after the first step, with a checkpoint"
TRAINING = "Stopping after this step, with a checkpoint"
EVALUATING = "Stopping within the evaluation, with a checkpoint of the steps that are done"
LEAVING = "Training is over, and its last files are being written"


@pytest.mark.parametrize(
    ("name", "state", "words"),
    [
        ("SIGINT", "starting", f"{STARTING}; Ctrl-C again ends at once without one."),
        ("SIGINT", "training", f"{TRAINING}; Ctrl-C again ends at once without one."),
        ("SIGINT", "exporting", f"{LEAVING}; Ctrl-C again ends at once without them."),
        ("SIGTERM", "saving", f"SIGTERM arrived. {TRAINING}."),
        ("SIGUSR1", "evaluating", f"SIGUSR1 arrived. {EVALUATING}."),
    ],
)
def test_a_signal_is_answered_once(name: str, state: str, words: str) -> None:
    code = FIRST_SIGNAL.format(name=name, state=state)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"flag {name}\n", f"{words}\n")


LONG_CALL = """
import ctypes, sys, threading
from ndtrain.train.stopping import Stopper
stopper = Stopper(state=lambda: "training")
libc = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
def release():
    sys.stdin.readline()
    libc.pthread_mutex_unlock(mutex)
threading.Thread(target=release).start()
print("ready", flush=True)
libc.pthread_mutex_lock(mutex)
print("noted", stopper.agreed().name, flush=True)
"""


@pytest.fixture
def in_a_long_call() -> Iterator["subprocess.Popen[str]"]:
    """A process that has answered its first interrupt inside a call that lasts until a line."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", LONG_CALL], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith(TRAINING)
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_signal_is_answered_before_the_call_in_progress_ends(
    in_a_long_call: "subprocess.Popen[str]",
) -> None:
    out, _ = in_a_long_call.communicate("\n", timeout=60)
    assert out == "noted SIGINT\n"


def test_a_second_interrupt_does_not_wait_for_the_call_in_progress(
    in_a_long_call: "subprocess.Popen[str]",
) -> None:
    time.sleep(0.5)
    in_a_long_call.send_signal(signal.SIGINT)
    # the call itself would wait for a line that is not written
    assert in_a_long_call.wait(60) == 130
    assert in_a_long_call.stderr is not None
    assert in_a_long_call.stderr.read() == "Stopped at once; nothing more was saved.\n"
