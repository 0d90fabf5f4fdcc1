"""Joining, leaving, being served and waiting in any order: no request is lost, and none gets more than a fair share."""

from itertools import combinations, count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.scheduling.wait_queue import Queue, ScanOrder, Ticket
from tests.unit.scheduling.builders import ask, in_order

STARVATION_SECONDS = 30.0
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
AGED = "batch requests that starve"
MOST_TOKENS = 100
SCAN = 8


class LineMachine(RuleBasedStateMachine):
    """The model keeps the waiting tenants, and for each two of them what both were served since both wait."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(1000, 10**9)
        self.tenants = self.queue.tenants("m")
        self.now = 100.0
        self.turns = count()
        self.waiting: list[Ticket] = []
        self.given: dict[tuple[str, str], list[float]] = {}

    # What happens.

    @rule(tenant=st.sampled_from("abc"), batch=st.booleans(), tokens=st.sampled_from([1, 40, MOST_TOKENS]))
    def join(self, tenant: str, batch: bool, tokens: int) -> None:
        self._join(tenant, batch, tokens)

    @rule(tenant=st.sampled_from("abc"), how_many=st.integers(5, 20))
    def flood(self, tenant: str, how_many: int) -> None:
        for _ in range(how_many):
            self._join(tenant, False, MOST_TOKENS)

    def _join(self, tenant: str, batch: bool, tokens: int) -> None:
        wish = ask(tenant=tenant, batch=batch, prompt_tokens=tokens, weight=WEIGHTS[tenant])
        self.tenants.arrived(wish, self.now)
        ticket = Ticket(wish, self.now, frozenset(), 0.0)
        ticket.tokens, ticket.turn = float(tokens), float(next(self.turns))
        self.queue.join(ticket)
        self.waiting.append(ticket)
        self._note_who_waits()

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.waiting:
            ticket = data.draw(st.sampled_from(self.waiting))
            self.waiting.remove(ticket)
            assert self.queue.leave(ticket)
            assert not self.queue.leave(ticket)
            self._note_who_waits()

    @rule(how_many=st.integers(1, 12))
    def serve(self, how_many: int) -> None:
        for ticket in in_order(self.queue, "m", self.order(how_many)):
            kind = self._kind(ticket)
            self.queue.serve(ticket, self.order(how_many))
            self.tenants.bound(self.tenants.of(ticket.demand), ticket.demand, 1, ticket.tokens, False)
            self.waiting.remove(ticket)
            for pair, given in self.given.items():
                if kind in pair:
                    given[pair.index(kind)] += ticket.tokens / WEIGHTS.get(kind, 1.0)
            self._note_who_waits()

    @rule(seconds=st.sampled_from([0.1, 5.0, STARVATION_SECONDS + 1]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self._look()
        self._note_who_waits()

    # What must hold.

    @invariant()
    def everybody_who_waits_is_there_once(self) -> None:
        assert len(self.queue) == len(self.waiting) == len(set(self.queue))
        assert set(self.queue) == set(self.waiting)
        assert self.tenants.waiting == len(self.waiting)
        assert self.tenants.waiting_batch == sum(ticket.demand.batch for ticket in self.waiting)
        assert self.tenants.waiting_tenants == len({ticket.demand.tenant for ticket in self.waiting})
        for tenant in self.tenants:
            assert tenant.waiting == sum(ticket.demand.tenant == tenant.name for ticket in self.waiting)

    @invariant()
    def a_look_finds_each_once_and_as_many_as_it_should(self) -> None:
        found = in_order(self.queue, "m", self.order(SCAN))
        assert len(found) == len(set(found)) == min(SCAN, len(self.waiting))
        assert set(found) <= set(self.waiting)

    @invariant()
    def no_batch_request_comes_before_an_interactive_one_unless_it_starves(self) -> None:
        fresh = [ticket.demand.batch and not self._starves(ticket) for ticket in self._all()]
        assert fresh == sorted(fresh)

    @invariant()
    def within_a_tenant_and_class_those_who_starve_come_first_and_then_it_is_by_turn(self) -> None:
        for name in WEIGHTS:
            for batch in (False, True):
                own = [one for one in self._all() if one.demand.tenant == name and one.demand.batch == batch]
                assert own == sorted(own, key=lambda one: (not self._starves(one), one.turn))

    @invariant()
    def of_two_who_both_wait_none_is_ahead_by_more_than_a_request_of_each(self) -> None:
        for (one, other), (more, less) in self.given.items():
            most = MOST_TOKENS / WEIGHTS.get(one, 1.0) + MOST_TOKENS / WEIGHTS.get(other, 1.0)
            assert abs(more - less) <= most

    def teardown(self) -> None:
        while self.waiting:
            self.serve(5)
        assert repr(self.queue) == "<Queue 0 waiting, 0 bytes: empty>"
        assert self.tenants.waiting == self.tenants.waiting_tenants == self.tenants.waiting_batch == 0

    # Helpers.

    def order(self, scan: int) -> ScanOrder:
        return ScanOrder(scan, self.now - STARVATION_SECONDS, by_turn=True)

    def _all(self) -> list[Ticket]:
        return in_order(self.queue, "m", self.order(1000))

    def _look(self) -> None:
        """As the gate does when anything has changed: it notices who starves by now."""
        in_order(self.queue, "m", self.order(SCAN))

    def _starves(self, ticket: Ticket) -> bool:
        return ticket.arrived_seconds < self.now - STARVATION_SECONDS

    def _kind(self, ticket: Ticket) -> str:
        """The kinds that its request competes with."""
        if not ticket.demand.batch:
            return ticket.demand.tenant
        return AGED if self._starves(ticket) else ""

    def _note_who_waits(self) -> None:
        """Two are compared from when both begin to wait until one of them does not."""
        kinds = {self._kind(ticket) for ticket in self.waiting} - {""}
        if kinds == {AGED} or len({(ticket.demand.tenant, ticket.demand.batch) for ticket in self.waiting}) == 1:
            kinds.discard(AGED)  # without competitors
        self.given = {pair: self.given.get(pair, [0.0, 0.0]) for pair in combinations(sorted(kinds), 2)}


TestLineMachine = LineMachine.TestCase
TestLineMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
