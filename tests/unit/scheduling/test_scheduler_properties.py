"""Arrivals, departures, lost backends and slow starts in any order never break what placement promises."""

import math
from itertools import count, islice

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.core.errors import InvalidRequest, ModelNotFound, NoBackend, QueueFull
from gateway.core.request import Demand
from gateway.core.routing.engine import Engine
from gateway.core.routing.kv_reservations import KvLedger
from gateway.core.scheduling.scheduler import Lease
from gateway.core.scheduling.wait_queue import Ticket
from tests.recount import mismatches, taken_tokens
from tests.unit.scheduling.builders import (
    KV_HEADROOM,
    POLICIES,
    STARVATION_SECONDS,
    WINDOW_SECONDS,
    Hall,
    hall,
    in_order,
)

CAPS = (2, 4, 6, 3, 3)  # of a, b, c, and of the two engines of d
MAX_REQUESTS, MAX_BYTES, SCAN = 12, 120, 8
SERVES = {"m": (0, 1, 2), "o": (1, 2, 3, 4)}
NAMES = "abcd"

ASKS = st.builds(
    Demand,
    model=st.sampled_from([*SERVES, "unknown"]),
    keys=st.sampled_from([(), (1, 2, 3), tuple(range(1, 40)), (7, 8, 9)]),
    edges=st.just(tuple(range(100, 4000, 100))),
    prompt_size=st.just(4000),
    prompt_tokens=st.sampled_from([1, 200, 1000, 8000]),
    sequences=st.integers(0, 7),
    divisible=st.booleans(),
    output_tokens=st.sampled_from([None, 0, 50]),
    streams=st.booleans(),
    size_bytes=st.integers(0, 40),
    pinned=st.sampled_from([None, None, None, None, None, "a", "c", "d"]),
    rank=st.sampled_from([None, None, None, 0, 1, 7]),
    hint=st.sampled_from([0, 0, 5, 6]),
)


class PlacementMachine(RuleBasedStateMachine):
    """Four backends of different size, one of them with two engines; two models.

    After every event the queue is scanned.
    """

    @initialize(policy=st.sampled_from(POLICIES), kv=st.sampled_from([None, 9000]), holds=st.booleans())
    def begin(self, policy: str, kv: int | None, holds: bool) -> None:
        self.here: Hall = hall(
            *CAPS, policy=policy, kv=kv, max_requests=MAX_REQUESTS, max_bytes=MAX_BYTES, scan=SCAN, holds=holds
        )
        self.holds = holds
        for rank, site in enumerate(self.here.sites[3:]):
            site.name, site.rank = "d", rank
        self.policy = policy
        self.up = {site.name for site in self.here.sites}
        self.numbers = count()
        self.waiting: dict[Ticket, int] = {}
        self.bound: dict[int, Lease] = {}
        self.wishes: dict[int, Demand] = {}
        self.ended: dict[int, str] = {}
        self._fleet_changed()

    # What happens.

    @rule(wish=ASKS, avoid=st.frozensets(st.sampled_from(NAMES), max_size=4))
    def arrive(self, wish: Demand, avoid: frozenset[str]) -> None:
        number = next(self.numbers)
        self.wishes[number] = wish
        full = len(self.waiting) == MAX_REQUESTS or self._queued_bytes() + wish.size_bytes > MAX_BYTES
        try:
            placed = self.here.scheduler.place(wish, self.here.now, avoid)
        except (ModelNotFound, NoBackend, InvalidRequest, QueueFull) as refusal:
            self.ended[number] = type(refusal).__name__
            self._check_refusal(type(refusal), wish, full)
            return
        if isinstance(placed, Ticket):
            assert not full
            self.waiting[placed] = number
        else:
            self._check_binding(number, placed, avoid)
            assert placed.waited_seconds == 0.0
            assert wish.sequences == 0 or not self._waiting_for(wish.model)
        self._drain()

    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        if self.bound:
            number = data.draw(st.sampled_from(sorted(self.bound)))
            self.here.scheduler.first_token(self.bound[number], self.here.now)
            self._drain()

    @rule(data=st.data(), twice=st.booleans())
    def end(self, data: st.DataObject, twice: bool) -> None:
        if self.bound:
            number = data.draw(st.sampled_from(sorted(self.bound)))
            lease = self.bound.pop(number)
            for _ in range(1 + twice):
                self.here.scheduler.release(lease, self.here.now)
            self.ended[number] = "released"
            self._drain()

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        if self.waiting:
            ticket = data.draw(st.sampled_from(list(self.waiting)))
            assert self.here.queue.leave(ticket)
            self.ended[self.waiting.pop(ticket)] = "withdrawn"
            self._drain()

    @rule(seconds=st.sampled_from([0.01, 0.2, 5.0, STARVATION_SECONDS + 1]))
    def pass_time(self, seconds: float) -> None:
        self.here.now += seconds
        self._drain()

    @rule(name=st.sampled_from(NAMES))
    def backend_goes_or_comes(self, name: str) -> None:
        self.up ^= {name}
        self._fleet_changed()
        self._drain()

    @rule(index=st.integers(0, len(CAPS) - 1), share=st.sampled_from([0.0, 0.5, 1.0]))
    def limit_changes(self, index: int, share: float) -> None:
        site = self.here.sites[index]
        site.slots = max(1, int(site.cap * share))
        self._fleet_changed()
        self._drain()

    @rule(model=st.sampled_from([*SERVES]))
    def ask_why(self, model: str) -> None:
        """It changes nothing; what must hold is checked after it as after everything."""
        if not self._serving(model):
            return
        engines = self.here.sites
        placed = [engine.placed for engine in engines]
        verdicts = self.here.scheduler.explain(Demand(model, prompt_tokens=500), self.here.now)
        assert [verdict.cost for verdict in verdicts] == sorted(verdict.cost for verdict in verdicts)
        assert {verdict.engine.index for verdict in verdicts} == {site.index for site in self._serving(model)}
        assert [engine.placed for engine in engines] == placed

    # What must hold.

    @invariant()
    def every_request_is_in_exactly_one_place(self) -> None:
        places = [*self.waiting.values(), *self.bound, *self.ended]
        assert sorted(places) == sorted(self.wishes)
        assert set(self.here.queue) == set(self.waiting)
        assert len(self.here.queue) <= MAX_REQUESTS
        assert self._queued_bytes() <= MAX_BYTES

    @invariant()
    def what_is_taken_is_what_is_bound(self) -> None:
        for engine in self.here.sites:
            here = [lease for lease in self.bound.values() if lease.engine is engine]
            assert engine.load.in_flight == sum(work.sequences for work in here)
            ledger = self._ledger(engine)
            assert ledger.taken_tokens == taken_tokens(ledger) >= 0
            assert len(ledger) == len(here)
            assert 0 <= engine.load.decoding <= engine.load.in_flight

    @invariant()
    def every_sum_is_that_of_a_recount(self) -> None:
        assert mismatches(self.here.sites, self.here.queue) == []

    @invariant()
    def nobody_waits_for_a_model_that_nobody_serves_unless_held(self) -> None:
        assert self.holds or all(self._allowed(ticket.demand, ticket.avoid) for ticket in self.waiting)

    @invariant()
    def nobody_who_takes_no_slot_waits_while_somebody_serves(self) -> None:
        for ticket in self.waiting:
            assert ticket.demand.sequences or not self._allowed(ticket.demand, ticket.avoid)

    @invariant()
    def the_next_one_that_starves_waits_only_for_backends_that_are_closed(self) -> None:
        for model in SERVES:
            starving = self._next_that_starves(model)
            assert starving is None or not self._admitting(starving)

    @invariant()
    def without_waiting_for_the_best_backend_one_is_open_only_if_kept_for_one_that_starves(self) -> None:
        for model in SERVES if self.policy != "prefix" else ():
            waiting = in_order(self.here.queue, model, SCAN)
            open_engines = {engine.index for ticket in waiting for engine in self._admitting(ticket)}
            assert len(open_engines) <= (self._next_that_starves(model) is not None)

    @invariant()
    def nobody_holds_out_while_every_backend_would_take_him(self) -> None:
        for model in SERVES:
            oldest = in_order(self.here.queue, model, SCAN)
            if all(self.here.now - ticket.arrived_seconds <= STARVATION_SECONDS for ticket in oldest):
                for ticket in oldest:
                    allowed = self._allowed(ticket.demand, ticket.avoid)
                    assert not allowed or len(self._admitting(ticket)) < len(allowed)

    def teardown(self) -> None:
        """When everything works again, all waiting requests are served, and then nothing is left."""
        if not hasattr(self, "here"):
            return
        self.up = {site.name for site in self.here.sites}
        for site in self.here.sites:
            site.slots = site.cap
        self._fleet_changed()
        for ticket in [ticket for ticket in self.waiting if not self._allowed(ticket.demand, ticket.avoid)]:
            self.here.queue.leave(ticket)  # pinned to one that will never serve
            del self.waiting[ticket]
        for _ in range(3 * MAX_REQUESTS):
            self.here.now += STARVATION_SECONDS
            self._drain()
            for number, lease in list(self.bound.items()):
                self.here.scheduler.release(lease, self.here.now)
                self.ended[number] = "released"
                del self.bound[number]
        assert not self.waiting
        assert repr(self.here.queue) == "<Queue 0 waiting, 0 bytes: empty>"
        for engine in self.here.sites:
            assert repr(engine.load) == "<EngineLoad 0 in flight, 0 decoding, 0 tokens>"
            assert repr(self._ledger(engine)) == "<KvLedger 0 tokens, 0 requests, 0 prefixes>"

    # Helpers.

    def _check_refusal(self, kind: type[Exception], wish: Demand, full: bool) -> None:
        assert full or kind is not QueueFull
        assert (kind is ModelNotFound) == (wish.model == "unknown")
        if kind is InvalidRequest:
            assert wish.sequences > 1
            assert not wish.divisible

    def _fleet_changed(self) -> None:
        for model, indexes in SERVES.items():
            self.here.serving[model] = [self.here.sites[i] for i in indexes if self.here.sites[i].name in self.up]
        self.here.changed()

    def _serving(self, model: str) -> list[Engine]:
        return list(self.here.serving.get(model, ()))

    def _waiting_for(self, model: str) -> bool:
        return any(ticket.demand.model == model for ticket in self.waiting)

    def _queued_bytes(self) -> int:
        return sum(ticket.demand.size_bytes for ticket in self.waiting)

    def _next_that_starves(self, model: str) -> Ticket | None:
        line = self.here.queue.of_model(model)
        if line is None:
            return None
        starving = islice(line.starving(self.here.now - STARVATION_SECONDS), SCAN)
        return next((ticket for ticket in starving if self._allowed(ticket.demand, ticket.avoid)), None)

    def _drain(self) -> None:
        """Scan as long as that grants anything: of those that starve, one scan takes one."""
        while self._scan():
            pass

    def _scan(self) -> bool:
        waited = len(self.waiting)
        for model in self.here.queue.models():
            for ticket, granted in self.here.scheduler.scan_queue(model, self.here.now):
                number = self.waiting.pop(ticket)
                if isinstance(granted, Lease):
                    assert granted.waited_seconds == self.here.now - ticket.arrived_seconds
                    self._check_binding(number, granted, ticket.avoid)
                elif isinstance(granted, InvalidRequest):
                    allowed = self._allowed(ticket.demand, ticket.avoid)
                    assert not any(self._is_large_enough(site, ticket.demand) for site in allowed)
                    self.ended[number] = "InvalidRequest"
                else:
                    assert isinstance(granted, NoBackend)
                    assert not self.holds
                    assert not self._allowed(ticket.demand, ticket.avoid)
                    self.ended[number] = "NoBackend"
        return len(self.waiting) < waited

    def _check_binding(self, number: int, lease: Lease, avoid: frozenset[str]) -> None:
        wish = self.wishes[number]
        engine, site = lease.engine, self.here.sites[lease.engine.index]
        assert site in self._allowed(wish, avoid)
        assert lease.sequences == (min(wish.sequences, site.cap) if wish.divisible else wish.sequences)
        if wish.sequences:
            assert engine.load.in_flight <= site.cap
            alone = engine.load.in_flight == lease.sequences
            assert engine.load.in_flight <= site.slots or alone
            ledger, limit = self._ledger(engine), KV_HEADROOM * (site.kv_cache_tokens or 1 << 40)
            assert alone or min(ledger.taken_tokens, ledger.forecast(self.here.now).peak_tokens) <= limit
        self.bound[number] = lease

    def _allowed(self, wish: Demand, avoid: frozenset[str]) -> list[Engine]:
        sites = [site for site in self._serving(wish.model) if wish.pinned in (None, site.name)]
        sites = [site for site in sites if self._is_large_enough(site, wish)] or sites
        if wish.pinned is None:
            sites = [site for site in sites if site.name not in avoid] or sites
        return [site for site in sites if wish.rank is not None and site.rank == wish.rank] or sites

    def _is_large_enough(self, site: Engine, wish: Demand) -> bool:
        return wish.divisible or wish.sequences <= site.cap

    def _admitting(self, ticket: Ticket) -> list[Engine]:
        """The backends that could take a waiting request now."""
        allowed = {site.index for site in self._allowed(ticket.demand, ticket.avoid)}
        return [engine for engine in self.here.sites if engine.index in allowed and self._admits(engine, ticket.demand)]

    def _ledger(self, engine: Engine) -> KvLedger:
        return engine.kv

    def _admits(self, engine: Engine, wish: Demand) -> bool:
        site, load = self.here.sites[engine.index], engine.load
        wanted = min(wish.sequences, site.cap) if wish.divisible else wish.sequences
        if load.in_flight == 0 and wanted > site.slots:
            return wanted <= site.cap
        output, margin = self.here.lengths.expected(wish.model, wish.tenant, wish.output_tokens)
        ledger = self._ledger(engine)
        needed = min(ledger.taken_tokens + ledger.needed(wish, output), ledger.peak_with(wish, output, self.here.now))
        margins = [lease.margin_squared for lease in ledger.held] + [wish.sequences * margin * margin]
        needed += math.sqrt(sum(margins))
        fits = site.kv_cache_tokens is None or load.in_flight == 0 or needed <= KV_HEADROOM * site.kv_cache_tokens
        has_slots = load.in_flight + wanted <= site.slots
        return has_slots and fits and load.prefill_ahead_seconds(self.here.now) <= WINDOW_SECONDS


TestPlacementMachine = PlacementMachine.TestCase
TestPlacementMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
