"""Joining, leaving, being served and waiting in any order: no request is lost, and none gets more than a fair share."""

from itertools import combinations, count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.core.scheduling.wait_queue import Queue, Ticket
from tests.unit.scheduling.builders import ask, in_order, ticket

STARVATION_SECONDS = 30.0
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
MOST_TOKENS = 100
SCAN = 8


class LineMachine(RuleBasedStateMachine):
    """The model keeps the waiting tenants, and for each two of them what both were served since both wait.

    `owed`: what a tenant was served for its wait, per weight. It is charged for that: others may be ahead by as much.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(1000, 10**9)
        self.tenants = self.queue.tenants.of("m")
        self.now = 100.0
        self.turns = count()
        self.waiting: list[Ticket] = []
        self.given: dict[tuple[str, str], list[float]] = {}
        self.owed = dict.fromkeys(WEIGHTS, 0.0)

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
        joining = ticket(wish, self.now, turn=float(next(self.turns)))
        self.queue.join(joining)
        self.waiting.append(joining)
        self._note_who_waits()

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.waiting:
            leaving = data.draw(st.sampled_from(self.waiting))
            self.waiting.remove(leaving)
            assert self.queue.leave(leaving)
            assert not self.queue.leave(leaving)
            self._note_who_waits()

    @rule(how_many=st.integers(1, 12))
    def serve(self, how_many: int) -> None:
        for served in in_order(self.queue, "m", how_many):
            self._serve(served, starving=False)
            kind = self._kind(served)
            for pair, given in self.given.items():
                if kind in pair:
                    given[pair.index(kind)] += served.tokens / WEIGHTS[kind]
            self._note_who_waits()

    @rule(how_many=st.integers(1, 12))
    def serve_those_that_starve(self, how_many: int) -> None:
        """They are served for their wait, and their tenants are charged all the same."""
        for _ in range(how_many):
            line = self.queue.of_model("m")
            starving = None if line is None else next(line.starving(self.now - STARVATION_SECONDS), None)
            if starving is None:
                return
            self._serve(starving, starving=True)
            if kind := self._kind(starving):
                self.owed[kind] += starving.tokens / WEIGHTS[kind]
            self._note_who_waits()

    def _serve(self, served: Ticket, *, starving: bool) -> None:
        self.queue.serve(served, self.now, starving=starving)
        self.tenants.bound(self.tenants.of(served.demand), served.demand, 1, served.tokens, False)
        self.waiting.remove(served)

    @rule(seconds=st.sampled_from([0.1, 5.0, STARVATION_SECONDS + 1]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    # What must hold.

    @invariant()
    def everybody_who_waits_is_there_once(self) -> None:
        assert len(self.queue) == len(self.waiting) == len(set(self.queue))
        assert set(self.queue) == set(self.waiting)
        assert self.tenants.waiting == len(self.waiting)
        assert self.tenants.waiting_batch == sum(one.demand.batch for one in self.waiting)
        assert self.tenants.waiting_tenants == len({one.demand.tenant for one in self.waiting})
        for tenant in self.tenants:
            assert tenant.waiting == sum(one.demand.tenant == tenant.name for one in self.waiting)

    @invariant()
    def a_look_finds_each_once_and_as_many_as_it_should(self) -> None:
        found = in_order(self.queue, "m", SCAN)
        assert len(found) == len(set(found)) == min(SCAN, len(self.waiting))
        assert set(found) <= set(self.waiting)

    @invariant()
    def no_batch_request_comes_before_an_interactive_one(self) -> None:
        batch = [one.demand.batch for one in self._all()]
        assert batch == sorted(batch)

    @invariant()
    def within_a_tenant_and_class_it_is_by_turn(self) -> None:
        for name in WEIGHTS:
            for batch in (False, True):
                own = [one for one in self._all() if one.demand.tenant == name and one.demand.batch == batch]
                assert own == sorted(own, key=lambda one: one.turn)

    @invariant()
    def of_two_who_both_wait_none_is_ahead_by_more_than_a_request_of_each(self) -> None:
        for (one, other), (more, less) in self.given.items():
            most = MOST_TOKENS / WEIGHTS[one] + MOST_TOKENS / WEIGHTS[other]
            assert more - less <= most + self.owed[other]
            assert less - more <= most + self.owed[one]

    def teardown(self) -> None:
        while self.waiting:
            self.serve(5)
        assert repr(self.queue) == "<Queue 0 waiting, 0 bytes: empty>"
        assert self.tenants.waiting == self.tenants.waiting_tenants == self.tenants.waiting_batch == 0

    # Helpers.

    def _all(self) -> list[Ticket]:
        return in_order(self.queue, "m", 1000)

    def _kind(self, waiting: Ticket) -> str:
        """The tenants that its request competes with."""
        return "" if waiting.demand.batch else waiting.demand.tenant

    def _note_who_waits(self) -> None:
        """Two are compared from when both begin to wait until one of them does not."""
        kinds = {self._kind(waiting) for waiting in self.waiting} - {""}
        self.given = {pair: self.given.get(pair, [0.0, 0.0]) for pair in combinations(sorted(kinds), 2)}


TestLineMachine = LineMachine.TestCase
TestLineMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
