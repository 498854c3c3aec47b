"""The process that holds the store over which ranks and launchers meet.

A process of its own, because the launcher forks its ranks: a fork copies locks that the store's
server thread may hold at that moment, and a rank that needs one of them would wait forever.
"""

import gc
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from C++

from ndtrain.launch.lifeline import STOP_SIGNALS, die_with_parent

START_SECONDS = 60.0


class StoreHost:
    """A running store.

    Args:
        address: what other machines call this one.
        port: where to listen; 0 lets the system choose.

    Raises:
        OSError: the port cannot be listened to.

    Attributes:
        port: where it listens.
    """

    def __init__(self, address: str, port: int) -> None:
        context = multiprocessing.get_context("fork")
        answer, self._lifeline = context.Pipe()
        collects = gc.isenabled()
        gc.disable()
        try:
            self._process: BaseProcess = context.Process(
                target=_serve,
                args=(answer, self._lifeline.fileno(), os.getpid(), address, port),
                name="store",
                daemon=True,
            )
            self._process.start()
        finally:
            if collects:
                gc.enable()
        answer.close()
        found = self._lifeline.recv() if self._lifeline.poll(START_SECONDS) else "it did not start"
        if not isinstance(found, int):
            self.close()
            raise OSError(found)
        self.port = found

    def close(self) -> None:
        """End the store."""
        self._process.kill()
        self._process.join()
        self._lifeline.close()


def _serve(answer: Connection, launcher_end: int, parent: int, address: str, port: int) -> None:
    """Hold the store until the launcher ends it, or ends itself."""
    gc.freeze()
    gc.enable()
    for number in STOP_SIGNALS:
        # The launcher decides when to stop; it still needs the store while its ranks save.
        signal.signal(number, signal.SIG_IGN)
    os.close(launcher_end)
    die_with_parent(parent, answer)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        store = TCPStore(address, port, is_master=True, wait_for_workers=False)
    except Exception as error:
        answer.send(str(error).split("\n")[0])
        os._exit(1)
    answer.send(int(store.port))
    while True:
        signal.pause()
