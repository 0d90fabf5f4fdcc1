"""When requests are due, in seconds from the start. Arrivals are not rescaled to hit the rate exactly."""

from __future__ import annotations

import random
from collections.abc import Iterator


def constant(rate_per_second: float) -> Iterator[float]:
    """One arrival every 1/rate, the first at zero."""
    index = 0
    while True:
        yield index / rate_per_second
        index += 1


def poisson(rate_per_second: float, rng: random.Random) -> Iterator[float]:
    """Exponential gaps. The count over a run varies as a Poisson count does: that variance is part of the load."""
    due = 0.0
    while True:
        due += rng.expovariate(rate_per_second)
        yield due


def bounded(
    arrivals: Iterator[float], *, requests: int | None, duration_seconds: float | None
) -> Iterator[tuple[int, float]]:
    """(index, due) until `requests` have come or `duration_seconds` are over, whichever is first."""
    for index, due in enumerate(arrivals):
        if (requests is not None and index >= requests) or (duration_seconds is not None and due >= duration_seconds):
            return
        yield index, due
