"""Numbers in plans: what divides them, how a choice of them reads, and what lies between them."""

from collections.abc import Iterable, Sequence
from itertools import pairwise


def divisors(number: int) -> list[int]:
    """Every number that divides `number`, the smallest first."""
    return [size for size in range(1, number + 1) if number % size == 0]


def either(numbers: Iterable[int]) -> str:
    """`1`, `1 or 3`, `1, 3 or 9`."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def along(points: Sequence[tuple[float, float]], at: float) -> float:
    """The value at `at` on straight lines between points (place, value), the highest place first.

    Outside of them it is that of the nearest.
    """
    if at >= points[0][0]:
        return points[0][1]
    for above, point in pairwise(points):
        if at >= point[0]:
            part = (at - point[0]) / (above[0] - point[0])
            return point[1] + part * (above[1] - point[1])
    return points[-1][1]
