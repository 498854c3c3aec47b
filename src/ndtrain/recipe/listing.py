"""The bundled recipes as a table that fits the terminal."""

from collections.abc import Iterator, Sequence

from ndtrain.recipe.catalog import Example

_HEAD = ("NAME", "MODEL", "METHOD", "MESH", "GPUS", "TITLE")
_LEAST_TITLE = 32
"""Columns of the terminal that the title needs; others give way to it."""
_FIRST_TO_GO = ("MESH", "MODEL", "METHOD", "GPUS")


def list_lines(examples: Sequence[Example], width: int | None) -> Iterator[str]:
    """A head and one line a recipe.

    Args:
        examples: what is listed.
        width: of the terminal; columns that do not fit are left out and titles are cut. None:
            everything is shown.
    """
    rows = [dict(zip(_HEAD, _HEAD, strict=True)), *map(_cells, examples)]
    widths = {name: max(len(row[name]) for row in rows) for name in _HEAD[:-1]}
    shown = [name for name in _HEAD if name != "TITLE"]
    for name in _FIRST_TO_GO:
        if width is None or _taken(widths, shown) + _LEAST_TITLE <= width:
            break
        shown.remove(name)
    room = None if width is None else max(1, width - _taken(widths, shown))
    for row in rows:
        cells = [row[name].ljust(widths[name]) for name in shown]
        yield "  ".join([*cells, _cut(row["TITLE"], room)])


def _cells(example: Example) -> dict[str, str]:
    one = example
    cells = (one.name, one.model, one.method, one.mesh, str(one.gpus or "CPU"), one.title)
    return dict(zip(_HEAD, cells, strict=True))


def _taken(widths: dict[str, int], shown: Sequence[str]) -> int:
    """Width of all columns before the title, with the gaps behind them."""
    return sum(widths[name] + 2 for name in shown)


def _cut(text: str, room: int | None) -> str:
    return text if room is None or len(text) <= room else f"{text[: room - 1]}…"
