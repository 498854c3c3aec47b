"""Line charts as SVG text, drawn without a library; readable on light and dark pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

_WIDTH, _HEIGHT = 470, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 128, 44, 48
_LABEL_GAP = 14
_MARK_WIDTH = 34
_STYLE = """
.page { fill: #fcfcfb } .title { fill: #0b0b0b; font-weight: 600 } .text { fill: #52514e }
.grid { stroke: #e4e3df } .axis { stroke: #8a8984 } .limit { stroke: #0b0b0b }
.c0 { stroke: #2a78d6; color: #2a78d6 } .c1 { stroke: #eb6834; color: #eb6834 }
.c2 { stroke: #178a61; color: #178a61 } .c3 { stroke: #a86b00; color: #a86b00 }
.c4 { stroke: #8d4fc9; color: #8d4fc9 } .c5 { stroke: #c2417c; color: #c2417c }
.line { fill: none; stroke-width: 2 } .label { stroke: none; fill: currentColor }
.mark { fill: currentColor; stroke: none }
@media (prefers-color-scheme: dark) {
.page { fill: #1a1a19 } .title { fill: #ffffff } .text { fill: #c3c2b7 }
.grid { stroke: #383835 } .axis { stroke: #8a8984 } .limit { stroke: #ffffff }
.c0 { stroke: #5a9ded; color: #5a9ded } .c1 { stroke: #f28a5f; color: #f28a5f }
.c2 { stroke: #35c08d; color: #35c08d } .c3 { stroke: #eda100; color: #eda100 }
.c4 { stroke: #b48ae6; color: #b48ae6 } .c5 { stroke: #e87ba4; color: #e87ba4 }
}
"""

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One named line; points in the order of x."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Panel:
    """One chart; both axes are logarithmic.

    Attributes:
        limit: a horizontal line and its label.
        guides: vertical lines at x with labels, e.g. known links.
        marks: crossing points: series number, x, y and what is written there.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    limit: tuple[float, str] | None = None
    guides: tuple[tuple[float, str], ...] = ()
    marks: tuple[tuple[int, float, float, str], ...] = ()


def draw(panels: Sequence[Panel], *, title: str, columns: int = 2) -> str:
    """The panels on one page, as SVG."""
    rows = -(-len(panels) // columns)
    width, height = columns * _WIDTH, rows * _HEIGHT + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{escape(title)}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
        f'<text class="title" x="16" y="26" font-size="15">{escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        x, y = number % columns * _WIDTH, number // columns * _HEIGHT + 40
        parts.append(f'<g transform="translate({x} {y})">{_draw_panel(panel)}</g>')
    return "\n".join([*parts, "</svg>\n"])


@dataclass(frozen=True)
class _Frame:
    """Where values lie on a panel."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float

    def x(self, value: float) -> float:
        share = (log10(value) - self.low_x) / (self.high_x - self.low_x)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (log10(value) - self.low_y) / (self.high_y - self.low_y)
        share = min(1.0, max(0.0, share))
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _draw_panel(panel: Panel) -> str:
    frame = _frame(panel)
    parts = [
        f'<text class="title" x="{_LEFT}" y="20" font-size="12">{escape(panel.title)}</text>',
        f'<text class="text" x="{_LEFT}" y="36">{escape(panel.y_label)}</text>',
        f'<text class="text" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 12}" text-anchor="end">'
        f"{escape(panel.x_label)}</text>",
        *_grid(frame),
    ]
    for x, label in panel.guides:
        place = frame.x(x)
        parts.append(
            f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{_TOP}" '
            f'y2="{_HEIGHT - _BOTTOM}" stroke-dasharray="2 3"/>'
            f'<text class="text" font-size="9" transform="translate({place - 3:.1f} '
            f'{_HEIGHT - _BOTTOM - 4}) rotate(-90)">{escape(label)}</text>'
        )
    if panel.limit is not None:
        y = frame.y(panel.limit[0])
        parts.append(
            f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke-dasharray="5 4"/>'
            f'<text class="text" x="{_LEFT + 4}" y="{y - 4:.1f}">{escape(panel.limit[1])}</text>'
        )
    for number, series in enumerate(panel.series):
        if not series.points:
            continue
        points = _visible(series.points, frame)
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
        parts.append(f'<polyline class="line c{number % 6}" points="{path}"/>')
    parts += _labels(panel, frame)
    parts += _marks(panel, frame)
    return "".join(parts)


def _marks(panel: Panel, frame: _Frame) -> list[str]:
    """Crossing points with what is written there; texts move down where they would overlap."""
    parts, taken = [], list[tuple[float, float]]()
    for number, x, y, text in sorted(panel.marks, key=lambda mark: mark[1]):
        left, top = frame.x(x), frame.y(y)
        place = top + 16
        while any(abs(left - a) < _MARK_WIDTH and abs(place - b) < 12 for a, b in taken):
            place += 12
        taken.append((left, place))
        parts.append(
            f'<g class="c{number % 6}"><circle class="mark" cx="{left:.1f}" cy="{top:.1f}" r="4"/>'
            f'<text class="label" x="{left:.1f}" y="{place:.1f}" text-anchor="middle" '
            f'font-weight="600">{escape(text)}</text></g>'
        )
    return parts


def _frame(panel: Panel) -> _Frame:
    xs = [x for series in panel.series for x, _ in series.points]
    ys = [y for series in panel.series for _, y in series.points]
    if panel.limit is not None:
        # Far above the limit nothing can be read off: show ten times of it.
        ys = [min(y, 10 * panel.limit[0]) for y in ys] + [panel.limit[0] * 1.5]
    if not xs or not ys:
        return _Frame(0, 1, 0, 1)
    return _Frame(
        log10(min(xs)),
        max(log10(max(xs)), log10(min(xs)) + 0.01),
        log10(min(ys)) - 0.08,
        max(log10(max(ys)) + 0.08, log10(min(ys)) + 0.1),
    )


def _grid(frame: _Frame) -> list[str]:
    parts = []
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for value in _ticks(frame.low_y, frame.high_y):
        y = frame.y(value)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="text" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"{_short(value)}</text>"
        )
    for value in _ticks(frame.low_x, frame.high_x):
        x = frame.x(value)
        parts.append(
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
            f'<text class="text" x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">'
            f"{_short(value)}</text>"
        )
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    return parts


def _labels(panel: Panel, frame: _Frame) -> list[str]:
    """Names at the right ends of the lines, moved apart where they would overlap."""
    ends = sorted(
        (frame.y(_visible(series.points, frame)[-1][1]), number, series.name)
        for number, series in enumerate(panel.series)
        if series.points
    )
    parts, last = [], float("-inf")
    overflow = len(ends) * _LABEL_GAP
    for y, number, name in ends:
        place = max(y, last + _LABEL_GAP, 0)
        place = min(place, _HEIGHT - _BOTTOM - overflow + _LABEL_GAP)
        overflow -= _LABEL_GAP
        last = place
        end = frame.x(_visible(panel.series[number].points, frame)[-1][0])
        parts.append(
            f'<g class="c{number % 6}"><line x1="{end + 2:.1f}" y1="{y:.1f}" '
            f'x2="{_WIDTH - _RIGHT + 8}" y2="{place:.1f}" stroke-width="1"/><text class="label" '
            f'x="{_WIDTH - _RIGHT + 11}" y="{place + 4:.1f}">{escape(name)}</text></g>'
        )
    return parts


def _visible(points: Sequence[Point], frame: _Frame) -> list[Point]:
    """The points up to the first one beyond the top."""
    kept = []
    for point in points:
        kept.append(point)
        if log10(point[1]) > frame.high_y:
            break
    return kept


def short_number(value: float) -> str:
    """Two digits and a unit: `86k`, `4.4B`."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.995 * scale:
            part = value / scale
            return f"{part:.1f}{unit}" if part < 9.95 else f"{part:.0f}{unit}"
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def _ticks(low: float, high: float) -> list[float]:
    """Round values between two powers of ten; 1, 2 and 5 of each decade where there is room."""
    steps = (1, 2, 5) if high - low < 2.2 else (1,)
    values = [step * 10.0**power for power in range(floor(low), ceil(high) + 1) for step in steps]
    return [value for value in values if low <= log10(value) <= high]


def _short(value: float) -> str:
    """`500`, `2k`, `1M`."""
    for scale, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:g}{unit}"
    return f"{value:g}"
