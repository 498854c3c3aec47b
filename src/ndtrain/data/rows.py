"""Rows as they stand in files, each with its place, read one at a time.

JSON is read by our own reader: rows may differ in their keys, a broken one is named by its line,
and nothing is held in memory but the row at hand. To add a file kind, write a reader here or in
`tables.py` and name it in `sources.py`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ndtrain.errors import DataError

_SPACE = " \t\r\n"
_SKIP = "Leave such rows out with on_bad_row: skip."
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
        """The text of a required column; numbers are written out.

        Args:
            column: its name.
            key: of the dataset, that names another column in its place.
        """
        value = self.data.get(column)
        if value is None:
            known = ", ".join(f"'{name}'" for name in self.data) or "none"
            another = f" Name another with {key}." if key else ""
            kind = "is null" if column in self.data else "is missing"
            raise self.fail(
                f"column '{column}' {kind}.",
                f"Columns of this row: {known}.{another} {_SKIP}",
            )
        if isinstance(value, str):
            return value
        if isinstance(value, (int, float)):
            return str(value)
        raise self.fail(f"column '{column}' holds {_kind(value)} instead of text.")

    def optional_text(self, column: str) -> str:
        """The text of a column that may be missing or null."""
        return self.text(column) if self.data.get(column) is not None else ""


@dataclass(frozen=True)
class RawRow:
    """A row before parsing, cheap to hand to another process.

    Attributes:
        payload: one line of JSON, or the parsed columns.
    """

    where: str
    payload: bytes | Mapping[str, Any]

    @property
    def weight(self) -> int:
        """About how many bytes the row is."""
        if isinstance(self.payload, bytes):
            return len(self.payload)
        return sum(len(value) for value in self.payload.values() if isinstance(value, (str, list)))

    def parse(self) -> Row:
        """The row itself.

        Raises:
            DataError: the line is not one JSON object.
        """
        if not isinstance(self.payload, bytes):
            return Row(self.where, self.payload)
        return Row(self.where, _parse_object(self.payload, self.where, otherwise=f" {_SKIP}"))


def read_json(path: Path) -> Iterator[RawRow]:
    """Rows of a .json or .jsonl file: an array or one object a line, told apart by content."""
    with path.open("rb") as file:
        head = file.read(4096)
    first = head.removeprefix(_BOM).lstrip()[:1]
    if first == b"[":
        return _read_array(path)
    return _read_lines(path)


def read_text(path: Path) -> Iterator[RawRow]:
    """Lines of a text file that are not blank, each as column `text`."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            text = _decode(line.removeprefix(_BOM) if number == 1 else line, where)
            if text.strip():
                yield RawRow(where, {"text": text.rstrip("\r\n")})


def _read_lines(path: Path) -> Iterator[RawRow]:
    """One JSON object a line; blank lines are passed over."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            payload = line.removeprefix(_BOM) if number == 1 else line
            if not payload.strip():
                continue
            if number == 1 and payload.rstrip() == b"{":
                yield from _read_single(path)
                return
            yield RawRow(f"{path}:{number}", payload)


def _read_single(path: Path) -> Iterator[RawRow]:
    """A file that holds one object over many lines: one row, or rows under a single key."""
    row = _parse_object(path.read_bytes().removeprefix(_BOM), f"{path}:1")
    values = list(row.values())
    if len(values) == 1 and isinstance(values[0], list):
        for number, item in enumerate(values[0], 1):
            yield RawRow(f"{path}: row {number}", _as_object(item, f"{path}: row {number}"))
        return
    yield RawRow(f"{path}:1", row)


def _read_array(path: Path) -> Iterator[RawRow]:
    """Elements of a JSON array, each known by the line it starts on."""
    text = _decode(path.read_bytes().removeprefix(_BOM), str(path))
    decoder = json.JSONDecoder()
    position = _skip_space(text, text.index("[") + 1)
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
            position = _skip_space(text, position + 1)
            line, counted = line + text.count("\n", counted, position), position
            where = f"{path}:{line}"
        try:
            item, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise _broken(error, text, f"{path}:{error.lineno}") from None
        yield RawRow(where, _as_object(item, where))
        position = _skip_space(text, position)
        first = False
    rest = _skip_space(text, position + 1)
    if rest < len(text):
        line += text.count("\n", counted, rest)
        raise DataError("text follows the end of the JSON array.", where=f"{path}:{line}")


def _skip_space(text: str, position: int) -> int:
    """The next position that is not white space."""
    while position < len(text) and text[position] in _SPACE:
        position += 1
    return position


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
        return _as_object(json.loads(text), where)
    except json.JSONDecodeError as error:
        raise _broken(error, text, where, otherwise) from None


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


def _as_object(item: Any, where: str) -> Mapping[str, Any]:
    """The item, which must be an object."""
    if not isinstance(item, dict):
        raise DataError(f"a row must be a JSON object, this is {_kind(item)}.", where=where)
    return item


def _kind(value: Any) -> str:
    """The JSON name of a value's type, with its article."""
    names = {list: "a list", dict: "an object", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
