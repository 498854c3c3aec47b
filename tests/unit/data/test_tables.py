"""Column files: CSV, Parquet and Arrow give the same rows as JSON lines."""

import gzip
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from ndtrain.data.sources import Files
from ndtrain.errors import DataError

ROWS = [{"a": "x, y", "b": "1"}, {"a": "z\nw", "b": "2"}]


def rows_of(path: Path) -> list[tuple[str, object]]:
    return [(raw.where, raw.parse().data) for raw in Files((path,), None).rows()]


def test_csv_rows_know_their_first_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('\ufeffa,b\r\n"x, y",1\r\n"z\nw",2\r\n', encoding="utf-8", newline="")
    assert rows_of(path) == [(f"{path}:2", ROWS[0]), (f"{path}:3", ROWS[1])]


def test_csv_rows_know_their_line_past_blank_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('\na,b\n\n"x, y",1\n\n\nc\n')
    assert rows_of(path) == [
        (f"{path}:4", ROWS[0]),
        (f"{path}:7", {"a": "c", "b": None}),
    ]


@pytest.mark.parametrize("row", ['"c" d,2', '"c,2'])
def test_csv_row_that_is_not_quoted_right(row: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"a,b\n1,2\n{row}\n5,6\n")
    with pytest.raises(DataError, match="not valid CSV") as caught:
        rows_of(path)
    assert caught.value.where == f"{path}:3"


def test_csv_row_with_too_many_cells(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n1,2,3\n")
    with pytest.raises(DataError, match="more cells than the 2 columns") as caught:
        rows_of(path)
    assert caught.value.where == f"{path}:3"


def test_csv_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"a,b\n1,2\n\xff,3\n")
    with pytest.raises(DataError, match="byte 0xff is not UTF-8"):
        rows_of(path)
    first, wrong = Files((path,), None).rows()
    assert first.parse().data == {"a": "1", "b": "2"}
    with pytest.raises(DataError) as caught:
        wrong.parse()
    assert caught.value.where == f"{path}:3"


def test_csv_whose_columns_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"a,\xe9\n1,2\n")
    with pytest.raises(DataError, match="byte 0xe9 is not UTF-8") as caught:
        rows_of(path)
    assert caught.value.where == f"{path}:1"


def test_csv_with_a_column_without_a_name(tmp_path: Path) -> None:
    """A data frame's index, as pandas writes it."""
    path = tmp_path / "a.csv"
    path.write_text(",a\n0,x\n1,y\n")
    assert rows_of(path) == [
        (f"{path}:2", {"": "0", "a": "x"}),
        (f"{path}:3", {"": "1", "a": "y"}),
    ]


def test_columns_parted_by_tabs(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('a\tb\nx, y\t1\n"z\nw"\t2\n')
    assert rows_of(path) == [(f"{path}:2", ROWS[0]), (f"{path}:3", ROWS[1])]


def test_packed_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(gzip.compress(b"a\tb\n1\t2\n"))
    assert rows_of(path) == [(f"{path}:2", {"a": "1", "b": "2"})]


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist(ROWS), path)
    assert rows_of(path) == [(f"{path}: row 1", ROWS[0]), (f"{path}: row 2", ROWS[1])]


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.arrow"
    table = pa.Table.from_pylist(ROWS)
    make = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table)
    assert rows_of(path) == [(f"{path}: row 1", ROWS[0]), (f"{path}: row 2", ROWS[1])]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_file_that_is_something_else(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('{"a": 1}\n')
    with pytest.raises(DataError, match="not a readable"):
        rows_of(path)


def test_a_local_file_needs_neither_datasets_nor_pandas(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "hello"}\n')
    script = (
        "import sys; from pathlib import Path\n"
        "from ndtrain.data.prepare import prepare\n"
        "from ndtrain.model.byte_tokenizer import build_byte_tokenizer\n"
        "from ndtrain.recipe.schema import Recipe\n"
        "recipe = Recipe.model_validate({'learning_rate': 1e-3, 'datasets': "
        f"[{{'path': {str(path)!r}, 'type': 'completion'}}]}})\n"
        f"prepare(recipe, build_byte_tokenizer(), 'bytes', Path({str(tmp_path / 'c')!r}))\n"
        "print(sorted({'datasets', 'pandas'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"
