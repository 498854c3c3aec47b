"""Tables and titled sections of the page."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from ndtrain.report.wording import number


def section(title: str, content: str) -> str:
    """A part of the page under its title."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def table(rows: Sequence[tuple[str, str]], *, numbers: bool = False) -> str:
    """Names and values; numbers stand right."""
    kind = ' class="number"' if numbers else ""
    body = "".join(
        f"<tr><th>{escape(name)}</th><td{kind}>{escape(value)}</td></tr>" for name, value in rows
    )
    return f"<table>{body}</table>"


def flat_rows(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Names and values of nested facts, one a row; long lists are left out."""
    for key, value in content.items():
        name = f"{above}{str(key).replace('_', ' ')}"
        if key == "v" or value is None or value in ({}, [], ""):
            continue
        if isinstance(value, Mapping):
            yield from flat_rows(value, f"{name}: ")
        elif isinstance(value, list | tuple):
            for place, part in enumerate(value[:20]):
                if isinstance(part, Mapping):
                    yield from flat_rows(part, f"{name} {place + 1}: ")
            if len(value) <= 8 and not any(isinstance(part, Mapping) for part in value):
                yield name, ", ".join(map(str, value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, number(value) if isinstance(value, float) else f"{value:,}"
        else:
            yield name, str(value)
