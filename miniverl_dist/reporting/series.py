"""Long series made short enough for a page, without losing what a reader looks for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

Point = tuple[float, float]
"""Step and value."""
GapPoint = tuple[float, float | None]
"""The same; None where the value is not a number, which breaks the line."""

MAX_POINTS: Final = 400
"""Points of a line that a page draws; a chart is about as many pixels wide."""
MAX_BARS: Final = 60


def extremes(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most ``limit`` (>= 4) of the points: the least and the greatest of each stretch.

    A spike of one step stays, which a mean would hide; first and last point stay, too.
    """
    if len(points) <= limit:
        return list(points)
    kept: list[Point] = [points[0]]
    for start, end in _stretches(len(points) - 2, limit // 2 - 1):
        part = points[start + 1 : end + 1]
        low, high = (pick(range(len(part)), key=lambda i: part[i][1]) for pick in (min, max))
        kept.extend(part[index] for index in sorted({low, high}))
    return [*kept, points[-1]]


def thinned(points: Sequence[GapPoint], limit: int = MAX_POINTS) -> list[GapPoint]:
    """``extremes`` of the numbers, and of each stretch without one that it broke, its first step.

    Not more than ``limit`` (>= 8) points; of very many gaps the first ones of equal stretches stay.
    """
    if len(points) <= limit:
        return list(points)
    gaps = [point for point in points if point[1] is None]
    numbers = [(x, y) for x, y in points if y is not None]
    shown = gaps[:: -(-len(gaps) // (limit // 2))] if gaps else []
    return sorted([*extremes(numbers, limit - len(shown)), *shown], key=lambda point: point[0])


def mean_line(points: Sequence[GapPoint], limit: int) -> list[GapPoint]:
    """``means`` of the numbers; a stretch in which none is a number is a gap."""
    if len(points) <= limit:
        return list(points)
    found: list[GapPoint] = []
    for start, end in _stretches(len(points), limit):
        part = points[start:end]
        known = [y for _, y in part if y is not None]
        middle = sum(x for x, _ in part) / len(part)
        found.append((middle, sum(known) / len(known) if known else None))
    return found


def means(points: Sequence[Point], limit: int = MAX_BARS) -> list[Point]:
    """At most ``limit`` points: mean step and mean value of each stretch."""
    if len(points) <= limit:
        return list(points)
    parts = [points[start:end] for start, end in _stretches(len(points), limit)]
    return [
        (sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts
    ]


def sums(counts: Sequence[Point], first: float, last: float, limit: int = MAX_BARS) -> list[Point]:
    """Counts by step added up over at most ``limit`` equal stretches of ``first`` .. ``last``.

    Steps without a count have none in the result either; a stretch stands at its middle.
    """
    width = max(1.0, (last - first + 1) / limit)
    found: dict[int, float] = {}
    for step, count in counts:
        place = int((step - first) // width)
        found[place] = found.get(place, 0.0) + count
    middle = (width - 1) / 2
    return [(first + place * width + middle, found[place]) for place in sorted(found)]


def _stretches(size: int, count: int) -> list[tuple[int, int]]:
    """``count`` neighbouring parts of ``range(size)``, none empty (``count <= size``)."""
    return list(pairwise(size * index // count for index in range(count + 1)))
