"""`ndtrain` as a program that starts at once: each call is forked from a process that has imported.

A page of the docs is a dozen commands, and most of the time of a small one is importing torch. What
runs is `ndtrain.cli.main` in a process of its own, with its own launcher, ranks and exit code; only
its start is another.
"""

import contextlib
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PROGRAM = """\
#!{python} -ISs
import json, os, socket, sys
words = sys.argv[1:]
for start, more in {added!r}.items():
    if " ".join(words).startswith(start):
        words += more
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    text = json.dumps([os.getcwd(), words]).encode()
    socket.send_fds(server, [len(text).to_bytes(4, "little")], [0, 1, 2])
    server.sendall(text)
    sys.exit(int.from_bytes(server.recv(4), "little"))
"""


@contextlib.contextmanager
def warm_program(
    folder: Path, added: Mapping[str, list[str]], environ: Mapping[str, str]
) -> Iterator[Path]:
    """A folder for PATH in which `ndtrain` is the warm command.

    Args:
        folder: an empty folder.
        added: words that are added to commands which start with others.
        environ: of every command.
    """
    address = folder / "socket"
    program = folder / "ndtrain"
    text = PROGRAM.format(python=sys.executable, added=dict(added), address=str(address))
    program.write_text(text)
    program.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, __file__, str(address)], env=dict(environ), stdout=subprocess.PIPE
    )
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == b"ready\n"
        yield folder
    finally:
        server.terminate()
        server.wait(30)
        server.stdout.close()


def serve(address: str) -> None:
    """Fork a command for each connection, until this process is ended."""
    import json

    import ndtrain.train.run
    from ndtrain import cli

    assert ndtrain.train.run
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listening.accept()
            gc.collect()
            if os.fork():
                connection.close()
                continue
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listening.close()
            head, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
            (length,) = struct.unpack("<I", head)
            folder, words = json.loads(connection.recv(length, socket.MSG_WAITALL))
            _run(cli, folder, words, descriptors, connection)


def _run(
    cli: object, folder: str, words: list[str], descriptors: list[int], answer: socket.socket
) -> None:
    """One command, then the end of this process."""
    code = 1
    try:
        os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
        os.chdir(folder)
        cli.main(words)  # type: ignore[attr-defined]
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        answer.sendall(code.to_bytes(4, "little"))
        os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
