"""One run at a time in a run directory."""

import errno
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ndtrain.errors import CheckpointError
from ndtrain.report.atomic import write_failure

LOCK_FILE = ".lock"
PATIENCE_SECONDS = 20.0
"""Ranks whose parent was killed need a moment to leave; then the next start gets its turn."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@contextmanager
def hold_folder(folder: Path, patience: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Keep other runs out of a folder, for as long as this process and its forks live.

    The lock belongs to the open file: it is gone with the last process that has it, however that
    ends. On a file system without locks, nobody is kept out.

    Args:
        folder: a run directory that exists.
        patience: seconds to wait for another run that is about to leave.

    Raises:
        CheckpointError: another run is in it, or it cannot be written.
    """
    try:
        file = (folder / LOCK_FILE).open("a")
    except OSError as error:
        raise write_failure(folder, error) from error
    with file:
        until = time.monotonic() + patience
        while not _lock(file.fileno(), folder):
            if time.monotonic() > until:
                raise CheckpointError(
                    "another run is writing into it.",
                    where=str(folder),
                    hint="Wait for it, stop it, or set another output_dir.",
                )
            time.sleep(0.1)
        yield


def _lock(descriptor: int, folder: Path) -> bool:
    """Whether nobody else has the lock; it is ours then."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise write_failure(folder, error) from error
    return True
