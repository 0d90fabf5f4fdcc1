"""Whether requests of an open loop pile up: whether the rate is above what the servers carry. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.report.concurrency import Level, mean
from loadtest.report.schema import Stall

_GROWTH = 1.5
_REQUESTS = 5
_EIGHTHS = 8


def backlog(first: float, last: float, levels: list[Level], stalls: Sequence[Stall]) -> tuple[float, float] | None:
    """The mean in flight in the second and in the last quarter of the arrivals; None where they did not pile up.

    One event raises what is in flight once; a rate above capacity raises it from quarter to quarter and to the end.
    What came in while the servers stood still is no sign of the rate either.
    """
    eighth = (last - first) / _EIGHTHS
    if eighth <= 0:
        return None
    ends = [first + place * eighth for place in range(_EIGHTHS + 1)]
    second, third, fourth = (mean_between(levels, ends[place], ends[place + 2]) for place in (2, 4, 6))
    still = mean_between(levels, ends[7], ends[8]) > mean_between(levels, ends[6], ends[7])
    held = sum(_rise(levels, stall) for stall in stalls if ends[2] <= stall.start < last)
    if second < third < fourth and still and fourth - held > max(_GROWTH * second, second + _REQUESTS):
        return second, fourth
    return None


def mean_between(levels: list[Level], start: float, end: float) -> float:
    inside = [level for level in levels if start < level.start < end]
    cut = [Level(start, _at(levels, start)), *inside]
    return mean([*cut, Level(end, cut[-1].in_flight)])


def _rise(levels: list[Level], stall: Stall) -> int:
    """How many more were in flight before the answers that ended it."""
    end = stall.start + stall.seconds
    before = _at(levels, stall.start)
    return max((level.in_flight - before for level in levels if stall.start <= level.start < end), default=0)


def _at(levels: list[Level], moment: float) -> int:
    return next((level.in_flight for level in reversed(levels) if level.start <= moment), 0)
