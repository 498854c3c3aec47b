"""Reading rows: every row keeps its line, and a broken one is named by it."""

import gzip
import json
from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest

from ndtrain.data.formats.completion import read_completion
from ndtrain.data.rows import RawRow, Row, read_json, read_text
from ndtrain.data.sources import Files
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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (False, "false"),
        (1.5, "1.5"),
        (float("inf"), "Infinity"),
        (Decimal("1.50"), "1.50"),
    ],
)
def test_other_values_are_written_as_json_writes_them(value: object, text: str) -> None:
    assert Row("x", {"a": value}).text("a") == text
    assert Row("x", {"a": value}).optional_text("a") == text


@pytest.mark.parametrize("raw", [b'{"a": NaN}', {"a": float("nan")}])
def test_no_number_is_no_value(raw: bytes | dict[str, float]) -> None:
    row = RawRow("x:1", raw).parse()
    assert row.data == {"a": None}
    assert row.optional_text("a") == ""
    with pytest.raises(DataError, match="column 'a' is null"):
        row.text("a")
    with pytest.raises(DataError, match="column 'a' is null"):
        Row("x:1", {"a": float("nan")}).text("a")


@pytest.mark.parametrize(
    ("value", "kind"),
    [(date(2024, 5, 1), "a value of type date"), (b"x", "a value of type bytes")],
)
def test_values_of_tables_that_are_no_text(value: object, kind: str) -> None:
    with pytest.raises(DataError) as caught:
        Row("x:1", {"a": value}).text("a")
    assert str(caught.value) == (
        f"x:1: column 'a' holds {kind} instead of text. Write the column as text."
    )


TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("indent", [None, 1, "wide"])
@pytest.mark.parametrize(
    ("content", "rows"),
    [
        ({"messages": TALK}, [{"messages": TALK}]),
        ({"segments": [{"text": "a", "label": True}]}, [{"segments": [{"text": "a", "label": 1}]}]),
        ({"input_ids": [1, 2]}, [{"input_ids": [1, 2]}]),
        ({"words": ["a", "b"]}, [{"words": ["a", "b"]}]),
        ({"talk": TALK}, [{"talk": TALK}]),
        ({"data": [{"a": 1}, {"a": 2}]}, [{"a": 1}, {"a": 2}]),
        ({"data": [{"a": 1}], "version": 2}, [{"data": [{"a": 1}], "version": 2}]),
        ({"data": []}, []),
    ],
)
def test_a_file_of_one_object_is_a_row_or_holds_rows(
    content: object, rows: list[object], indent: int | str | None, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    text = json.dumps(content, indent=None if indent == "wide" else indent)
    path.write_text(text.replace(": [", ": [\n").replace("}, {", "},\n {") if indent else text)
    assert [raw.parse().data for raw in read_json(path, {"talk"})] == rows


def test_two_broken_lines_are_two_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1\n{"a": 2\n{"a": 3}\n')
    first, second, third = read_json(path)
    assert third.parse() == Row(f"{path}:3", {"a": 3})
    for number, broken in enumerate((first, second), 1):
        with pytest.raises(DataError, match="not valid JSON") as caught:
            broken.parse()
        assert caught.value.where == f"{path}:{number}"


def test_two_lines_are_two_rows_whatever_they_hold(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"data": [{"a": 1}]}\n\n{"data": [{"a": 2}]}\n')
    assert [(row.where, row.data) for row in read(path)] == [
        (f"{path}:2", {"data": [{"a": 1}]}),
        (f"{path}:4", {"data": [{"a": 2}]}),
    ]


DEEP = "[" * 100_000 + "]" * 100_000
UNUSABLE = [
    (r'{"a": "x \ud83d y"}', r"'\ud83d' is half of a character"),
    (r'{"a": {"\uDE00": 1}}', r"'\ude00' is half of a character"),
    (f'{{"a": {DEEP}}}', "brackets are nested too deep"),
    (f'{{"a": {"9" * 5000}}}', "a number has thousands of digits"),
]


@pytest.mark.parametrize(("row", "message"), UNUSABLE)
@pytest.mark.parametrize("layout", ["lines", "array"])
def test_json_that_nothing_can_be_made_of_is_one_bad_row(
    row: str, message: str, layout: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    lines = ['{"a": "]\\""}', row, '{"a": "\\ud83d\\ude00"}']
    path.write_text("\n".join(lines) if layout == "lines" else f"[{','.join(lines)}]")
    first, broken, last = read_json(path)
    assert (first.parse().data, last.parse().data) == ({"a": ']"'}, {"a": "😀"})
    with pytest.raises(DataError) as caught:
        broken.parse()
    assert message in caught.value.message
    assert caught.value.where == f"{path}:{2 if layout == 'lines' else 1}"
    assert SKIP in caught.value.hint


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json", "a.txt.gz"])
def test_packed_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(b'{"text": "a"}\n\n{"text": "b"}\n'))
    read_any = Files((path,), None).rows()
    texts = ['{"text": "a"}', '{"text": "b"}'] if ".txt" in name else ["a", "b"]
    assert [(raw.where, raw.parse().data) for raw in read_any] == [
        (f"{path}:1", {"text": texts[0]}),
        (f"{path}:3", {"text": texts[1]}),
    ]


def test_a_packed_file_that_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 99)[:-12])
    with pytest.raises(DataError, match="the file cannot be read: Compressed file ended") as caught:
        list(Files((path,), None).rows())
    assert caught.value.where == str(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}'.encode("utf-16"), "the file is UTF-16, not UTF-8. Save the file as UTF-8."),
        ('{"a": 1}'.encode("utf-16-le"), "the file is UTF-16, not UTF-8. Save the file as UTF-8."),
        (b"PK\x03\x04..", "the file is a zip archive or a spreadsheet. Unpack it, or save it as"),
        (b"\x28\xb5\x2f\xfd..", "the file is packed by zstd. Unpack it, or pack it by gzip."),
        (b"PAR1..", "the file is Parquet. Name it .parquet, or set ds_type: parquet."),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".txt", ".dat"])
def test_a_file_that_is_no_text(content: bytes, message: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(Files((path,), None).rows())
    assert str(caught.value).startswith(f"{path}: {message}")
