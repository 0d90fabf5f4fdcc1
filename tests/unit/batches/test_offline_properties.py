"""Offline lines among other requests, in any order of events: capacity is kept, the order too, all is given back."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.core.request import Demand
from gateway.core.scheduling.scheduler import Lease
from gateway.core.scheduling.wait_queue import Ticket
from tests.recount import mismatches
from tests.unit.batches.offline_hall import DAY_SECONDS, OfflineHall, offline_hall
from tests.unit.batches.test_offline import line
from tests.unit.scheduling.builders import KV_HEADROOM, ask

SLOTS = (2, 5, 20)
KEYS = st.sampled_from([(), (1, 2, 3), tuple(range(1, 30))])
PROMPTS = st.sampled_from([1, 100, 900, 3000])


class OfflineMachine(RuleBasedStateMachine):
    """Three engines of different size; the gateway scans after every event, and holders of revoked leases obey late."""

    @initialize(policy=st.sampled_from(("prefix", "least_loaded")), kv=st.sampled_from([None, 9000]))
    def begin(self, policy: str, kv: int | None) -> None:
        self.here: OfflineHall = offline_hall(*SLOTS, policy=policy, kv=kv, max_requests=30, max_bytes=10_000)
        self.waiting: list[Ticket] = []
        self.bound: list[Lease] = []
        self.revoked: list[Lease] = []

    @rule(keys=KEYS, prompt_tokens=PROMPTS, batch=st.booleans(), sequences=st.integers(1, 2))
    def arrive(self, keys: tuple[int, ...], prompt_tokens: int, batch: bool, sequences: int) -> None:
        if len(self.here.queue) < 25:
            self._place(_sized(ask(batch=batch, sequences=sequences, prompt_tokens=prompt_tokens), keys))

    @rule(keys=KEYS, prompt_tokens=PROMPTS, laxity=st.sampled_from([DAY_SECONDS] * 3 + [900.0, -5.0]))
    def line_arrives(self, keys: tuple[int, ...], prompt_tokens: int, laxity: float) -> None:
        self._place(_sized(line(laxity, prompt_tokens=prompt_tokens), keys))

    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        if self.bound:
            self.here.scheduler.first_token(data.draw(st.sampled_from(self.bound)), self.here.now)
            self._scan()

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.bound:
            self._release(data.draw(st.sampled_from(self.bound)))
            self._scan()

    @rule()
    def holders_obey(self) -> None:
        for lease in self.revoked[:]:
            self._release(lease)
        self._scan()

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        if self.waiting:
            ticket = data.draw(st.sampled_from(self.waiting))
            assert self.here.leave(ticket)
            self.waiting.remove(ticket)

    @rule(seconds=st.sampled_from([0.05, 2.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        self.here.now += seconds
        self._scan()

    @invariant()
    def no_engine_has_more_than_it_may(self) -> None:
        for site in self.here.sites:
            own = [lease for lease in self.bound if lease.engine is site]
            assert site.load.in_flight == sum(lease.sequences for lease in own)
            assert site.load.in_flight <= site.slots
            if site.kv_cache_tokens and len(own) > 1:
                peak = min(site.kv.taken_tokens, site.kv.forecast(self.here.now).peak_tokens)
                assert peak <= KV_HEADROOM * site.kv_cache_tokens

    @invariant()
    def every_sum_is_that_of_a_recount(self) -> None:
        offline = self.here.offline
        of_lines = [ticket for ticket in self.waiting if ticket not in set(self.here.queue)]
        assert set(offline.model("m").waiting) == set(of_lines)
        of_sites = [offline.leases(site) for site in self.here.sites]
        held = [lease for own in of_sites for lease in (*own.held, *own.revoked)]
        assert len(offline) == len(of_lines) + len(held)
        for own in of_sites:
            assert own.held_sequences == sum(lease.sequences for lease in own.held)
            assert own.revoked_sequences == sum(lease.sequences for lease in own.revoked)
        assert set(held) <= set(self.bound)
        assert set(self.revoked) <= set(self.bound)

    def teardown(self) -> None:
        """All is answered, and nothing is left."""
        if not hasattr(self, "here"):
            return
        for _ in range(400):
            for lease in self.bound[:]:
                self._release(lease)
            if not self.waiting:
                break
            self.here.now += 10.0
            self._scan()
        assert not self.waiting
        assert not self.here.offline
        assert len(self.here.queue) == 0
        assert mismatches(self.here.sites, self.here.queue) == []
        for site in self.here.sites:
            assert repr(site.load) == "<EngineLoad 0 in flight, 0 decoding, 0 tokens>"
            assert repr(site.kv) == "<KvLedger 0 tokens, 0 requests, 0 prefixes>"
        assert all(tenant.in_flight == 0 for tenant in self.here.offline.model("m").tenants)

    def _place(self, demand: Demand) -> None:
        placed = self.here.place(demand)
        if isinstance(placed, Ticket):
            self.waiting.append(placed)
        else:
            self.bound.append(placed)
        self._scan()

    def _release(self, lease: Lease) -> None:
        self.bound.remove(lease)
        if lease in self.revoked:
            self.revoked.remove(lease)
        self.here.scheduler.release(lease, self.here.now)

    def _scan(self) -> None:
        scheduler, now = self.here.scheduler, self.here.now
        granted = scheduler.scan_queue("m", now)
        waits_interactive = any(not ticket.demand.batch for ticket in self.here.queue)
        paused = self.here.offline.pause(now)
        assert all(lease.demand.offline is not None for lease in paused)
        assert not set(paused) & set(self.revoked)
        self.revoked += paused
        lines = self.here.offline.bind(now)
        assert not lines or not waits_interactive
        for ticket, lease in [*granted, *lines]:
            assert isinstance(lease, Lease)
            self.waiting.remove(ticket)
            self.bound.append(lease)


def _sized(demand: Demand, keys: tuple[int, ...]) -> Demand:
    """With these prefix blocks, of 100 tokens each; a short prompt has none."""
    size = demand.prompt_tokens
    if size < 900:
        return demand
    used = keys[: size // 100]
    return replace(demand, keys=used, edges=tuple(range(100, 100 * len(used) + 1, 100)), prompt_size=size)


TestOfflineMachine = OfflineMachine.TestCase
TestOfflineMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(PROMPTS, st.sampled_from("abc"), st.booleans()), max_size=12), st.integers(0, 9))
def test_lines_do_not_change_the_order_of_others(requests: list[tuple[int, str, bool]], lines: int) -> None:
    orders = [_order_of_service(requests, count) for count in (0, lines)]
    assert orders[0] == orders[1]


def _order_of_service(requests: list[tuple[int, str, bool]], lines: int) -> list[int]:
    """The order in which these get a slot, of two that are busy, beside so many waiting lines."""
    here, order = offline_hall(2), list[int]()
    running = [here.scheduler.place(ask(), 0.0) for _ in range(2)]
    tickets: dict[Ticket, int] = {}
    for number, (prompt_tokens, tenant, batch) in enumerate(requests):
        placed = here.scheduler.place(ask(prompt_tokens=prompt_tokens, tenant=tenant, batch=batch), here.now)
        assert isinstance(placed, Ticket)
        tickets[placed] = number
    for _ in range(lines):
        here.place(line())
    while running:
        lease = running.pop(0)
        assert isinstance(lease, Lease)
        here.now += 1.0
        here.scheduler.release(lease, here.now)
        granted = here.scheduler.scan_queue("m", here.now)
        for revoked in here.offline.pause(here.now):
            here.scheduler.release(revoked, here.now)
        for ticket, more in [*granted, *here.offline.bind(here.now)]:
            assert isinstance(more, Lease)
            here.scheduler.first_token(more, here.now)
            running.append(more)
            if ticket in tickets:
                order.append(tickets[ticket])
    assert len(order) == len(requests)
    return order
