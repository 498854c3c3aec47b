"""Writes safetensors files as a stream: the header first, then each tensor, block by block.

Names, dtypes and shapes are known before the values, so a whole model can be written while no more
than one block of one tensor is in memory.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch

DTYPE_WORDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of its values."""
        return prod(self.shape) * self.dtype.itemsize


def plan_shards(specs: Sequence[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    """Consecutive tensors grouped into files of at most `shard_bytes`, one at least in each."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return shards


class ShardFiles:
    """A model on its way to disk; tensors are written in the order in which they were announced.

    Args:
        folder: where the files go; it must exist.
        specs: every tensor, in order.
        shard_bytes: largest size of a file, except where one tensor alone is larger.
        stem: `model` or `adapter_model`; the latter is always one file.
    """

    def __init__(
        self,
        folder: Path,
        specs: Sequence[TensorSpec],
        *,
        shard_bytes: int = 2**30,
        stem: str = "model",
    ) -> None:
        self._folder = folder
        self._shards = plan_shards(specs, shard_bytes)
        self._names = [self._file_name(stem, place) for place in range(len(self._shards))]
        self._total = sum(spec.nbytes for spec in specs)
        self._place = (0, 0)
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
        if error is None:
            self._finish()

    def write(self, name: str, blocks: Iterable[torch.Tensor]) -> None:
        """The values of the next tensor, as blocks that follow each other along its first dim.

        Raises:
            ValueError: it is not this tensor's turn, or its values do not fill it.
        """
        shard, place = self._place
        spec = self._shards[shard][place]
        if spec.name != name:
            raise ValueError(f"'{spec.name}' comes next, not '{name}'")
        if self._file is None:
            self._file = self._open(shard)
        written = 0
        for block in blocks:
            values = block.detach().to(device="cpu", dtype=spec.dtype).contiguous()
            written += self._file.write(values.view(-1).view(torch.uint8).numpy().data)
        if written != spec.nbytes:
            raise ValueError(f"'{name}' has {written} bytes instead of {spec.nbytes}")
        if place + 1 < len(self._shards[shard]):
            self._place = (shard, place + 1)
        else:
            _sync(self._file)
            self._file.close()
            self._file = None
            self._place = (shard + 1, 0)

    def _file_name(self, stem: str, place: int) -> str:
        count = len(self._shards)
        if count == 1:
            return f"{stem}.safetensors"
        return f"{stem}-{place + 1:05d}-of-{count:05d}.safetensors"

    def _open(self, shard: int) -> BinaryIO:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        start = 0
        for spec in self._shards[shard]:
            header[spec.name] = {
                "dtype": DTYPE_WORDS[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [start, start + spec.nbytes],
            }
            start += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # values stay aligned, so readers can map them
        file = (self._folder / self._names[shard]).open("wb")
        file.write(len(text).to_bytes(8, "little") + text)
        return file

    def _finish(self) -> None:
        if self._place != (len(self._shards), 0):
            missing = self._shards[self._place[0]][self._place[1]].name
            raise ValueError(f"'{missing}' and what follows it were never written")
        if len(self._shards) == 1:
            return
        files = {
            spec.name: name
            for name, shard in zip(self._names, self._shards, strict=True)
            for spec in shard
        }
        index = {"metadata": {"total_size": self._total}, "weight_map": files}
        with (self._folder / INDEX_FILE).open("w", encoding="utf-8") as file:
            json.dump(index, file, indent=2, sort_keys=True)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
