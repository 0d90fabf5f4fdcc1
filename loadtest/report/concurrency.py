"""How many requests were in flight at each moment, by an event sweep: exact, where buckets over-count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Level:
    """From `start` until the next level, `in_flight` requests were open."""

    start: float
    in_flight: int


def sweep(intervals: Iterable[tuple[float, float]]) -> list[Level]:
    """The step function of open (start, end) intervals. An end at the moment of a start comes first."""
    events = sorted((moment, step) for start, end in intervals for moment, step in ((start, 1), (end, -1)))
    levels: list[Level] = []
    in_flight = 0
    for moment, step in events:
        in_flight += step
        if levels and levels[-1].start == moment:
            # Within one moment all ends come before all starts, so the last value is also the highest after them.
            levels[-1] = Level(moment, in_flight)
        else:
            levels.append(Level(moment, in_flight))
    return levels


def peak(levels: list[Level]) -> int:
    """The most that were ever in flight."""
    return max((level.in_flight for level in levels), default=0)


def mean(levels: list[Level]) -> float:
    """The time-weighted mean from the first start to the last end."""
    if not levels or levels[-1].start <= levels[0].start:
        return 0.0
    area = sum(a.in_flight * (b.start - a.start) for a, b in pairwise(levels))
    return area / (levels[-1].start - levels[0].start)


def span_at_least(levels: list[Level], wanted: float) -> tuple[float, float] | None:
    """From the first moment at or above `wanted` to the last moment it is left; None where it is never reached."""
    start = next((level.start for level in levels if level.in_flight >= wanted), None)
    if start is None:
        return None
    last = max(index for index, level in enumerate(levels) if level.in_flight >= wanted)
    return start, levels[last + 1].start


def longest_above(levels: list[Level], limit: float) -> float:
    """The longest stretch, in seconds, with more than `limit` in flight."""
    longest, since = 0.0, None
    for level in levels:
        if level.in_flight > limit:
            since = level.start if since is None else since
        elif since is not None:
            longest, since = max(longest, level.start - since), None
    return longest


def highest_within(levels: list[Level], edges: list[float]) -> list[int]:
    """The highest level inside each bucket between neighbouring edges."""
    highest: list[int] = []
    position, current = 0, 0
    for end in edges[1:]:
        top = current
        while position < len(levels) and levels[position].start < end:
            current = levels[position].in_flight
            top = max(top, current)
            position += 1
        highest.append(top)
    return highest
