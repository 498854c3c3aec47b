"""Rows of column files: CSV, Parquet and Arrow."""

import csv
import io
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from ndtrain.data.local_files import plain_suffix
from ndtrain.data.opening import open_bytes
from ndtrain.data.rows import RawRow
from ndtrain.errors import DataError


def read_csv(path: Path) -> Iterator[RawRow]:
    """Rows of a CSV file whose first line names the columns; of a .tsv file, parted by tabs."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    delimiter = "\t" if plain_suffix(path) == ".tsv" else ","
    # A wrong byte stays in its cell as half a character, so that its row can be named.
    with (
        open_bytes(path) as raw,
        io.TextIOWrapper(raw, encoding="utf-8-sig", newline="", errors="surrogateescape") as file,
    ):
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        names: list[str] = []
        line = 0
        try:
            for cells in reader:
                where, line = f"{path}:{line + 1}", reader.line_num
                if not names:
                    names = cells
                    wrong = _wrong_byte(names, where)
                    if wrong is not None:
                        raise wrong
                elif cells:
                    columns = dict(zip_longest(names, cells[: len(names)]))
                    yield RawRow(where, _refusal(cells, len(names), where) or columns)
        except csv.Error as error:
            raise DataError(f"not valid CSV: {error}.", where=f"{path}:{line + 1}") from None


def _refusal(cells: Sequence[str], count: int, where: str) -> DataError | None:
    """Why a row of a file with so many columns cannot be used."""
    if len(cells) > count:
        return DataError(
            f"the row has more cells than the {count} columns.",
            where=where,
            hint="Quote cells that hold commas or tabs.",
        )
    return _wrong_byte(cells, where)


def _wrong_byte(cells: Sequence[str], where: str) -> DataError | None:
    """The refusal of cells that are not UTF-8."""
    for cell in cells:
        try:
            cell.encode()
        except UnicodeEncodeError as error:
            byte = ord(error.object[error.start]) & 0xFF
            return DataError(
                f"byte 0x{byte:02x} is not UTF-8.", where=where, hint="Save the file as UTF-8."
            )
    return None


def read_parquet(path: Path) -> Iterator[RawRow]:
    """Rows of a Parquet file, one group at a time."""
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"not a readable Parquet file: {error}.", where=str(path)) from None
    number = 0
    for batch in file.iter_batches(batch_size=1024):
        for columns in batch.to_pylist():
            number += 1
            yield RawRow(f"{path}: row {number}", columns)


def read_arrow(path: Path) -> Iterator[RawRow]:
    """Rows of an Arrow file or stream, memory-mapped."""
    import pyarrow

    source = pyarrow.memory_map(str(path))
    try:
        try:
            file = pyarrow.ipc.open_file(source)
            batches = (file.get_batch(index) for index in range(file.num_record_batches))
        except pyarrow.ArrowInvalid:
            source.seek(0)
            batches = iter(pyarrow.ipc.open_stream(source))
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"not a readable Arrow file: {error}.", where=str(path)) from None
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, 1024):
            for columns in batch.slice(start, 1024).to_pylist():
                number += 1
                yield RawRow(f"{path}: row {number}", columns)
