"""Arrival schedules."""

from __future__ import annotations

import random
from itertools import islice, pairwise

from hypothesis import given
from hypothesis import strategies as st

from loadtest.drive.arrivals import bounded, constant, poisson
from loadtest.drive.plan import Plan, schedule, shared_out


def test_constant_arrivals_are_one_period_apart_and_do_not_drift() -> None:
    dues = list(islice(constant(3.0), 3001))
    assert dues[0] == 0.0
    assert dues[3000] == 1000.0


def test_poisson_gaps_have_the_mean_and_spread_of_an_exponential() -> None:
    dues = list(islice(poisson(50.0, random.Random(1)), 20_000))
    gaps = [b - a for a, b in pairwise(dues)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert abs(mean - 0.02) < 0.0005
    assert abs(deviation / mean - 1) < 0.03


def test_poisson_counts_vary_from_seed_to_seed_because_arrivals_are_not_rescaled() -> None:
    counts = {
        len(list(bounded(poisson(10.0, random.Random(seed)), requests=None, duration_seconds=10.0)))
        for seed in range(30)
    }
    assert len(counts) > 5


def test_a_schedule_ends_at_the_duration_or_the_request_count_whichever_is_first() -> None:
    assert len(list(bounded(constant(10.0), requests=None, duration_seconds=2.0))) == 20
    assert len(list(bounded(constant(10.0), requests=7, duration_seconds=2.0))) == 7


@given(st.integers(0, 2**31), st.floats(1, 200))
def test_every_worker_computes_the_same_schedule(seed: int, rate: float) -> None:
    plan = Plan.model_validate(
        {"url": "http://x", "model": "m", "rate_per_second": rate, "requests": 50, "workload": {"seed": seed}}
    )
    first = list(schedule(plan))
    assert first == list(schedule(plan))
    assert [index for index, _ in first] == list(range(50))
    assert all(a[1] <= b[1] for a, b in pairwise(first))


@given(st.integers(1, 10_000), st.integers(1, 64))
def test_shares_add_up_and_differ_by_at_most_one(total: int, workers: int) -> None:
    shares = [shared_out(total, worker, workers) for worker in range(workers)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1
