"""Documents of different lengths into rows of one length: best-fit decreasing.

The longest documents go first, each into the fullest row that still has room. Remaining room is
a whole number below the row length, so rows are kept in one list for each amount of room and the
next amount that has a row is found with a bit mask: no tree, no sorting.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ndtrain.errors import DataError

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Packing:
    """Which documents share a row.

    Attributes:
        order: all documents, row after row.
        starts: where each row begins in `order`, and one end.
    """

    order: Numbers
    starts: Numbers

    def __len__(self) -> int:
        return len(self.starts) - 1

    def documents(self, row: int) -> Numbers:
        """The documents of a row."""
        return self.order[self.starts[row] : self.starts[row + 1]]


def pack(lengths: Sequence[int] | npt.NDArray[np.int32], capacity: int) -> Packing:
    """Pack documents into as few rows of `capacity` tokens as best-fit decreasing finds.

    Raises:
        DataError: a document is longer than a row.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and int(sizes.max()) > capacity:
        raise DataError(
            f"a document of {int(sizes.max())} tokens does not fit into a row of {capacity}.",
            hint="Raise sequence_len, or set excess_length_strategy.",
        )
    descending = np.argsort(-sizes, kind="stable")
    row_of = np.empty(len(sizes), dtype=np.int64)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    present = 0  # bit r is set while a row with room r exists
    num_rows = 0
    placed = row_of.tolist()
    for document, size in zip(descending.tolist(), sizes[descending].tolist(), strict=True):
        fitting = present >> size
        if fitting:
            room = size + ((fitting & -fitting).bit_length() - 1)
            rows = with_room[room]
            row = rows.pop()
            if not rows:
                present ^= 1 << room
        else:
            room, row = capacity, num_rows
            num_rows += 1
        placed[document] = row
        room -= size
        if room:
            if not with_room[room]:
                present |= 1 << room
            with_room[room].append(row)
    rows_array = np.array(placed, dtype=np.int64)
    by_row = descending[np.argsort(rows_array[descending], kind="stable")]
    starts = np.searchsorted(rows_array[by_row], np.arange(num_rows + 1))
    return Packing(by_row, starts.astype(np.int64))
