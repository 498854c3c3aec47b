"""Where the rows of a dataset come from, and what identifies their content.

A source is a list of local files, a dataset of the hub, or made-up rows. To add a file kind, name
its reader in READERS.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from ndtrain.data.local_files import choose_files, kind_of, match_files
from ndtrain.data.rows import RawRow, read_json, read_text
from ndtrain.data.tables import read_arrow, read_csv, read_parquet
from ndtrain.errors import DataError, RecipeError
from ndtrain.recipe.addresses import resolve_address
from ndtrain.recipe.schema import DatasetSpec

READERS: Mapping[str, Callable[[Path], Iterator[RawRow]]] = {
    "json": read_json,
    "csv": read_csv,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "text": read_text,
}


class Source(Protocol):
    """A place that rows are read from."""

    @property
    def size(self) -> int | None:
        """Bytes to read, None when unknown."""

    def fingerprint(self) -> str:
        """Identifies the content: different rows give a different fingerprint."""

    def rows(self) -> Iterator[RawRow]:
        """The rows in their order."""


@dataclass(frozen=True)
class Files:
    """Local files, read one after the other.

    Attributes:
        kind: of all files; None goes by suffix.
        columns: names under which the rows have lists, beside the usual ones.
    """

    paths: tuple[Path, ...]
    kind: str | None
    columns: frozenset[str] = frozenset()

    @property
    def size(self) -> int | None:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.paths)

    def fingerprint(self) -> str:
        """Hash of names and contents."""
        total = hashlib.sha256()
        for path in self.paths:
            try:
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise _unreadable(path, error) from error
            total.update(f"{path.name}\0{self._kind_of(path)}\0{content}\n".encode())
        return total.hexdigest()

    def rows(self) -> Iterator[RawRow]:
        """The rows of each file."""
        for path in self.paths:
            kind = self._kind_of(path)
            read = partial(read_json, columns=self.columns) if kind == "json" else READERS[kind]
            try:
                yield from read(path)
            except (OSError, EOFError, zlib.error) as error:
                raise _unreadable(path, error) from error

    def _kind_of(self, path: Path) -> str:
        """The file kind: as the recipe says, else by suffix."""
        return self.kind or kind_of(path) or "json"


def _unreadable(path: Path, error: Exception) -> DataError:
    """The message for a file that is there but cannot be read, or not be unpacked."""
    why = (isinstance(error, OSError) and error.strerror) or str(error).rstrip(".")
    return DataError(f"the file cannot be read: {why}.", where=str(path))


@dataclass(frozen=True)
class Synthetic:
    """Random token ids, for smoke tests and memory probes."""

    spec: DatasetSpec
    vocabulary: int
    seed: int

    @property
    def size(self) -> int | None:
        """Nothing is read."""
        return None

    def fingerprint(self) -> str:
        """The numbers they are drawn from."""
        spec = self.spec
        return (
            f"synthetic {spec.length} {spec.sequence_length} {self._bounds()} "
            f"{self.seed if spec.seed is None else spec.seed}"
        )

    def rows(self) -> Iterator[RawRow]:
        """Rows of equal length."""
        seed = self.seed if self.spec.seed is None else self.spec.seed
        generator = np.random.default_rng(seed)
        low, high = self._bounds()
        for number in range(1, self.spec.length + 1):
            ids = generator.integers(low, high, self.spec.sequence_length).tolist()
            yield RawRow(f"synthetic: row {number}", {"input_ids": ids})

    def _bounds(self) -> tuple[int, int]:
        """First id and the one after the last."""
        high = self.spec.max_input_id
        top = self.vocabulary if high is None else min(high + 1, self.vocabulary)
        return min(self.spec.min_input_id, top - 1), top


def find_source(spec: DatasetSpec, vocabulary: int, seed: int, streaming: bool = False) -> Source:
    """The source that a dataset entry names.

    Args:
        streaming: read a hub dataset row by row instead of downloading it first.

    Raises:
        RecipeError: a file does not exist; `where` names the key of the entry.
        DataError: a folder has no files of the split.
    """
    if spec.path == "synthetic":
        return Synthetic(spec, vocabulary, seed)
    if spec.path in READERS:
        if spec.data_files is None:
            raise RecipeError(
                f"'{spec.path}' is a file kind and says not which files.",
                where="path",
                hint=f"Name them with data_files, or write ./{spec.path} for a folder.",
            )
        return Files(tuple(match_files(Path(), spec.data_files)), spec.path, _list_columns(spec))
    path = resolve_address(spec.path)
    if path is None:
        from ndtrain.data.hub import HubSource

        return HubSource(spec, streaming)
    if not path.exists():
        raise RecipeError(
            f"dataset '{spec.path}' does not exist.",
            where="path",
            hint=f"Paths start at the current folder, '{Path.cwd()}'.",
        )
    return Files(tuple(choose_files(path, spec)), spec.ds_type, _list_columns(spec))


def _list_columns(spec: DatasetSpec) -> frozenset[str]:
    """Columns that the entry names and that hold lists."""
    return frozenset(name for name in (spec.field_messages, spec.field_tools) if name)
