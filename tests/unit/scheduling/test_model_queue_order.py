"""The order of the line is that of looking at every tenant, at the price of looking at a few."""

import sys
from collections.abc import Callable
from heapq import heapify, heappop, heapreplace
from itertools import count
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.core.scheduling.fair_share import Tenants
from gateway.core.scheduling.wait_queue import ModelQueue, TenantQueue, Ticket
from tests.unit.scheduling.builders import ask, ticket

STARVATION_SECONDS = 30.0
MOST_APART_TOKENS = 65536.0
SCAN = 12

_Contender = tuple[float, float, list[Ticket]]  # start, weight, and waiting tickets, in order


def order_by_looking_at_all(line: ModelQueue, scan: int) -> list[Ticket]:
    """Start-time fair queueing by its definition: all starts are computed at every scan."""
    first = merged([contender(line.tenants, flow) for flow in line.flows if not flow.batch], scan)
    return first + merged([contender(line.tenants, flow) for flow in line.flows if flow.batch], scan - len(first))


def contender(tenants: Tenants, flow: TenantQueue) -> _Contender:
    share, clock = flow.tenant.shares[flow.batch], tenants.clocks[flow.batch]
    start = max(share.end, clock.now - MOST_APART_TOKENS / share.weight)
    return start, share.weight, sorted(flow.tickets, key=lambda waiting: (waiting.turn, waiting.number))


def merged(contenders: list[_Contender], most: int) -> list[Ticket]:
    heap = [(start, number, weight, iter(tickets)) for number, (start, weight, tickets) in enumerate(contenders)]
    heapify(heap)
    found: list[Ticket] = []
    while heap and len(found) < most:
        start, number, weight, tickets = heap[0]
        ticket = next(tickets, None)
        if ticket is None:
            heappop(heap)
        else:
            found.append(ticket)
            heapreplace(heap, (start + ticket.tokens / weight, number, weight, tickets))
    return found


class OrderMachine(RuleBasedStateMachine):
    """Whatever moves shares, a scan finds the same as one of all tickets."""

    def __init__(self) -> None:
        super().__init__()
        self.tenants = Tenants()
        self.line = ModelQueue(self.tenants, 0.0)
        self.now = 100.0
        self.turns = count()
        self.bound: list[Ticket] = []

    NAMES = st.sampled_from("abcdef")
    WEIGHTS = st.sampled_from([0.5, 1.0, 1.0, 4.0])
    TOKENS = st.sampled_from([1.0, 100.0, 20_000.0, 70_000.0])

    @rule(name=NAMES, batch=st.booleans(), tokens=TOKENS, times=st.integers(1, 3))
    def join(self, name: str, batch: bool, tokens: float, times: int) -> None:
        known = next((tenant.weight for tenant in self.tenants if tenant.name == name), 1.0)
        for _ in range(times):
            wish = ask(tenant=name, batch=batch, weight=known)
            self.tenants.arrived(wish, self.now)
            self.line.join(ticket(wish, self.now, turn=float(next(self.turns) % 7), tokens=tokens))

    @rule(name=NAMES, weight=WEIGHTS)
    def reweigh(self, name: str, weight: float) -> None:
        self.tenants.arrived(ask(tenant=name, weight=weight), self.now)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if waiting := list(self.line):
            assert self.line.leave(data.draw(st.sampled_from(waiting)))

    @rule(data=st.data(), keep_waiting=st.booleans())
    def serve(self, data: st.DataObject, keep_waiting: bool) -> None:
        """The first goes, or any other while those before it keep waiting."""
        if tickets := self.line.in_order(SCAN):
            self.bind(data.draw(st.sampled_from(tickets)) if keep_waiting else tickets[0], starving=False)

    @rule()
    def serve_one_that_starves(self) -> None:
        starving = next(self.line.starving(self.now - STARVATION_SECONDS), None)
        if starving is not None:
            self.bind(starving, starving=True)

    def bind(self, chosen: Ticket, *, starving: bool) -> None:
        self.line.serve(chosen, self.now, starving=starving)
        self.line.leave(chosen)
        self.tenants.bound(self.tenants.of(chosen.demand), chosen.demand, 1, chosen.tokens, False)
        self.bound.append(chosen)

    @rule(name=NAMES, batch=st.booleans(), tokens=TOKENS)
    def serve_at_once(self, name: str, batch: bool, tokens: float) -> None:
        wish = ask(tenant=name, batch=batch)
        tenant = self.tenants.of(wish)
        self.tenants.bound(tenant, wish, 1, tokens, True)
        self.tenants.released(tenant, wish, 1, 0.0)

    @rule(data=st.data(), share=st.sampled_from([-1.0, -0.5, 3.0]))
    def release(self, data: st.DataObject, share: float) -> None:
        """It took more or less than was expected."""
        if self.bound:
            over = data.draw(st.sampled_from(self.bound))
            self.bound.remove(over)
            self.tenants.released(self.tenants.of(over.demand), over.demand, 1, share * over.tokens)

    @rule(seconds=st.sampled_from([0.1, 5.0, STARVATION_SECONDS + 1]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def the_order_is_that_of_a_look_at_all(self) -> None:
        assert self.line.in_order(SCAN) == order_by_looking_at_all(self.line, SCAN)
        assert self.line.in_order(1000) == order_by_looking_at_all(self.line, 1000)

    @invariant()
    def those_that_starve_are_of_one_class_and_the_oldest_of_each_tenant(self) -> None:
        since = self.now - STARVATION_SECONDS
        found = list(self.line.starving(since))
        if found:
            oldest = next(iter(self.line))
            of_class = {waiting for waiting in self.line if waiting.demand.batch == oldest.demand.batch}
            assert set(found) == {waiting for waiting in of_class if waiting.arrived_seconds < since}

    @invariant()
    def what_is_kept_is_of_those_who_wait(self) -> None:
        flows = list(self.line.flows)
        for batch in (False, True):
            assert len(self.tenants.clocks[batch].waiting.entries) == sum(flow.batch == batch for flow in flows)


TestOrderMachine = OrderMachine.TestCase
TestOrderMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def calls_in(act: Callable[[], Any]) -> int:
    """Functions that are called, those of C among them."""
    calls = 0

    def note(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("waited", [1.0, 31.0])
@pytest.mark.parametrize("batch", [False, True])
def test_a_scan_costs_no_more_where_thousands_of_tenants_wait(batch: bool, waited: float) -> None:
    now, costs = 100.0, []
    for tenants_waiting in (100, 4000):
        tenants = Tenants()
        line = ModelQueue(tenants, 0.0)
        for number in range(tenants_waiting):
            wish = ask(tenant=f"t{number}", batch=batch)
            tenants.arrived(wish, now - waited)
            line.join(ticket(wish, now - waited))
        costs.append(calls_in(lambda line=line: line.in_order(32)))  # type: ignore[misc]
        costs[-1] += calls_in(lambda line=line: next(line.starving(now - STARVATION_SECONDS), None))  # type: ignore[misc]
    few, many = costs
    assert many <= few + 10


def test_an_arrival_does_not_visit_all_waiting_tenants() -> None:
    tenants = Tenants()
    line = ModelQueue(tenants, 0.0)
    calls = 0
    for number in range(4096):
        wish = ask(tenant=f"t{number}")
        calls += calls_in(lambda wish=wish: tenants.of(wish))  # type: ignore[misc]
        line.join(ticket(wish, 1.0))
    assert calls < 20 * 4096
