"""Rows as they stand in files, each with its place, read one at a time.

JSON is read by our own reader: rows may differ in their keys, a broken one is named by its line,
and nothing is held in memory but the row at hand. What a reader refuses travels in the row's place,
for the dataset decides whether such rows stop the run. To add a file kind, write a reader here or
in `tables.py` and name it in `sources.py`.
"""

import json
from collections.abc import Generator, Iterator, Mapping, Set
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from ndtrain.data.json_text import (
    UnusableJson,
    end_of_value,
    kind_in_words,
    load_json,
    load_json_at,
    skip_space,
)
from ndtrain.data.opening import open_bytes
from ndtrain.errors import DataError

_LISTS = frozenset(
    {
        "attention_mask",
        "chosen",
        "completion",
        "conversation",
        "conversations",
        "input_ids",
        "labels",
        "messages",
        "prompt",
        "rejected",
        "segments",
        "tools",
    }
)
"""Columns that hold lists: a file of one such list alone is a row, not a list of rows."""
SKIP_ADVICE = "Leave such rows out with on_bad_row: skip."
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Row:
    """One row of a dataset.

    Attributes:
        where: its place for messages, `file:line` or `file: row number`.
        data: its columns.
    """

    where: str
    data: Mapping[str, Any]

    def fail(self, message: str, hint: str = "") -> DataError:
        """The error that names this row; the caller raises it."""
        return DataError(message, where=self.where, hint=hint)

    def text(self, column: str, *, key: str = "") -> str:
        """The text of a required column; numbers, true and false are written as in JSON.

        Args:
            column: its name.
            key: of the dataset, that names another column in its place.
        """
        value = self.data.get(column)
        if _is_null(value):
            known = ", ".join(f"'{name}'" for name in self.data) or "none"
            another = f" Name another with {key}." if key else ""
            kind = "is null" if column in self.data else "is missing"
            raise self.fail(
                f"column '{column}' {kind}.",
                f"Columns of this row: {known}.{another} {SKIP_ADVICE}",
            )
        if isinstance(value, str):
            return value
        if isinstance(value, (int, float)):
            return json.dumps(value)
        if isinstance(value, Decimal):
            return str(value)
        raise self.fail(
            f"column '{column}' holds {kind_in_words(value)} instead of text.",
            "" if isinstance(value, (dict, list)) else "Write the column as text.",
        )

    def optional_text(self, column: str) -> str:
        """The text of a column that may be missing or null."""
        return "" if _is_null(self.data.get(column)) else self.text(column)


def _is_null(value: Any) -> bool:
    """Whether a column has no value: tables write NaN for that."""
    return value is None or (isinstance(value, float) and value != value)


@dataclass(frozen=True)
class RawRow:
    """A row before parsing, cheap to hand to another process.

    Attributes:
        payload: one line of JSON, the parsed columns, or why its reader refuses the row.
    """

    where: str
    payload: bytes | Mapping[str, Any] | DataError

    @property
    def weight(self) -> int:
        """About how many bytes the row is."""
        if isinstance(self.payload, bytes):
            return len(self.payload)
        if isinstance(self.payload, DataError):
            return 0
        return sum(len(value) for value in self.payload.values() if isinstance(value, (str, list)))

    def parse(self) -> Row:
        """The row itself.

        Raises:
            DataError: the line is not one JSON object, or the reader refused the row.
        """
        if isinstance(self.payload, DataError):
            raise self.payload
        if not isinstance(self.payload, bytes):
            columns = self.payload.items()
            return Row(self.where, {name: None if _is_null(one) else one for name, one in columns})
        return Row(self.where, _parse_object(self.payload, self.where, otherwise=f" {SKIP_ADVICE}"))


def read_json(path: Path, columns: Set[str] = frozenset()) -> Iterator[RawRow]:
    """Rows of a .json or .jsonl file: an array or one object a line, told apart by content.

    Args:
        columns: names under which the dataset's rows have lists, beside the usual ones.
    """
    with open_bytes(path) as file:
        head = file.read(4096)
    first = head.removeprefix(_BOM).lstrip()[:1]
    if first == b"[":
        return _read_array(path)
    return _read_lines(path, columns)


def read_text(path: Path) -> Iterator[RawRow]:
    """Lines of a text file that are not blank, each as column `text`."""
    with open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            try:
                text = _decode(line.removeprefix(_BOM) if number == 1 else line, where)
            except DataError as error:
                yield RawRow(where, error)
                continue
            if text.strip():
                yield RawRow(where, {"text": text.rstrip("\r\n")})


def _read_lines(path: Path, columns: Set[str]) -> Iterator[RawRow]:
    """One JSON object a line, or one object that is the whole file."""
    lines = _filled_lines(path)
    number, first = next(lines, (0, b""))
    _, second = next(lines, (0, b""))
    lines.close()
    where = f"{path}:{number}"
    if second and first.lstrip().startswith(b"{") and not any(map(_is_object, (first, second))):
        try:
            with open_bytes(path) as file:
                row = _parse_object(file.read().removeprefix(_BOM), where)
        except DataError:
            if first.strip() == b"{":
                raise
        else:
            yield from _unwrap(row, path, where, columns)
            return
    if first and not second and _is_object(first):
        yield from _unwrap(_parse_object(first, where), path, where, columns)
        return
    for number, line in _filled_lines(path):
        yield RawRow(f"{path}:{number}", line)


def _filled_lines(path: Path) -> Generator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers."""
    with open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            payload = line.removeprefix(_BOM) if number == 1 else line
            if payload.strip():
                yield number, payload


def _is_object(line: bytes) -> bool:
    """Whether a line is a JSON object."""
    try:
        _parse_object(line, "")
    except DataError:
        return False
    return True


def _unwrap(row: Mapping[str, Any], path: Path, where: str, columns: Set[str]) -> Iterator[RawRow]:
    """A file that holds one object: one row, or a list of rows under a key that is no column."""
    values = [value for name, value in row.items() if name not in _LISTS | columns]
    rows = values[0] if len(row) == len(values) == 1 else None
    if not isinstance(rows, list) or (rows and not any(isinstance(item, dict) for item in rows)):
        yield RawRow(where, row)
        return
    for number, item in enumerate(rows, 1):
        yield _as_row(item, f"{path}: row {number}")


def _read_array(path: Path) -> Iterator[RawRow]:
    """Elements of a JSON array, each known by the line it starts on."""
    with open_bytes(path) as file:
        text = _decode(file.read().removeprefix(_BOM), str(path))
    position = skip_space(text, text.index("[") + 1)
    line, counted = 1, 0
    first = True
    while True:
        line, counted = line + text.count("\n", counted, position), position
        where = f"{path}:{line}"
        if position >= len(text):
            raise DataError("the JSON array is not closed; the file is cut off.", where=where)
        if text[position] == "]":
            break
        if not first:
            if text[position] != ",":
                raise DataError(
                    f"expected ',' or ']' in the JSON array, found '{text[position]}'.", where=where
                )
            position = skip_space(text, position + 1)
            line, counted = line + text.count("\n", counted, position), position
            where = f"{path}:{line}"
        try:
            item, position = load_json_at(text, position)
        except json.JSONDecodeError as error:
            raise _broken(error, text, f"{path}:{error.lineno}") from None
        except UnusableJson as error:
            yield RawRow(where, _unusable(error, where))
            position = end_of_value(text, position)
        else:
            yield _as_row(item, where)
        position = skip_space(text, position)
        first = False
    rest = skip_space(text, position + 1)
    if rest < len(text):
        line += text.count("\n", counted, rest)
        raise DataError("text follows the end of the JSON array.", where=f"{path}:{line}")


def _decode(raw: bytes, where: str) -> str:
    """UTF-8 text, whatever the locale; a wrong byte is named by its place."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start)
        place = f"{where}:{line + 1}" if ":" not in Path(where).name else where
        raise DataError(
            f"byte 0x{raw[error.start]:02x} is not UTF-8.",
            where=place,
            hint="Save the file as UTF-8.",
        ) from None


def _parse_object(raw: bytes, where: str, otherwise: str = "") -> Mapping[str, Any]:
    """One JSON object; `otherwise` follows the advice to mend it."""
    if b"\x00" in raw:
        raise DataError(
            "the row holds NUL bytes; the file was written only in part.",
            where=where,
            hint=f"Write the file again.{otherwise}",
        )
    text = _decode(raw, where)
    try:
        return _as_object(load_json(text), where)
    except json.JSONDecodeError as error:
        raise _broken(error, text, where, otherwise) from None
    except UnusableJson as error:
        raise _unusable(error, where) from None


def _broken(error: json.JSONDecodeError, text: str, where: str, otherwise: str = "") -> DataError:
    """The message for JSON that does not parse."""
    if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
        what = "the row is cut off"
    else:
        near = text[error.pos : error.pos + 20].split("\n")[0]
        what = f"{error.msg[0].lower()}{error.msg[1:]} at column {error.colno}, near '{near}'"
    return DataError(
        f"not valid JSON: {what}.", where=where, hint=f"Fix or remove this row.{otherwise}"
    )


def _unusable(error: UnusableJson, where: str) -> DataError:
    """The message for JSON that holds what nothing can be made of."""
    return DataError(
        f"the row cannot be used: {error}.", where=where, hint=f"Fix it. {SKIP_ADVICE}"
    )


def _as_row(item: Any, where: str) -> RawRow:
    """An element of a list of rows."""
    try:
        return RawRow(where, _as_object(item, where))
    except DataError as error:
        return RawRow(where, error)


def _as_object(item: Any, where: str) -> Mapping[str, Any]:
    """The item, which must be an object."""
    if not isinstance(item, dict):
        raise DataError(f"a row must be a JSON object, this is {kind_in_words(item)}.", where=where)
    return item
