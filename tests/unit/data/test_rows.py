"""Reading rows: every row keeps its line, and a broken one is named by it."""

import json
from pathlib import Path

import pytest

from ndtrain.data.formats.completion import read_completion
from ndtrain.data.rows import RawRow, Row, read_json, read_text
from ndtrain.errors import DataError, ExitCode
from ndtrain.recipe.schema import DatasetSpec


def read(path: Path) -> list[Row]:
    return [raw.parse() for raw in read_json(path)]


def test_lines_know_their_numbers_past_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n\n   \n{"a": 2}\n')
    assert [(row.where, row.data) for row in read(path)] == [
        (f"{path}:1", {"a": 1}),
        (f"{path}:4", {"a": 2}),
    ]


@pytest.mark.parametrize(
    "content",
    [
        b'{"a": "x"}\n{"a": "y"}\n',
        b'{"a": "x"}\n{"a": "y"}',
        b'{"a": "x"}\r\n{"a": "y"}\r\n',
        b'\xef\xbb\xbf{"a": "x"}\n{"a": "y"}\n',
        b'\n\n{"a": "x"}\n\n{"a": "y"}\n\n\n',
        b'[{"a": "x"}, {"a": "y"}]',
        b'\xef\xbb\xbf [\r\n{"a": "x"},\r\n{"a": "y"}\r\n]\r\n',
        b'{\n "data": [{"a": "x"}, {"a": "y"}]\n}\n',
    ],
    ids=["lines", "no-last-newline", "crlf", "bom", "blank-lines", "array", "bom-array", "wrapped"],
)
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_content_decides_not_the_suffix(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    assert [row.data for row in read(path)] == [{"a": "x"}, {"a": "y"}]


def test_rows_may_differ_in_their_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"a": 1, "b": {"c": [1]}}, {"a": "text"}, {"b": {"d": None}, "z": 1.5}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    assert [row.data for row in read(path)] == rows


def test_array_elements_know_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[\n  {\n    "a": 1\n  },\n  {"a": 2}, {"a": 3}\n]\n')
    assert [row.where for row in read(path)] == [f"{path}:2", f"{path}:5", f"{path}:5"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": "cut', "not valid JSON"),
        (b'{"a": 1', "the row is cut off"),
        (b'{"a": 1}}', "at column 9, near '}'"),
        (b'{"a": \x00\x00}', "NUL bytes"),
        (b"\x00\x00\x00\x00", "NUL bytes"),
        (b'{"a": "\xff"}', "byte 0xff is not UTF-8"),
        (b"[1, 2]", "this is a list"),
        (b'"text"', "this is text"),
        (b"3", "this is a number"),
        (b"null", "this is null"),
        (b"a: 1", "not valid JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' * 6 + line + b"\n" + b'{"a": 1}\n')
    with pytest.raises(DataError) as caught:
        read(path)
    assert caught.value.where == f"{path}:7"
    assert message in caught.value.message
    assert caught.value.exit_code is ExitCode.DATA


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ('[\n{"a": 1},\n{"a": 2', 3, "cut off"),
        ('[\n{"a": 1},\n{"a": 2}\n', 4, "not closed"),
        ('[\n{"a": 1}\n{"a": 2}\n]', 3, "expected ',' or ']'"),
        ('[\n{"a": 1},\n7\n]', 3, "this is a number"),
        ('[\n{"a": 1}\n]\n{"a": 2}', 4, "text follows"),
        ('[\n{"a": 1},\n{"a": nope}\n]', 3, "at column 7"),
    ],
)
def test_a_broken_array_is_named(tmp_path: Path, content: str, line: int, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        read(path)
    assert caught.value.where == f"{path}:{line}"
    assert message in caught.value.message


def test_an_invalid_byte_in_an_array_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'[\n{"a": "x"},\n{"a": "\xe4"}\n]')
    with pytest.raises(DataError, match="byte 0xe4 is not UTF-8") as caught:
        read(path)
    assert caught.value.where == f"{path}:3"


def test_text_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\n\n two \n".encode())
    assert [(raw.where, raw.parse().data) for raw in read_text(path)] == [
        (f"{path}:1", {"text": "one"}),
        (f"{path}:3", {"text": " two "}),
    ]


def test_empty_file_has_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.touch()
    assert read(path) == []


SKIP = "Leave such rows out with on_bad_row: skip."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"b": "x", "c": 1},
            f"a.jsonl:3: column 'a' is missing. Columns of this row: 'b', 'c'. {SKIP}",
        ),
        ({"a": None}, f"a.jsonl:3: column 'a' is null. Columns of this row: 'a'. {SKIP}"),
        ({"a": ["x"]}, "a.jsonl:3: column 'a' holds a list instead of text."),
        ({}, f"a.jsonl:3: column 'a' is missing. Columns of this row: none. {SKIP}"),
    ],
)
def test_a_required_column_says_what_is_there(data: dict[str, object], message: str) -> None:
    with pytest.raises(DataError) as caught:
        Row("a.jsonl:3", data).text("a")
    assert str(caught.value) == message


def test_a_missing_column_names_the_key_that_maps_it() -> None:
    with pytest.raises(DataError) as caught:
        read_completion(Row("a.jsonl:3", {"b": "x"}), DatasetSpec(path="a", type="completion"))
    assert caught.value.hint == f"Columns of this row: 'b'. Name another with field. {SKIP}"


def test_a_row_that_is_cut_off_says_how_to_go_on_without_it() -> None:
    with pytest.raises(DataError) as caught:
        RawRow("a.jsonl:3", b'{"a": "wor').parse()
    assert str(caught.value) == (
        f"a.jsonl:3: not valid JSON: the row is cut off. Fix or remove this row. {SKIP}"
    )


def test_numbers_are_written_out() -> None:
    assert Row("x", {"a": 3}).text("a") == "3"
    assert Row("x", {"a": None}).optional_text("a") == ""
