"""Reading and writing the tensor files of a checkpoint, without running pickled code."""

import errno
import os
import pickle
import shutil
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from ndtrain.errors import CheckpointError

_INDEX = ".metadata"
_BYTES_A_THREAD = 256 * 2**20
_MOST_THREADS = 4
_NEARLY_FULL = 8 * 2**20

_INDEX_TYPES = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath"},
}


def _enum_member(kind: Any, name: str) -> Any:
    """A member of an index's enum, which early releases of Python 3.11 pickle as a `getattr`."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"'{name}' is no member of an enum of a checkpoint's index")


class _IndexUnpickler(pickle.Unpickler):
    """Reads the index of tensors, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """The types an index consists of."""
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _INDEX_TYPES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"'{module}.{name}' has no place in a checkpoint's index")


class _Reader(FileSystemReader):
    """torch's reader with a safe way to read the index; tensors it reads safely itself."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of tensors."""
        index = read_index(Path(self.path))
        index.storage_meta = StorageMeta(load_id=self.load_id)
        return index


def read_index(path: Path) -> Metadata:
    """What the checkpoint at `path` holds.

    Raises:
        CheckpointError: the index cannot be read.
    """
    try:
        with (path / _INDEX).open("rb") as file:
            index = _IndexUnpickler(file).load()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"The index of tensors cannot be read: {error}.",
            where=str(path / _INDEX),
            hint="Choose another checkpoint.",
        ) from error
    if not isinstance(index, Metadata):
        raise CheckpointError("This is not an index of tensors.", where=str(path / _INDEX))
    return index


def shapes(path: Path) -> dict[str, torch.Size]:
    """Name and shape of every tensor in the checkpoint at `path`."""
    items = read_index(path).state_dict_metadata.items()
    return {name: item.size for name, item in items if isinstance(item, TensorStorageMetadata)}


def write_tensors(
    tensors: Mapping[str, torch.Tensor], path: Path, group: dist.ProcessGroup | None
) -> None:
    """Write every rank's shards to `path`, each file fsynced, equal copies only once.

    Raises:
        CheckpointError: on every rank, when one of them fails.
    """
    local_bytes = sum(_local_bytes(tensor) for tensor in tensors.values())
    threads = min(_MOST_THREADS, 1 + local_bytes // _BYTES_A_THREAD)
    try:
        state_dict_saver.save(
            dict(tensors),
            storage_writer=FileSystemWriter(path, thread_count=threads),
            planner=DefaultSavePlanner(flatten_state_dict=False),
            process_group=group,
        )
    except (CheckpointException, OSError, RuntimeError) as error:
        raise _explained(error, path, "written") from error


def read_tensors(
    tensors: Mapping[str, torch.Tensor], path: Path, group: dist.ProcessGroup | None
) -> None:
    """Fill `tensors` in place, each rank reading only what its shards need.

    Raises:
        CheckpointError: on every rank, when one of them fails.
    """
    try:
        state_dict_loader.load(
            dict(tensors),
            storage_reader=_Reader(path),
            planner=DefaultLoadPlanner(flatten_state_dict=False),
            process_group=group,
        )
    except (CheckpointException, OSError, RuntimeError) as error:
        raise _explained(error, path, "read") from error


def _local_bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())


def _explained(error: BaseException, path: Path, verb: str) -> CheckpointError:
    """One message out of what the ranks met; the disk's own words first."""
    causes: dict[int, BaseException] = {}
    if isinstance(error, CheckpointException):
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
    ordered = sorted(causes.items(), key=lambda item: not isinstance(item[1], OSError))
    rank, cause = ordered[0] if ordered else (None, error)
    reason = _strerror(cause, path) or str(cause).strip().split("\n")[0] or type(cause).__name__
    by = "" if rank is None else f" by rank {rank}"
    return CheckpointError(
        f"The checkpoint could not be {verb}{by}: {reason}.",
        where=str(path),
        hint="Free space or rights there, then run the same command again; it continues from "
        "the newest whole checkpoint.",
    )


def _strerror(error: BaseException | None, path: Path) -> str | None:
    """The operating system's words, also where torch wrapped them in an error of its own."""
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        if "inline_container" in str(error) and shutil.disk_usage(path).free < _NEARLY_FULL:
            # torch's archive writer tells of a short write only as a wrong position.
            return os.strerror(errno.ENOSPC)
        error = error.__cause__ or error.__context__
    return None
