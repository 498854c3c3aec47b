"""Prepared token rows on disk: Arrow files that every process maps into memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ndtrain.data.batch import IGNORED
from ndtrain.data.encode import Chunk
from ndtrain.data.tokens import Ids

_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("labels", pa.list_(pa.int32())),
        ("length", pa.int32()),
        ("targets", pa.int32()),
        ("place", pa.string()),
    ]
)
Index = npt.NDArray[np.int64]


class RowWriter:
    """Writes token rows to one Arrow file, a chunk at a time."""

    def __init__(self, path: Path) -> None:
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, _SCHEMA)
        self.rows = 0

    def write(self, chunk: Chunk, keep: Sequence[int]) -> tuple[Ids, Ids]:
        """Append some rows of a chunk; returns their lengths and target counts."""
        ids = [chunk.ids[place] for place in keep]
        labels = [chunk.labels[place] for place in keep]
        lengths = np.array([len(row) for row in ids], dtype=np.int32)
        targets = np.array([np.count_nonzero(row[1:] != IGNORED) for row in labels], dtype=np.int32)
        if len(ids):
            offsets = _column(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
            batch = pa.record_batch(
                [
                    pa.ListArray.from_arrays(offsets, _column(np.concatenate(ids))),
                    pa.ListArray.from_arrays(offsets, _column(np.concatenate(labels))),
                    _column(lengths),
                    _column(targets),
                    _text_column([chunk.places[place] for place in keep]),
                ],
                schema=_SCHEMA,
            )
            self._writer.write_batch(batch)
            self.rows += len(ids)
        return lengths, targets

    def __enter__(self) -> "RowWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.close()
        self._sink.close()


@dataclass(frozen=True)
class Moved:
    """Files that lay elsewhere when their rows were prepared.

    Attributes:
        files: each one's path then and now.
    """

    files: tuple[tuple[str, str], ...] = ()

    def place(self, text: str) -> str:
        """The place of a row, `file:line` or `file: row number`, by the file's path now."""
        for then, now in self.files:
            if text.startswith(f"{then}:"):
                return now + text[len(then) :]
        return text


class RowStore:
    """All rows of some Arrow files, mapped into memory and numbered through.

    Args:
        paths: the files.
        moved: where the files are now that the rows came from.
    """

    def __init__(self, paths: Sequence[Path], moved: Moved | None = None) -> None:
        self._moved = moved or Moved()
        self._batches: list[Any] = []
        for path in paths:
            file = pa.ipc.open_file(pa.memory_map(str(path)))
            self._batches += [file.get_batch(place) for place in range(file.num_record_batches)]
        sizes = [batch.num_rows for batch in self._batches]
        self._starts: Index = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._views = [
            tuple(
                (_numbers(batch.column(name).offsets), _numbers(batch.column(name).values))
                for name in ("input_ids", "labels")
            )
            for batch in self._batches
        ]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def column(self, name: str) -> Ids:
        """A column of whole numbers over all files."""
        parts = [_numbers(batch.column(name)) for batch in self._batches]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)

    def row(self, number: int) -> tuple[Ids, Ids]:
        """Ids and labels of a row, as views of the mapped file."""
        place = int(np.searchsorted(self._starts, number, side="right")) - 1
        inside = number - int(self._starts[place])
        (id_offsets, ids), (label_offsets, labels) = self._views[place]
        return (
            ids[id_offsets[inside] : id_offsets[inside + 1]],
            labels[label_offsets[inside] : label_offsets[inside + 1]],
        )

    def place(self, number: int) -> str:
        """Where a row came from: file and line."""
        batch = int(np.searchsorted(self._starts, number, side="right")) - 1
        place = self._batches[batch].column("place")[number - int(self._starts[batch])]
        return self._moved.place(str(place))


class TokenRows:
    """A selection of prepared rows, in its own order; a row may be selected more than once.

    Attributes:
        lengths: tokens of each row, int32.
        target_counts: trained tokens of each row, its first token never counting, int32.
    """

    def __init__(self, store: RowStore, index: Index) -> None:
        self._store = store
        self._index = index
        self.lengths: Ids = store.column("length")[index]
        self.target_counts: Ids = store.column("targets")[index]

    def __len__(self) -> int:
        return len(self._index)

    def row(self, number: int) -> tuple[Ids, Ids]:
        """Ids and aligned labels of a row."""
        return self._store.row(int(self._index[number]))

    def place(self, number: int) -> str:
        """Where a row came from."""
        return self._store.place(int(self._index[number]))


def _column(values: Ids) -> Any:
    """An Arrow column over the same memory.

    Made from a buffer because `pa.array` imports pandas, which takes longer than the whole
    preparation of a small file.
    """
    return pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(values)])


def _text_column(texts: Sequence[str]) -> Any:
    """An Arrow column of texts, made from buffers for the same reason."""
    encoded = [text.encode() for text in texts]
    ends = np.cumsum([0, *(len(text) for text in encoded)]).astype(np.int32)
    return pa.StringArray.from_buffers(
        len(texts), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))
    )


def _numbers(column: Any) -> Ids:
    """The memory of an Arrow column of int32 as a NumPy array; `to_numpy` imports pandas too."""
    values = np.frombuffer(column.buffers()[1], dtype=np.int32)
    return values[column.offset : column.offset + len(column)]
