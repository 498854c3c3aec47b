"""Reads tensors of safetensors files by blocks of rows, with plain reads.

A mapped file would count as memory of the process; for files larger than the memory that is
allowed, each block is read into a buffer of its own instead.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from ndtrain.errors import MeshError
from ndtrain.model.shard_files import DTYPE_WORDS

_DTYPES = {word: dtype for dtype, word in DTYPE_WORDS.items()}
BLOCK_BYTES = 8 * 2**20
"""Size of a block in fp32: small enough for a processor's cache and a reused buffer."""


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies."""

    path: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; of the whole tensor when it has no dims."""
        return prod(self.shape[1:]) * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop`, in the stored dtype."""
        shape = (stop - start, *self.shape[1:]) if self.shape else ()
        buffer = bytearray((stop - start) * self.row_bytes if self.shape else self.dtype.itemsize)
        with self.path.open("rb") as file:
            file.seek(self.start + start * self.row_bytes)
            if file.readinto(buffer) != len(buffer):
                raise MeshError(
                    "the weights are cut short.", where=str(self.path), hint="Copy them again."
                )
        if not buffer:
            return torch.empty(shape, dtype=self.dtype)
        return torch.frombuffer(buffer, dtype=self.dtype).view(shape)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Bounds of consecutive blocks of rows that stay below `BLOCK_BYTES` in fp32."""
        if not self.shape:
            yield 0, 1
            return
        rows = self.shape[0]
        step = max(1, BLOCK_BYTES // max(1, prod(self.shape[1:]) * 4))
        for start in range(0, rows, step):
            yield start, min(start + step, rows)


def stored_tensors(paths: list[Path]) -> dict[str, StoredTensor]:
    """Every tensor of the files, in file order.

    Raises:
        MeshError: a file is damaged or holds an unknown dtype.
    """
    found: dict[str, StoredTensor] = {}
    for path in paths:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            try:
                header = json.loads(file.read(length))
            except ValueError as error:
                raise MeshError(
                    "the weights have a damaged header.", where=str(path), hint="Copy them again."
                ) from error
        header.pop("__metadata__", None)
        for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
            dtype = _DTYPES.get(entry["dtype"])
            if dtype is None:
                raise MeshError(f"'{key}' has the unknown dtype {entry['dtype']}.", where=str(path))
            start = 8 + length + entry["data_offsets"][0]
            found[key] = StoredTensor(path, start, dtype, tuple(entry["shape"]))
    return found
