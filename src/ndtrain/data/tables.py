"""Rows of column files: CSV, Parquet and Arrow."""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

from ndtrain.data.rows import RawRow
from ndtrain.errors import DataError


def read_csv(path: Path) -> Iterator[RawRow]:
    """Rows of a CSV file whose first line names the columns."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, restkey="", strict=True)
        line = 1
        try:
            for columns in reader:
                where, line = f"{path}:{line + 1}", reader.line_num
                if "" in columns:
                    raise DataError(
                        f"the row has more cells than the {len(reader.fieldnames or ())} columns.",
                        where=where,
                        hint="Quote cells that hold commas.",
                    )
                yield RawRow(where, columns)
        except csv.Error as error:
            raise DataError(f"not valid CSV: {error}.", where=f"{path}:{reader.line_num}") from None
        except UnicodeDecodeError as error:
            raise DataError(
                f"byte 0x{error.object[error.start]:02x} is not UTF-8.",
                where=f"{path}:{reader.line_num + 1}",
                hint="Save the file as UTF-8.",
            ) from None


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
