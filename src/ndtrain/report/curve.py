"""Curves thinned and smoothed for drawing; values that are not finite are kept as they are."""

import math
from collections.abc import Sequence

from ndtrain.report.history import Point


def smoothed(points: Sequence[Point], share: float = 0.04) -> list[Point]:
    """The mean around each point, weights falling exponentially over about `share` of the points.

    Both sides count: from the left alone, a falling curve would be drawn above its values.
    """
    keep = 1 - 1 / max(1.0, share * len(points))
    values = [value for _, value in points]
    before = _sums(values, keep)
    after = reversed(_sums(values[::-1], keep))
    smooth = []
    for (step, value), (left, left_weight), (right, right_weight) in zip(
        points, before, after, strict=True
    ):
        if math.isfinite(value):
            # Halves, for values near the largest float; the point itself is in both sums.
            own = 1 - keep
            total = left / 2 + right / 2 - own * value / 2
            value = total / (left_weight / 2 + right_weight / 2 - own / 2)
        smooth.append((step, value))
    return smooth


def _sums(values: Sequence[float], keep: float) -> list[tuple[float, float]]:
    """At each place the weighted sum of the finite values so far, and the sum of their weights."""
    total, weight = 0.0, 0.0
    sums = []
    for value in values:
        total, weight = keep * total, keep * weight
        if math.isfinite(value):
            total += (1 - keep) * value
            weight += 1 - keep
        sums.append((total, weight))
    return sums


def bucketed(points: Sequence[Point], most: int = 600) -> list[Point]:
    """At most about `most` points with the same outline: the lowest and highest of each bucket.

    The first and the last point stay, and so does each value that is not finite.
    """
    if len(points) <= most:
        return list(points)
    buckets = most // 2
    kept = [points[0]]
    inner = points[1:-1]
    for place in range(buckets):
        part = inner[len(inner) * place // buckets : len(inner) * (place + 1) // buckets]
        finite = [point for point in part if math.isfinite(point[1])]
        chosen = [point for point in part if not math.isfinite(point[1])][:1]
        if finite:
            chosen += {min(finite, key=_value), max(finite, key=_value)}
        kept.extend(sorted(chosen))
    kept.append(points[-1])
    return kept


def _value(point: Point) -> float:
    return point[1]
