"""What to do about a place that cannot be written."""

import errno
from pathlib import Path

from ndtrain.errors import NO_SPACE, UNWRITABLE_DISK

_NO_RIGHTS = (errno.EACCES, errno.EPERM)


def advise_unwritable(path: Path, error: OSError, instead: str) -> str:
    """The advice that fits an error of the system.

    Args:
        path: what should have been written, a file or a folder.
        error: why it was not.
        instead: the other way out, such as `set output_dir to another folder`.
    """
    if error.errno in NO_SPACE:
        return f"Free space there, or {instead}."
    met = Path(error.filename or path)
    if error.errno in _NO_RIGHTS:
        return f"Change the rights of '{met.parent}', or {instead}."
    if error.errno in UNWRITABLE_DISK:
        return f"The disk of '{met.parent}' can only be read: {instead}."
    file = next((one for one in (path, *path.parents) if one.is_file()), None)
    if error.errno in (errno.EEXIST, errno.ENOTDIR) and file is not None:
        subject = "It" if file == path else f"'{file}'"
        return f"{subject} is a file, not a folder: {instead}."
    if error.errno == errno.ENOENT and met.parent.is_dir():
        return f"'{met.parent}' takes no new files or folders: {instead}."
    if error.errno == errno.ENOENT:
        return f"The folder '{met.parent}' is gone: make it again, or {instead}."
    return f"Free space or rights there, or {instead}."
