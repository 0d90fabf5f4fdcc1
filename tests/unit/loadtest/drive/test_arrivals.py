"""Arrival schedules."""

from __future__ import annotations

import random
from itertools import islice, pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.drive.plan import Plan, bounded, constant, gamma, poisson, ramped, schedule, shared_out


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


def test_gamma_gaps_have_the_mean_of_the_rate_and_the_spread_of_their_burstiness() -> None:
    for burstiness, expected in ((0.25, 2.0), (1.0, 1.0), (4.0, 0.5)):
        dues = list(islice(gamma(50.0, burstiness, random.Random(1)), 40_000))
        gaps = [b - a for a, b in pairwise(dues)]
        mean = sum(gaps) / len(gaps)
        deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
        assert abs(mean - 0.02) < 0.001
        assert abs(deviation / mean / expected - 1) < 0.05


@pytest.mark.parametrize(("first", "last"), [(0.0, 10.0), (2.0, 10.0), (10.0, 2.0), (5.0, 5.0)])
def test_a_ramp_brings_at_every_moment_as_many_as_its_rate_sums_up_to(first: float, last: float) -> None:
    dues = list(islice(ramped(constant(1.0), first, last, 20.0), 400))
    assert all(a <= b for a, b in pairwise(dues))
    for moment in (3.0, 10.0, 20.0, 25.0):
        inside = min(moment, 20.0)
        area = first * inside + (last - first) * inside**2 / 40 + last * max(0.0, moment - 20.0)
        assert abs(sum(due <= moment for due in dues) - area) <= 1


def test_users_of_a_concurrency_ramp_come_one_after_the_other_and_leave_last_come_first() -> None:
    def presence(first: int, last: int) -> list[tuple[float, float]]:
        load = {"concurrency": last, "first_concurrency": first, "ramp_seconds": 10, "duration_seconds": 20}
        plan = Plan.model_validate({"url": "http://x", "model": "m", **load})
        return [plan.presence(slot) for slot in range(plan.slots)]

    assert presence(1, 5) == [(0.0, inf), (2.5, inf), (5.0, inf), (7.5, inf), (10.0, inf)]
    assert presence(3, 1) == [(0.0, inf), (0.0, 10.0), (0.0, 5.0)]


def test_recorded_arrivals_pass_as_fast_as_asked() -> None:
    workload = {"kind": "trace"}
    plan = Plan.model_validate({"url": "http://x", "model": "m", "trace_speed": 2.0, "workload": workload})
    assert list(schedule(plan, [0.0, 1.0, 3.0])) == [(0, 0.0), (1, 0.5), (2, 1.5)]


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
