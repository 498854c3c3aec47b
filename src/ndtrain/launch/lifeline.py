"""The tie between a started process and its launcher: when that dies, so does the process."""

import ctypes
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What a user or a scheduler sends to stop a run."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, lifeline: Connection) -> None:
    """End this process when its parent ends, whatever ends that: by the kernel, and by a pipe.

    Args:
        parent: process id of the parent.
        lifeline: a pipe whose other end only the parent holds and into which it writes nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    def watch() -> None:
        # This returns when the parent's end closes, with the parent.
        lifeline.poll(None)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
