"""Files that are either the old or the new ones, never half of each."""

import os
from collections.abc import Callable
from pathlib import Path

from ndtrain.errors import CheckpointError
from ndtrain.recipe.unwritable import advise_unwritable


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path`, in place in one step, and onto the disk.

    Raises:
        CheckpointError: the folder cannot be written or the disk is full.
    """

    def write(unfinished: Path) -> None:
        with unfinished.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    replace_file(path, write)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside `path`, with its suffixes, and put it in place in one step.

    Raises:
        CheckpointError: the folder cannot be written or the disk is full.
    """
    unfinished = path.with_name(f".{os.getpid()}.tmp-{path.name}")
    try:
        write(unfinished)
        unfinished.replace(path)
    except OSError as error:
        raise write_failure(path, error) from error
    finally:
        unfinished.unlink(missing_ok=True)


def write_failure(path: Path | str, error: OSError) -> CheckpointError:
    """The message for a file of the run that could not be written."""
    reason = error.strerror or type(error).__name__
    return CheckpointError(
        f"cannot be written: {reason}.",
        where=str(path),
        hint=advise_unwritable(Path(path), error, "set output_dir to another folder"),
    )
