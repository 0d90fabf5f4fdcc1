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

from gateway.scheduling.fair_share import Tenants
from gateway.scheduling.wait_queue import ModelQueue, ScanOrder, TenantQueue, Ticket
from tests.unit.scheduling.builders import ask

STARVATION_SECONDS = 30.0
MOST_APART_TOKENS = 65536.0
SCAN = 12

_Contender = tuple[float, float, list[Ticket]]  # start, weight, and waiting tickets, in order


def order_by_looking_at_all(line: ModelQueue, order: ScanOrder) -> list[Ticket]:
    """Start-time fair queueing by its definition: all starts are computed at every scan."""
    flows, tenants = list(line.flows), line.tenants
    window = order.scan if len(flows) == 1 else max(8, 2 * order.scan // max(1, len(flows)))
    interactive = [contender(tenants, flow, later(flow, order, window)) for flow in flows if not flow.batch]
    batch = [flow for flow in flows if flow.batch]
    starving = [flow for flow in batch if flow.since_seconds < order.starving_since_seconds]
    aged = merged([contender(tenants, flow, flow.parts(order, window)[0]) for flow in starving], order.scan)
    others = [
        contender(tenants, flow, flow.parts(order, window)[1] if flow in starving else later(flow, order, window))
        for flow in batch
    ]
    if aged and len(flows) > 1:
        now, end = tenants.clocks[0].now, line._aged.end
        if not line._aged_wait:
            end = now if end < now else min(end, now + MOST_APART_TOKENS)
        interactive.append((max(end, now - MOST_APART_TOKENS), 1.0, aged))
    elif aged:
        return (aged + others[0][2])[: order.scan]
    first = merged(interactive, order.scan)
    return first + merged(others, order.scan - len(first))


def contender(tenants: Tenants, flow: TenantQueue, tickets: list[Ticket]) -> _Contender:
    share, clock = flow.tenant.shares[flow.batch], tenants.clocks[flow.batch]
    return max(share.end, clock.now - MOST_APART_TOKENS / share.weight), share.weight, tickets


def later(flow: TenantQueue, order: ScanOrder, window: int) -> list[Ticket]:
    return flow.in_order(order, window) + list(flow.tickets)[window : order.scan]


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
            ticket = Ticket(wish, self.now, frozenset(), 0.0)
            ticket.tokens, ticket.turn = tokens, float(next(self.turns) % 7)
            self.line.join(ticket)

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
        if tickets := self.line.in_order(self.order()):
            ticket = data.draw(st.sampled_from(tickets)) if keep_waiting else tickets[0]
            self.line.serve(ticket, self.order())
            self.line.leave(ticket)
            self.tenants.bound(self.tenants.of(ticket.demand), ticket.demand, 1, ticket.tokens, False)
            self.bound.append(ticket)

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
            ticket = data.draw(st.sampled_from(self.bound))
            self.bound.remove(ticket)
            self.tenants.released(self.tenants.of(ticket.demand), ticket.demand, 1, share * ticket.tokens)

    @rule(seconds=st.sampled_from([0.1, 5.0, STARVATION_SECONDS + 1]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def the_order_is_that_of_a_look_at_all(self) -> None:
        for by_turn in (True, False):
            expected = order_by_looking_at_all(self.line, self.order(by_turn=by_turn))
            assert self.line.in_order(self.order(by_turn=by_turn)) == expected

    @invariant()
    def what_is_kept_is_of_those_who_wait(self) -> None:
        flows = list(self.line.flows)
        for batch in (False, True):
            assert len(self.tenants.clocks[batch].waiting.entries) == sum(flow.batch == batch for flow in flows)
        assert len(self.tenants.clocks[1].starving.entries) + len(self.line._ages) == sum(flow.batch for flow in flows)

    def order(self, *, by_turn: bool = True) -> ScanOrder:
        return ScanOrder(SCAN, self.now - STARVATION_SECONDS, by_turn)


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
            line.join(Ticket(wish, now - waited, frozenset(), 0.0))
        order = ScanOrder(32, now - STARVATION_SECONDS, by_turn=True)
        line.in_order(order)  # notes once who starves by now
        costs.append(calls_in(lambda line=line, order=order: line.in_order(order)))  # type: ignore[misc]
    few, many = costs
    assert many <= few + 10


def test_an_arrival_does_not_visit_all_waiting_tenants() -> None:
    tenants = Tenants()
    line = ModelQueue(tenants, 0.0)
    calls = 0
    for number in range(4096):
        wish = ask(tenant=f"t{number}")
        calls += calls_in(lambda wish=wish: tenants.of(wish))  # type: ignore[misc]
        line.join(Ticket(wish, 1.0, frozenset(), 0.0))
    assert calls < 20 * 4096
