"""Percentiles, means, intervals and significance tests of repeated runs. Pure.

A percentile is a measured value (nearest rank), never interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean, stdev
from typing import TypeVar

import numpy as np

from loadtest.report.schema import Distribution

Key = TypeVar("Key", bound=Hashable)

ALPHA = 0.05
FEWEST = 4  # runs of each of two sides that can differ significantly at all
# Beyond this number of values the normal approximation of the rank sum is as good as its exact distribution.
_MOST_EXACT = 60


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the mean (Student's t); None of fewer than three values.

    That of two would reach more than six times as far to either side as they are apart.
    """
    if len(values) < 3:
        return None
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def t_quantile(degrees: int) -> float:
    """Student's t that |T| exceeds with a probability of 5 %."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _within(angle, degrees) < 1 - ALPHA else (low, angle)
    return math.sqrt(degrees) * math.tan(low)


def _within(angle: float, degrees: int) -> float:
    """P(|T| <= sqrt(degrees) tan(angle)); Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    odd = degrees % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    total *= math.sin(angle)
    return (angle + total) * 2 / math.pi if odd else total


def mann_whitney(first: Sequence[float], other: Sequence[float]) -> float:
    """The two-sided p-value of the rank sum test: exact, ties included, up to 60 values."""
    both = np.array([*first, *other])
    # Twice the mid-ranks, so that they are whole numbers.
    ranks = (both[:, None] > both).sum(axis=1) + (both[:, None] >= both).sum(axis=1) + 1
    drawn, away = len(first), abs(int(ranks[: len(first)].sum()) - len(first) * (len(both) + 1))
    if len(both) > _MOST_EXACT:
        variance = drawn * len(other) / (len(both) * (len(both) - 1)) * float(((ranks - len(both) - 1.0) ** 2).sum())
        return math.erfc(away / math.sqrt(2 * variance)) if variance else 1.0
    # ways[k, s]: subsets of k of the ranks so far whose sum is s.
    ways = np.zeros((drawn + 1, int(ranks.sum()) + 1))
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, :-rank].copy()
    sums = np.abs(np.arange(ways.shape[1]) - drawn * (len(both) + 1))
    return float(ways[drawn, sums >= away].sum() / ways[drawn].sum())


def can_tell(first: int, other: int) -> bool:
    """Whether that many runs of each side can differ significantly at all: 4 and 4 can, 3 and 3 cannot."""
    return 2 / math.comb(first + other, first) <= ALPHA


def significant(p_values: Mapping[Key, float]) -> set[Key]:
    """The significant ones among multiple tests (Benjamini and Hochberg).

    If nothing differs, any is named in at most 5 % of the cases. Of those that are named, at most 5 % are chance on
    average.
    """
    ordered = sorted(p_values, key=lambda key: p_values[key])
    held = [place for place, key in enumerate(ordered, 1) if p_values[key] <= ALPHA * place / len(ordered)]
    return set(ordered[: max(held, default=0)])


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
