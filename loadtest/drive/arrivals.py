"""When requests are due, in seconds from the start. Arrivals are not rescaled to hit the rate exactly."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator


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


def gamma(rate_per_second: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Gamma gaps of that shape: 1 is Poisson, below 1 comes in bursts, above 1 is more even."""
    due = 0.0
    while True:
        due += rng.gammavariate(burstiness, 1 / (rate_per_second * burstiness))
        yield due


def ramped(at_rate_one: Iterable[float], first_rate: float, last_rate: float, ramp_seconds: float) -> Iterator[float]:
    """Arrivals of rate one, moved to a rate that goes evenly from the first to the last, and then stays."""
    during = (first_rate + last_rate) / 2 * ramp_seconds
    slope = (last_rate - first_rate) / ramp_seconds
    for count in at_rate_one:
        if count <= during:
            # The time at which the integral of the rate is `count`; this form of the root has no cancellation.
            root = math.sqrt(max(0.0, first_rate**2 + 2 * slope * count))
            yield 2 * count / (first_rate + root) if count else 0.0
        else:
            yield ramp_seconds + (count - during) / last_rate


def bounded(
    arrivals: Iterable[float], *, requests: int | None, duration_seconds: float | None
) -> Iterator[tuple[int, float]]:
    """(index, due) until `requests` have come or `duration_seconds` are over, whichever is first."""
    for index, due in enumerate(arrivals):
        if (requests is not None and index >= requests) or (duration_seconds is not None and due >= duration_seconds):
            return
        yield index, due
