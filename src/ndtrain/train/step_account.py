"""Where the time of some steps goes: each moment is of one kind, so that the shares are a whole.

Pure: spans of time in, sums out. All times are microseconds of one clock, also between host and
device.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ndtrain.train.kernel_kinds import (
    ATTENTION,
    COMMUNICATION,
    COPIES,
    MATMUL,
    OPTIMIZER,
    OTHER,
    kind_of,
)

WORK = (MATMUL, ATTENTION, OPTIMIZER, OTHER, COPIES)
"""Kinds of kernels; of several at one moment, the first in this order counts."""
BETWEEN = "between kernels"
RANKS = "waiting for other ranks"
DATA = "waiting for data"
HOST = "waiting for the host"
KINDS = (*WORK, BETWEEN, RANKS, DATA, HOST)
"""What a moment can be, in the order in which it is told."""

_OWN_PAUSE = 5.0
"""Up to here a pause is the device's own: from one waiting kernel to the next it takes 1 to 3."""

_LAYERS = (*WORK, COMMUNICATION, DATA)
_EXCHANGE = _LAYERS.index(COMMUNICATION)


class Span(NamedTuple):
    """Something that ran from `start` to `end`."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class StepAccount:
    """Sums over a window of time.

    Attributes:
        window: length of the window.
        times: each of `KINDS`, in this order; together they are the window.
        communication: in which ranks exchanged.
        hidden_communication: part of it in which another kernel ran as well.
    """

    window: float
    times: Mapping[str, float]
    communication: float
    hidden_communication: float

    @property
    def shares(self) -> dict[str, float]:
        """Of the window, by kind."""
        return {kind: time / self.window for kind, time in self.times.items()}


def account(
    kernels: Sequence[Span],
    *,
    optimizer: Sequence[Span],
    fetches: Sequence[Span],
    window: tuple[float, float],
) -> StepAccount:
    """Give every moment of the window to one kind.

    Args:
        kernels: what the device did; spans of several streams may overlap.
        optimizer: on the device; a kernel inside is the optimizer's whatever its name.
        fetches: in which the host waited for its next batch.
        window: start and end, one after the other.
    """
    begin, end = window
    edges: list[tuple[float, int, int]] = []
    kinds = (*kinds_of(kernels, optimizer), *(DATA for _ in fetches))
    for kind, span in zip(kinds, (*kernels, *fetches), strict=True):
        first, last = max(span.start, begin), min(span.end, end)
        if first < last:
            layer = _LAYERS.index(kind)
            edges += [(first, 1, layer), (last, -1, layer)]
    edges.sort()
    times = dict.fromkeys(KINDS, 0.0)
    communication = hidden = 0.0
    running = [0] * len(_LAYERS)
    now = begin
    for moment, change, layer in (*edges, (end, 0, 0)):
        length = moment - now
        if length > 0:
            top = next((place for place, count in enumerate(running) if count), None)
            times[_told(top, length)] += length
            if running[_EXCHANGE]:
                communication += length
                hidden += length if top != _EXCHANGE else 0.0
            now = moment
        running[layer] += change
    return StepAccount(end - begin, times, communication, hidden)


def _told(layer: int | None, length: float) -> str:
    """The kind of a time in which this layer is the topmost, or none is there."""
    if layer is None:
        return HOST if length > _OWN_PAUSE else BETWEEN
    return RANKS if layer == _EXCHANGE else _LAYERS[layer]


def kinds_of(spans: Iterable[Span], optimizer: Sequence[Span]) -> list[str]:
    """The kind of each span: by its name, or the optimizer's where it runs inside one of these.

    Exchanges stay what they are.
    """
    merged = _union(optimizer)
    starts = [start for start, _ in merged]
    kinds = []
    for span in spans:
        kind = kind_of(span.name)
        # its middle: clocks are read in nanoseconds, and the ends may be the annotation's own
        middle = (span.start + span.end) / 2
        place = bisect_right(starts, middle) - 1
        inside = place >= 0 and middle <= merged[place][1]
        kinds.append(OPTIMIZER if inside and kind != COMMUNICATION else kind)
    return kinds


def _union(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Starts and ends of what the spans cover, in order and apart from each other."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def covered(spans: Sequence[Span], window: tuple[float, float]) -> float:
    """Length of what the spans cover of the window."""
    begin, end = window
    return sum(max(0.0, min(last, end) - max(first, begin)) for first, last in _union(spans))
