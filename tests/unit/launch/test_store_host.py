"""The process that holds the store lives as long as its launcher, and no longer."""

import datetime
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ndtrain.launch.store_host import StoreHost


def connect(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=10))


def ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


def test_it_serves_survives_stop_signals_and_ends_on_request() -> None:
    host = StoreHost("127.0.0.1", 0)
    pid = host._process.pid
    assert pid is not None
    first = connect(host.port)
    first.set("key", "value")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(pid, number)
    assert connect(host.port).get("key") == b"value"
    host.close()
    assert ended(pid)


def test_a_port_in_use_is_an_error() -> None:
    with socket.socket(socket.AF_INET6) as taken:
        taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        taken.bind(("::", 0))
        taken.listen()
        with pytest.raises(OSError, match=r"EADDRINUSE|address already in use"):
            StoreHost("127.0.0.1", taken.getsockname()[1])


def test_it_dies_with_its_launcher(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    launcher = os.fork()
    if launcher == 0:
        host = StoreHost("127.0.0.1", 0)
        note.write_text(str(host._process.pid))
        signal.pause()
        os._exit(0)
    deadline = time.monotonic() + 60
    while not (note.exists() and note.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    pid = int(note.read_text())
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    while not ended(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ended(pid)
