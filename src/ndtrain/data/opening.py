"""Opening files of text, plain or packed by gzip; what is neither is refused by its first bytes."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from ndtrain.errors import DataError

_GZIP = b"\x1f\x8b"
_UNPACK = "Unpack it, or pack it by gzip."
_ENCODE = "Save the file as UTF-8."
_FOREIGN = (
    (b"\xff\xfe", "is UTF-16, not UTF-8", _ENCODE),
    (b"\xfe\xff", "is UTF-16, not UTF-8", _ENCODE),
    (b"PK\x03\x04", "is a zip archive or a spreadsheet", "Unpack it, or save it as CSV."),
    (b"\x28\xb5\x2f\xfd", "is packed by zstd", _UNPACK),
    (b"BZh", "is packed by bzip2", _UNPACK),
    (b"\xfd7zXZ", "is packed by xz", _UNPACK),
    (b"PAR1", "is Parquet", "Name it .parquet, or set ds_type: parquet."),
    (b"ARROW1", "is Arrow", "Name it .arrow, or set ds_type: arrow."),
)


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a text file, unpacked.

    Raises:
        DataError: by its first bytes the file is of a kind that is not read as text.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        is_packed = file.read(2) == _GZIP
    with gzip.open(path) if is_packed else path.open("rb") as opened:
        _refuse_foreign(opened.read(64), path)
        opened.seek(0)
        yield cast(BinaryIO, opened)


def _refuse_foreign(head: bytes, path: Path) -> None:
    """Refuse a file that by its first bytes is no text in UTF-8."""
    half = head[: len(head) // 2 * 2]
    if half and not any(half[1::2]) and all(half[::2]):  # Latin letters of two bytes, unmarked
        head = b"\xff\xfe"
    for mark, what, advice in _FOREIGN:
        if head.startswith(mark):
            raise DataError(f"the file {what}.", where=str(path), hint=advice)
