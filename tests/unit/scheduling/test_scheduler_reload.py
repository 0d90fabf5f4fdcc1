"""Settings change while requests wait: they wait on, in the order in which they would wait had they always been so."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import QueueFull, WaitExpired
from gateway.core.request import Demand
from gateway.core.scheduling.leases import LeaseBroker
from gateway.core.scheduling.scheduler import Lease
from gateway.core.scheduling.wait_queue import Ticket
from tests.unit.scheduling.builders import POLICIES, Hall, ask, hall, policy_of
from tests.unit.scheduling.virtual_time import run

ARRIVALS = st.lists(st.tuples(st.integers(1, 50_000), st.floats(0, 20)), min_size=1, max_size=12)


def with_waiting(arrivals: list[tuple[int, float]], *, policy: str, aging: float) -> Hall:
    """One slot, taken, and requests of these prompts that wait, each some seconds after the one before."""
    here = hall(1, policy=policy, aging=aging)
    here.scheduler.place(ask(), here.now)
    for number, (prompt_tokens, seconds) in enumerate(arrivals):
        here.now += seconds
        assert isinstance(here.scheduler.place(demand(number, prompt_tokens), here.now), Ticket)
    return here


def demand(number: int, prompt_tokens: int) -> Demand:
    return ask(prompt_tokens=prompt_tokens, hint=number, size_bytes=1)


def order(here: Hall) -> list[int]:
    queue = here.queue.of_model("m")
    return [] if queue is None else [ticket.demand.hint for ticket in queue.in_order(100)]


def follow(here: Hall, policy: str, **changes: float) -> None:
    changed = replace(here.scheduler._settings, **changes)
    here.scheduler.apply(changed, policy_of(policy, here.index, here.estimates))


@given(arrivals=ARRIVALS, old=st.sampled_from([0.0, 0.05, 1.0]), new=st.sampled_from([0.0, 0.05, 1.0]))
@settings(deadline=None)
def test_after_a_reload_the_order_is_that_of_the_new_aging(
    arrivals: list[tuple[int, float]], old: float, new: float
) -> None:
    reloaded = with_waiting(arrivals, policy="prefix", aging=old)
    follow(reloaded, "prefix", aging=new)
    assert order(reloaded) == order(with_waiting(arrivals, policy="prefix", aging=new))


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin"])
@given(arrivals=ARRIVALS)
@settings(deadline=None)
def test_after_a_reload_without_waiting_for_the_best_the_order_is_that_of_arrival(
    arrivals: list[tuple[int, float]], policy: str
) -> None:
    reloaded = with_waiting(arrivals, policy="prefix", aging=0.05)
    follow(reloaded, policy)
    assert order(reloaded) == [*range(len(arrivals))]
    follow(reloaded, "prefix")
    assert order(reloaded) == order(with_waiting(arrivals, policy="prefix", aging=0.05))


@pytest.mark.parametrize("old", POLICIES)
@pytest.mark.parametrize("new", POLICIES)
def test_a_reload_of_the_policy_loses_no_request_that_waits(old: str, new: str) -> None:
    here = with_waiting([(100, 1.0)] * 4, policy=old, aging=0.05)
    follow(here, new, scan=1)
    assert here.state == "a 1/1; 4 waiting"
    here.sites[0].resize(8, None)
    granted = [each for _ in range(4) for each in here.scheduler.scan_queue("m", here.now)]
    assert all(isinstance(lease, Lease) for _, lease in granted)
    assert here.state == "a 5/8; 0 waiting"


def test_a_reload_of_the_headroom_counts_for_the_next_request() -> None:
    here = hall(8, kv=2000)
    assert isinstance(here.scheduler.place(ask(prompt_tokens=900, output_tokens=50), 0.0), Lease)
    follow(here, "least_loaded", kv_headroom=0.5)
    assert isinstance(here.scheduler.place(ask(prompt_tokens=900, output_tokens=50), 0.0), Ticket)
    follow(here, "least_loaded", kv_headroom=1.0, prefill_window_seconds=100.0)
    assert len(here.scheduler.scan_queue("m", 0.0)) == 1


def test_a_reload_of_the_queue_limits_refuses_new_requests_only() -> None:
    here = with_waiting([(100, 0.0)] * 3, policy="least_loaded", aging=0.05)
    here.queue.backlog.apply(2, 1000)
    with pytest.raises(QueueFull):
        here.scheduler.place(ask(), here.now)
    assert len(here.queue) == 3


def test_a_reload_of_the_queue_timeout_counts_for_requests_that_come() -> None:
    async def main() -> None:
        here, loop = hall(1), asyncio.get_running_loop()
        broker = LeaseBroker(here.scheduler, here.queue, 60.0, clock=loop.time)
        began = loop.time()
        await broker.lease(ask())
        first = loop.create_task(broker.lease(ask()))
        await asyncio.sleep(1.0)
        broker.apply(5.0, 0.0)
        with pytest.raises(WaitExpired, match="within 5 s"):
            await broker.lease(ask())
        assert loop.time() - began == pytest.approx(6.0)
        with pytest.raises(WaitExpired, match="within 60 s"):
            await first
        assert loop.time() - began == pytest.approx(60.0)

    run(main())
