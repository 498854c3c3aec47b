"""Numbers and values as people read them: durations, counts, losses, changes of a recipe."""

import json
import math
from typing import Any


def duration(seconds: float) -> str:
    """A length of time with two units at most: `42s`, `4m32s`, `3h05m`, `2d04h`."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def count(number: float) -> str:
    """A whole number with separators: `134,515,008`."""
    return f"{number:,.0f}" if math.isfinite(number) else str(number)


def short_count(number: float) -> str:
    """A count in three digits: `987`, `9.87k`, `134M`, `8.03B`."""
    if not math.isfinite(number):
        return str(number)
    size = abs(number)
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= limit * 0.9995:
            return f"{number / limit:#.3g}".rstrip(".") + unit
    return f"{number:.0f}" if number == int(number) else f"{number:.3g}"


def number(value: float) -> str:
    """A value on an axis or in a table: four digits, an exponent only far from one."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    mantissa, exponent = f"{value:.3g}".split("e") if "e" in f"{value:.3g}" else _exponent(value)
    return f"{mantissa}e{int(exponent)}"


def _exponent(value: float) -> tuple[str, str]:
    mantissa, exponent = f"{value:.2e}".split("e")
    return mantissa.rstrip("0").rstrip("."), exponent


def change(first: float, last: float) -> str:
    """How far a loss fell or rose, in percent of where it began."""
    if not (math.isfinite(first) and math.isfinite(last)) or first == 0:
        return ""
    percent = (last - first) / abs(first) * 100
    return f"{'−' if percent < 0 else '+'}{abs(percent):.1f} %"


def value_change(key: str, before: Any, after: Any) -> str:
    """Two values of a key as a recipe holds them; long ones are cut to where they differ."""
    old, new = _as_written(before), _as_written(after)
    pairs = enumerate(zip(old, new, strict=False))
    shared = next((place for place, (a, b) in pairs if a != b), min(len(old), len(new)))
    start = shared - _BEFORE_DIFFERENCE if shared > _LONGEST_VALUE // 2 else 0
    return f"{key}: {_cut(old, start)} -> {_cut(new, start)}"


def _as_written(value: Any) -> str:
    """A value as a recipe would hold it; no value at all is `unset`."""
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)


def _cut(text: str, start: int) -> str:
    """At most `_LONGEST_VALUE` characters, from `start` on where all are too many."""
    if len(text) <= _LONGEST_VALUE:
        return text
    rest = f"…{text[start:]}" if start else text
    return rest if len(rest) <= _LONGEST_VALUE else rest[: _LONGEST_VALUE - 1] + "…"


_LONGEST_VALUE = 80
_BEFORE_DIFFERENCE = 20

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 40) -> str:
    """The values as bars in at most `width` characters; what is not finite is a gap."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    cells = [_mean(part) for part in _parts(values, width)]
    shown = [cell for cell in cells if cell is not None]
    low, high = min(shown), max(shown)
    # Halved first: the span of the two largest floats is not a float.
    span = high / 2 - low / 2
    bars = []
    for cell in cells:
        if cell is None:
            bars.append(" ")
        else:
            share = (cell / 2 - low / 2) / span if span > 0 else 0.0
            bars.append(BARS[min(len(BARS) - 1, int(share * len(BARS)))])
    return "".join(bars)


def _parts(values: list[float], width: int) -> list[list[float]]:
    pieces = min(width, len(values))
    return [
        values[len(values) * place // pieces : len(values) * (place + 1) // pieces]
        for place in range(pieces)
    ]


def _mean(values: list[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return sum(value / len(finite) for value in finite) if finite else None
