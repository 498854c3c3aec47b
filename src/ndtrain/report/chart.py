"""Line charts as SVG text, hand-written: no dependency, readable in light and in dark.

Colours and strokes are classes, so that a page or a picture styles them once (`CHART_STYLE`).
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from ndtrain.report.curve import bucketed, smoothed
from ndtrain.report.history import Point
from ndtrain.report.wording import number

CHART_STYLE = """
.chart { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #6f6d67; }
.chart .surface { fill: #fcfcfb; }
.chart .grid { stroke: #e6e5df; stroke-width: 1; }
.chart .base { stroke: #b9b7af; stroke-width: 1; }
.chart .title { fill: #1a1a19; font-weight: 600; font-size: 14px; }
.chart .end { fill: #1a1a19; font-weight: 600; paint-order: stroke; stroke: #fcfcfb;
  stroke-width: 4px; stroke-linejoin: round; }
.chart .line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.chart .raw { fill: none; stroke-width: 1; stroke-linejoin: round; opacity: .32; }
.chart .dot { stroke: #fcfcfb; stroke-width: 2; }
.chart .first { --ink: #2a78d6; } .chart .second { --ink: #e0602a; }
.chart .line, .chart .raw { stroke: var(--ink); } .chart .dot, .chart .key { fill: var(--ink); }
.chart .nonfinite { stroke: #d03b3b; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
  .chart { fill: #a3a19a; }
  .chart .surface { fill: #1a1a19; }
  .chart .grid { stroke: #30302d; } .chart .base { stroke: #5a5953; }
  .chart .title, .chart .end { fill: #f6f5f1; }
  .chart .end, .chart .dot { stroke: #1a1a19; }
  .chart .first { --ink: #5598e7; } .chart .second { --ink: #f08a5a; }
  .chart .nonfinite { stroke: #e66767; }
}
"""
"""CSS of every chart; system fonts only."""

_LARGEST = 1e300  # larger values are drawn here: spans and ticks must stay floats


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        name: what the legend calls it.
        points: step and value, steps ascending.
        role: class that colours it, `first` or `second`.
        dotted: mark each point (few points, such as evaluations).
        noisy: draw a smoothed line over the values.
    """

    name: str
    points: Sequence[Point]
    role: str = "first"
    dotted: bool = False
    noisy: bool = False

    @property
    def smooths(self) -> bool:
        """Whether there is enough to smooth."""
        return self.noisy and len(self.points) > 30

    @property
    def label(self) -> str:
        """The name in the legend."""
        return f"{self.name} (smoothed)" if self.smooths else self.name


@dataclass(frozen=True)
class Frame:
    """The drawing area and the values at its edges."""

    width: int
    height: int
    first_step: float
    last_step: float
    low: float
    high: float
    left: int = 62
    right: int = 66
    top: int = 46
    bottom: int = 34

    def x(self, step: float) -> float:
        """Horizontal place of a step."""
        share = (step - self.first_step) / (self.last_step - self.first_step)
        return round(self.left + share * (self.width - self.left - self.right), 2)

    def y(self, value: float) -> float:
        """Vertical place of a value."""
        value = max(-_LARGEST, min(_LARGEST, value))
        share = (value - self.low) / (self.high - self.low)
        return round(self.height - self.bottom - share * (self.height - self.top - self.bottom), 2)


def draw_chart(
    title: str,
    series: Sequence[Series],
    *,
    width: int = 720,
    height: int = 360,
    style: str = "",
    words: Callable[[float], str] = number,
) -> str:
    """An `<svg>` element with the curves, axes, legend and the last value of each curve.

    Args:
        title: what is drawn; shown and read out.
        series: the curves; empty ones are left out.
        width: of the picture.
        height: of the picture.
        style: CSS to put inside; empty when the page has it already.
        words: how a value is written.
    """
    series = [one for one in series if one.points]
    frame = _frame(series, width, height)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label={quoteattr(title)} data-frame={quoteattr(_frame_json(frame))}>',
        f"<style>{style}</style>" if style else "",
        f'<rect class="surface" width="{width}" height="{height}" rx="8"/>',
        f'<text class="title" x="{frame.left - 44}" y="26">{escape(title)}</text>',
        *(_legend(series, frame) if len(series) > 1 else ()),
        *_axes(frame, words),
    ]
    if not series:
        parts.append(
            f'<text x="{width / 2}" y="{height / 2}" text-anchor="middle">nothing yet</text>'
        )
    for one in series:
        parts.extend(_curve(one, frame))
    parts.extend(_end_labels(series, frame, words))
    parts.append("</svg>")
    return "\n".join(part for part in parts if part)


def _frame(series: Sequence[Series], width: int, height: int) -> Frame:
    steps = [step for one in series for step, _ in one.points] or [0.0, 1.0]
    values = [
        max(-_LARGEST, min(_LARGEST, value))
        for one in series
        for _, value in one.points
        if math.isfinite(value)
    ] or [0.0, 1.0]
    low, high = min(values), max(values)
    if high - low <= max(abs(low), abs(high), 1e-300) * 1e-9:
        room = max(abs(high) * 0.1, 1e-12)
        low, high = low - room, high + room
    room = (high - low) * 0.06
    # A quantity that is never negative gets no room below zero.
    low = max(0.0, low - room) if low >= 0 else low - room
    first, last = min(steps), max(steps)
    return Frame(width, height, first, last if last > first else first + 1, low, high + room)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round values between `low` and `high`, about as many as wanted."""
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step)
    return [place * step for place in range(first, math.floor(high / step) + 1)]


def _axes(frame: Frame, words: Callable[[float], str]) -> Iterator[str]:
    right, floor = frame.width - frame.right, frame.height - frame.bottom
    for value in ticks(frame.low, frame.high):
        y = frame.y(value)
        yield f'<line class="grid" x1="{frame.left}" x2="{right}" y1="{y}" y2="{y}"/>'
        word = escape(words(value))
        yield f'<text x="{frame.left - 8}" y="{y + 4}" text-anchor="end">{word}</text>'
    yield f'<line class="base" x1="{frame.left}" x2="{right}" y1="{floor}" y2="{floor}"/>'
    for step in ticks(frame.first_step, frame.last_step, 6):
        if step == int(step):
            x = frame.x(step)
            yield f'<text x="{x}" y="{floor + 18}" text-anchor="middle">{number(step)}</text>'
    yield f'<text x="{right + 22}" y="{floor + 18}">step</text>'


def _legend(series: Sequence[Series], frame: Frame) -> Iterator[str]:
    x = frame.width - 16.0
    for one in reversed(series):
        x -= 6.5 * len(one.label) + 6
        yield (
            f'<g class="{one.role}"><rect class="key" x="{x - 16:.1f}" y="17" width="10" '
            f'height="10" rx="2"/><text x="{x:.1f}" y="26">{escape(one.label)}</text></g>'
        )
        x -= 28


def _curve(one: Series, frame: Frame) -> Iterator[str]:
    data = bucketed(one.points)
    yield (
        f'<g class="{one.role}" data-name={quoteattr(one.name)} '
        f"data-points={quoteattr(_points_json(data))}>"
    )
    main = data
    if one.smooths:
        yield from _lines("raw", data, frame)
        main = bucketed(smoothed(one.points))
    yield from _lines("line", main, frame)
    if one.dotted or len(main) == 1:
        for step, value in main:
            if math.isfinite(value):
                yield f'<circle class="dot" cx="{frame.x(step)}" cy="{frame.y(value)}" r="4.5"/>'
    for step, value in data:
        if not math.isfinite(value):
            x = frame.x(step)
            yield (
                f'<path class="nonfinite" d="M{x - 4} {frame.top - 4}l8 8m0 -8l-8 8">'
                f"<title>step {number(step)}: {value}</title></path>"
            )
    yield "</g>"


def _end_labels(
    series: Sequence[Series], frame: Frame, words: Callable[[float], str]
) -> Iterator[str]:
    """The last value of each curve beside its end, moved apart where two would overlap."""
    ends = []
    for one in series:
        drawn = smoothed(one.points) if one.smooths else one.points
        finite = [point for point in drawn if math.isfinite(point[1])]
        if finite:
            ends.append(finite[-1])
    lowest = 0.0
    for step, value in sorted(ends, key=lambda end: frame.y(end[1])):
        y = max(frame.y(value) + 4, lowest)
        lowest = y + 15
        yield f'<text class="end" x="{frame.x(step) + 8}" y="{y}">{escape(words(value))}</text>'


def _lines(kind: str, points: Sequence[Point], frame: Frame) -> Iterator[str]:
    """The curve, broken where a value is not finite."""
    run: list[str] = []
    for step, value in [*points, (0.0, math.nan)]:
        if math.isfinite(value):
            run.append(f"{frame.x(step)},{frame.y(value)}")
        elif run:
            if len(run) > 1:
                yield f'<polyline class="{kind}" points="{" ".join(run)}"/>'
            run = []


def _points_json(points: Sequence[Point]) -> str:
    return json.dumps(
        [[step, float(f"{value:.6g}")] for step, value in points if math.isfinite(value)]
    )


def _frame_json(frame: Frame) -> str:
    edges = (frame.left, frame.right, frame.top, frame.bottom, frame.width, frame.height)
    return json.dumps([*edges, frame.first_step, frame.last_step, frame.low, frame.high])
