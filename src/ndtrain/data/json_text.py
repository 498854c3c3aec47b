"""JSON text to values; each way in which it cannot be used has words of its own."""

import json
import re
from collections.abc import Mapping
from typing import Any

_CONSTANTS: Mapping[str, float | None] = {
    "NaN": None,  # what a table writes where it has no value
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}
_PART_OF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_DECODER = json.JSONDecoder(parse_constant=_CONSTANTS.__getitem__)


class UnusableJson(ValueError):
    """JSON that is well formed but holds what nothing can be made of; its text says what."""


def load_json(text: str) -> Any:
    """The value of a JSON text; NaN is null.

    Raises:
        JSONDecodeError: it is no JSON.
        UnusableJson: it is nested too deep, or holds an endless number or half a character.
    """
    value, end = load_json_at(text, skip_space(text, 0))
    end = skip_space(text, end)
    if end < len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def load_json_at(text: str, position: int) -> tuple[Any, int]:
    """The JSON value that begins at a position, and where it ends; raises as `load_json` does."""
    try:
        value, end = _DECODER.raw_decode(text, position)
    except RecursionError:
        raise UnusableJson("brackets are nested too deep") from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # Python reads numbers of some thousand digits, no longer ones
        raise UnusableJson("a number has thousands of digits") from error
    if _PART_OF_PAIR.search(text, position, end):
        check_characters(json.dumps(value, ensure_ascii=False))
    return value, end


def check_characters(text: str) -> None:
    r"""Refuse half of a surrogate pair, as in "\ud83d": no tokenizer takes one.

    Raises:
        UnusableJson: there is one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise UnusableJson(f"'{half}' is half of a character, its other half is missing") from None


def end_of_value(text: str, position: int) -> int:
    """Where an array's element ends that cannot be read: before the next comma or bracket."""
    depth, quoted = 0, False
    while position < len(text):
        mark = text[position]
        if quoted:
            position += mark == "\\"
            quoted = mark != '"'
        elif mark in ",]}" and not depth:
            break
        else:
            quoted = mark == '"'
            depth += (mark in "[{") - (mark in "]}")
        position += 1
    return position


def skip_space(text: str, position: int) -> int:
    """The next position that is not white space."""
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def kind_in_words(value: Any) -> str:
    """The kind of a value as JSON names it, with its article; other kinds by Python's name."""
    names = {
        list: "a list",
        dict: "an object",
        str: "text",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    kind = type(value)
    return names.get(kind, f"a value of type {kind.__name__}")
