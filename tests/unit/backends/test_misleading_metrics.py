"""Limits stay, or return after one fall, where metrics show an overload that there is not."""

from dataclasses import replace

import pytest

from gateway.core.backends.concurrency_limit import LimitChange
from gateway.core.backends.facts import Telemetry

from .limited import LOOK_SECONDS, Site, bound


class Illusion:
    """An engine with room whose metrics show an overload, whatever is sent."""

    def __init__(self, demand: int, *, waiting: int = 0, preempted: int = 0, is_idle_first: bool = False) -> None:
        self.limiter = bound(256)
        self.demand, self.waiting, self.preempted = demand, waiting, preempted
        running = 0 if is_idle_first else demand
        self.seen = Telemetry(0.0, running=running, waiting=waiting, preemptions=0.0, kv_usage=0.5, in_flight=running)
        self.limiter.observe(self.seen)

    def look(self) -> int:
        seen, ran = self.seen, min(self.demand, self.limiter.limit)
        preemptions = seen.preemptions + self.preempted
        self.seen = Telemetry(
            seen.at_seconds + LOOK_SECONDS,
            running=ran,
            waiting=self.waiting,
            preemptions=preemptions,
            kv_usage=0.5,
            in_flight=ran,
            sent=seen.sent,
        )
        self.limiter.observe(self.seen)
        return self.limiter.limit


@pytest.mark.parametrize("demand", [20, 100, 400])
@pytest.mark.parametrize("waiting", [10, 40, 1000])
def test_a_gauge_of_waiting_requests_that_is_too_high_costs_one_fall(demand: int, waiting: int) -> None:
    site = Illusion(demand, waiting=waiting)
    limits = [site.look() for _ in range(100)]
    assert min(limits) >= min(demand, 256) // 2
    assert limits[20:] == [256] * 80


def test_what_waits_while_nothing_runs_costs_no_fall() -> None:
    site = Illusion(100, waiting=40, is_idle_first=True)
    assert {site.look() for _ in range(100)} == {256}


def test_preemptions_without_a_full_kv_cache_cost_no_fall() -> None:
    site = Illusion(100, preempted=50)
    assert {site.look() for _ in range(100)} == {256}


def test_few_preemptions_cost_no_fall() -> None:
    site = Site(bound(256))
    for _ in range(100):
        site.look(in_flight=200, preempted=2)
    assert site.limiter.limit == 256


def test_an_offset_hides_no_overload() -> None:
    site = Site(bound(256), seats=80)
    show = site.limiter.observe

    def with_offset(sample: Telemetry | None) -> LimitChange | None:
        return show(sample and replace(sample, waiting=sample.waiting + 40))

    site.limiter.observe = with_offset  # type: ignore[method-assign]
    site.looks(200)
    limits = []
    for _ in range(100):
        site.look()
        limits.append(site.limiter.limit)
    assert max(limits) <= 90
    assert min(limits) >= 40


def test_a_gauge_that_is_right_again_counts_at_once() -> None:
    site = Illusion(100, waiting=40)
    for _ in range(50):
        site.look()
    site.waiting = 0
    site.look()
    site.waiting = 20
    assert min(site.look() for _ in range(3)) < 100
