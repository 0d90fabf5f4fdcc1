"""Percentiles and means. A percentile is a value that was measured (nearest rank), never one in between."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from loadtest.report.schema import Distribution


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of the ascending `ordered` do not exceed."""
    if not ordered:
        raise ValueError("no values")
    return ordered[rank(len(ordered), percent) - 1]


def rank(count: int, percent: float) -> int:
    """The nearest rank, from 1, of a percentile among `count` values."""
    # The product is rounded first: 0.07 * 100 is a hair above 7 and must not become rank 8.
    return max(1, math.ceil(round(count * percent / 100, 9)))


def value_of(values: Distribution | None, name: str) -> float | None:
    """One of a distribution's figures, as p50; None where there is no distribution."""
    return None if values is None else getattr(values, name)


def distribution_ms(seconds: Sequence[float]) -> Distribution | None:
    """The distribution, in milliseconds, of values in seconds; None where there are none."""
    if not seconds:
        return None
    ordered = sorted(value * 1e3 for value in seconds)
    return Distribution(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 50),
        p90=percentile(ordered, 90),
        p95=percentile(ordered, 95),
        p99=percentile(ordered, 99),
        max=ordered[-1],
    )


def distribution_of_ticks_ms(ticks: Mapping[int, int], ticks_per_second: int) -> Distribution | None:
    """The same, of counted ticks: exact to half a tick, in memory that does not grow with the count."""
    if not ticks:
        return None
    values = sorted(ticks)
    running = list(accumulate(ticks[value] for value in values))
    count, ms = running[-1], 1e3 / ticks_per_second

    def at(percent: float) -> float:
        wanted = rank(count, percent)
        return next(value for value, upto in zip(values, running, strict=True) if upto >= wanted) * ms

    mean = sum(value * number for value, number in ticks.items()) / count * ms
    return Distribution(count=count, mean=mean, p50=at(50), p90=at(90), p95=at(95), p99=at(99), max=values[-1] * ms)
