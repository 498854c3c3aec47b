"""A folder for each prepared result, found by what went into it, written once or not at all."""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ndtrain.errors import CheckpointError
from ndtrain.recipe.unwritable import advise_unwritable

FORMAT_VERSION = 4
"""Raised whenever the same input would be prepared differently: old results are not used then."""


def content_key(ingredients: Mapping[str, Any]) -> str:
    """The name of a result, from everything that decides it."""
    text = json.dumps({"version": FORMAT_VERSION, **ingredients}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def build_once(folder: Path, build: Callable[[Path], None]) -> bool:
    """Make sure that `folder` holds a whole result; True when it was there already.

    Several processes, also on several hosts with a shared disk, may call this at the same time:
    one builds in a folder of its own and renames it when all is written, the others wait.

    Raises:
        CheckpointError: the cache cannot be written.
    """
    if folder.is_dir():
        return True
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if folder.is_dir():
                return True
            unfinished = folder.with_suffix(".unfinished")
            if unfinished.exists():  # whoever wrote it was interrupted: the lock is ours now
                shutil.rmtree(unfinished)
            unfinished.mkdir()
            try:
                build(unfinished)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"the prepared data cannot be written: {error.strerror or error}.",
            where=str(folder.parent),
            hint=advise_unwritable(
                folder.parent, error, "set dataset_prepared_path to another folder"
            ),
        ) from error
    return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file lock; it is freed by the system even when this process is killed."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
