"""Placement: which engine a request is bound to, and when. Pure: values in, decisions out, time passed in.

A request goes to its best engine if that engine has capacity; otherwise it joins the queue. After every change the
queue is scanned (`drain`): each request is bound if its own best engine has capacity, and keeps waiting for that engine
otherwise, while later requests overtake it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter

from gateway.errors import GatewayError, InvalidRequest, ModelNotFound, NoBackend, QueueFull
from gateway.request import Ask
from gateway.routing.cost import prefill_seconds, step_seconds
from gateway.routing.engine import Engine, Option
from gateway.routing.engine_load import Work
from gateway.routing.estimates import Calibrations
from gateway.routing.kv_reservations import Reservation
from gateway.routing.policy import EngineVerdict, Policy
from gateway.scheduling.backlog import ServiceRates
from gateway.scheduling.capacity import Capacity
from gateway.scheduling.fair_share import Tenant, Tenants, expected_tokens
from gateway.scheduling.output_length import OutputLengths
from gateway.scheduling.queue_scan import QueueScan, WaitingHits
from gateway.scheduling.wait_queue import Order, Queue, Ticket, WaitEstimator


class EngineTable:
    """Which engines may take a request. `views` has those of each model, until the fleet changes."""

    def __init__(self, serving: Callable[[str], Sequence[Engine] | None], room: Capacity) -> None:
        self.views: dict[str, list[Engine]] = {}
        self._serving = serving
        self._room = room

    def is_served(self, ask: Ask, avoid: frozenset[str] = frozenset()) -> bool:
        """Whether some engine can take this request now or when it is its turn."""
        try:
            return bool(self.candidates(ask, avoid))
        except (NoBackend, ModelNotFound):
            return False

    def may_be_served(self, model: str) -> bool:
        """Whether an engine serves the model now, or none ever will."""
        try:
            return bool(self.views.get(model) or self.view(model))
        except ModelNotFound:
            return True

    def candidates(self, ask: Ask, avoid: frozenset[str]) -> list[Engine]:
        """The engines that may take this request. Raises ModelNotFound or NoBackend."""
        engines = self.views.get(ask.model)
        if engines is None:
            engines = self.view(ask.model)
        if ask.pinned is not None:
            engines = [engine for engine in engines if engine.name == ask.pinned]
        if ask.sequences > 1 and not all(self._room.is_large_enough(engine, ask) for engine in engines):
            engines = [engine for engine in engines if self._room.is_large_enough(engine, ask)] or engines
        if avoid and ask.pinned is None:
            engines = [engine for engine in engines if engine.name not in avoid] or engines
        if ask.rank is not None:
            engines = [engine for engine in engines if engine.rank == ask.rank] or engines  # one engine ignores it
        if not engines:
            raise NoBackend(f"No backend for model {ask.model!r} is available.", retry_after_seconds=2.0)
        return engines

    def view(self, model: str) -> list[Engine]:
        """The engines of a model, read from the fleet. Raises ModelNotFound."""
        serving = self._serving(model)
        if serving is None:
            raise ModelNotFound(
                f"The model {model!r} does not exist. GET /v1/models lists the available models.", param="model"
            )
        engines = list(serving)
        if engines:  # names that clients make up are not kept
            self.views[model] = engines
        return engines

    def refuse_what_never_fits(self, ask: Ask, engines: Sequence[Engine]) -> None:
        """Raises InvalidRequest if none of these could run it, even if nothing else ran there."""
        if not any(self._room.is_large_enough(engine, ask) for engine in engines):
            largest = max(engine.cap for engine in engines)
            raise InvalidRequest(
                f"This request needs {ask.sequences} sequences (n x prompts); the limit of the backends for model"
                f" {ask.model!r} is {largest}. Send fewer per request.",
                param="n",
            )


_IDLE_SHARE = 0.5  # of what is in flight on the mean engine: one with more is not worth a longer look


@dataclass(frozen=True, slots=True)
class Knobs:
    """Settings of placement; see the configuration's `routing` and `admission`."""

    aging: float = 0.05
    kv_headroom: float = 0.95
    scan: int = 32
    starvation_seconds: float = 30.0
    hold_without_backend: bool = True


@dataclass(slots=True, eq=False)
class Binding:
    """A request bound to a backend: what it takes there until it is released."""

    engine: Engine
    work: Work
    reservation: Reservation
    hit_tokens: int
    waited_seconds: float
    ask: Ask
    tenant: Tenant
    charged_tokens: float  # to the tenant's share
    released: bool = False


class Placement:
    """Owner of what is taken on each backend."""

    def __init__(
        self,
        serving: Callable[[str], Sequence[Engine] | None],
        policy: Policy,
        queue: Queue,
        lengths: OutputLengths,
        calibrations: Calibrations,
        knobs: Knobs,
    ) -> None:
        self._policy = policy
        self._queue = queue
        self._calibrations = calibrations
        self._knobs = knobs
        self._room = Capacity(calibrations, lengths, knobs.kv_headroom)
        self.table = EngineTable(serving, self._room)
        self._views = self.table.views
        self._service_rates = ServiceRates()
        self.prospects = WaitEstimator(queue, self._service_rates)
        self._hits = WaitingHits(policy.hits)

    @property
    def waits_for_best(self) -> bool:
        """Whether a request may wait for its best engine while another is open."""
        return self._policy.waits_for_best

    def place(self, ask: Ask, now: float, avoid: frozenset[str] = frozenset()) -> Binding | Ticket:
        """Bind a new request at once, or give it a place in the line.

        Raises ModelNotFound, NoBackend, QueueFull, DeadlineUnmeetable, or InvalidRequest if it can never fit.
        """
        try:
            engines = self.table.candidates(ask, avoid)
        except NoBackend:
            if not self._knobs.hold_without_backend:
                raise
            held = self._hold(ask, now, avoid)
            if held is None:
                raise
            return held
        if ask.sequences == 0:
            return self._bind_light(ask, engines, now)
        if ask.sequences > 1:
            self.table.refuse_what_never_fits(ask, engines)
        tenants = self._queue.tenants(ask.model)
        tenant = tenants.arrived(ask, now)
        if tenants.waiting:  # a refusal is to cost little
            self._queue.refuse_if_full(ask, now, self.retry_after_seconds(ask.model, now))
        options = self._policy.options(ask, engines, now)
        if not tenants.waiting:
            guarded = tenants.has_much(tenant, now, batch=ask.batch)
            option = choose(options, ask, self._room, now, self._policy.waits_for_best, guarded)
            if option is not None:
                return self._bind(ask, option, now)
        ticket = Ticket(ask, now, avoid, min(option.prefill_seconds for option in options))
        if ask.deadline_seconds is not None:
            self.prospects.refuse_late(ticket, now, lambda: self.retry_after_seconds(ask.model, now))
        self._join(ticket, max(option.hit_tokens for option in options), now)
        if engines is self._views[ask.model]:
            self._hits.keep(ticket, [option.hit_tokens for option in options], engines, now)
        return ticket

    def _hold(self, ask: Ask, now: float, avoid: frozenset[str]) -> Ticket | None:
        """A place in the line for one whom nobody can serve now, in the hope that a backend comes back in time.

        None: no place is free, or it is too late already. How the line has moved tells nothing of when that will be.
        """
        self._queue.tenants(ask.model).arrived(ask, now)
        model = self._calibrations.of(ask.model).model
        ticket = Ticket(ask, now, avoid, prefill_seconds(model, 1.0, ask.prompt_tokens, 0))
        if ticket.late_seconds < now:
            return None
        try:
            self._join(ticket, 0, now)
        except QueueFull:
            return None
        return ticket

    def _join(self, ticket: Ticket, hit_tokens: int, now: float) -> None:
        ask = ticket.ask
        ticket.turn = ticket.prefill_seconds + self._knobs.aging * now
        ticket.tokens = expected_tokens(ask, hit_tokens, ask.sequences * self._room.output_tokens(ask))
        self._queue.join(ticket, self.retry_after_seconds(ask.model, now))

    def drain(self, model: str, now: float) -> list[tuple[Ticket, Binding | GatewayError]]:
        """Bind whoever can be bound now; they leave the line. An error for those whom nobody will ever serve."""
        granted: list[tuple[Ticket, Binding | GatewayError]] = []
        order = Order(self._knobs.scan, now - self._knobs.starvation_seconds, self._policy.waits_for_best)
        if self._pass(model, order, now, granted) and (line := self._queue.line(model)) is not None:
            further = line.further(order, now)
            if further is not None:
                self._pass(model, further, now, granted)
        return granted

    def _pass(self, model: str, order: Order, now: float, granted: list[tuple[Ticket, Binding | GatewayError]]) -> bool:
        """One look; returns whether an engine is left idle, and somebody behind these may want it."""
        tickets, eligible = self._look(model, order, now, granted)
        if not tickets:
            return False
        engines = self._views[model]
        has_much = self._has_much(self._queue.tenants(model), now)
        all_guarded = has_much is not None and all(has_much(ticket) for ticket in tickets)
        is_open = self._room.are_open(engines, model, now, guarded=all_guarded)
        if not any(is_open):
            return False
        hits = self._hits.of(tickets, engines, now)
        ranking = self._policy.ranking([ticket.ask for ticket in tickets], hits, engines, now)
        for row, its_engines in eligible.items():
            for column, engine in enumerate(engines):
                if engine not in its_engines:
                    ranking.close(column, row)

        def bind(ticket: Ticket, column: int, prefill_seconds: float) -> None:
            option = Option(engines[column], 0.0, prefill_seconds, int(ticket.hits[column]))
            self._queue.serve(ticket, order)
            granted.append((ticket, self._bind(ticket.ask, option, now, ticket)))

        QueueScan(
            engines, ranking, is_open, self._room, self._knobs.starvation_seconds, self._policy.waits_for_best, bind,
            has_much, all_guarded,
        ).run(tickets, now)  # fmt: skip
        if len(tickets) < order.scan:
            return False
        few = _IDLE_SHARE * sum(engine.load.in_flight for engine in engines) / len(engines)
        return any(engine.load.in_flight < few for engine in compress(engines, is_open))

    def _has_much(self, tenants: Tenants, now: float) -> Callable[[Ticket], bool] | None:
        """Tells from whom the last slots are kept; None = from nobody."""
        if not tenants.guards(now, batch=tenants.waiting_batch > 0):
            return None
        return lambda ticket: tenants.has_much(tenants.of(ticket.ask), now, batch=ticket.ask.batch)

    def _look(
        self, model: str, order: Order, now: float, granted: list[tuple[Ticket, Binding | GatewayError]]
    ) -> tuple[list[Ticket], dict[int, list[Engine]]]:
        """The next in line who can be served; by place, the engines of those for whom not every engine will do.

        Those whom nobody can serve for now are passed over, and take nobody's place.
        """
        start, count = order.start, order.start + order.scan
        end = count
        if self._knobs.hold_without_backend and not self.table.may_be_served(model):
            return [], {}
        while True:
            waiting = self._queue.in_order(model, order._replace(start=0, scan=count))
            tickets, eligible = self._eligible(waiting, now, granted)
            if len(tickets) == len(waiting) or len(waiting) < count or len(tickets) >= end:
                return tickets[start:end], {
                    at - start: engines for at, engines in eligible.items() if start <= at < end
                }
            count *= 2

    def _eligible(
        self, waiting: list[Ticket], now: float, granted: list[tuple[Ticket, Binding | GatewayError]]
    ) -> tuple[list[Ticket], dict[int, list[Engine]]]:
        if waiting and self._views.get(waiting[0].ask.model) and all(map(_goes_anywhere, waiting)):
            return waiting, {}
        tickets: list[Ticket] = []
        eligible: dict[int, list[Engine]] = {}
        for ticket in waiting:
            ask = ticket.ask
            if not self._views.get(ask.model) or not ticket.goes_anywhere:
                try:
                    its_engines = self.table.candidates(ask, ticket.avoid)
                    if ask.sequences > 1:
                        self.table.refuse_what_never_fits(ask, its_engines)
                except GatewayError as error:
                    if isinstance(error, NoBackend) and self._knobs.hold_without_backend:
                        continue
                    self._queue.leave(ticket)
                    granted.append((ticket, error))
                    continue
                if ask.sequences == 0:
                    self._queue.leave(ticket)
                    granted.append((ticket, self._bind_light(ask, its_engines, now, ticket)))
                    continue
                if its_engines is not self._views[ask.model]:
                    eligible[len(tickets)] = its_engines
            tickets.append(ticket)
        return tickets, eligible

    def _bind_light(self, ask: Ask, engines: list[Engine], now: float, ticket: Ticket | None = None) -> Binding:
        """A request that takes no slot goes where least runs."""
        return self._bind(ask, Option(min(engines, key=_in_flight), 0.0, 0.0, 0), now, ticket)

    def explain(self, ask: Ask, now: float, avoid: frozenset[str] = frozenset()) -> list[EngineVerdict]:
        """What each engine would mean for a request now, best first. Changes nothing.

        Raises ModelNotFound or NoBackend.
        """
        engines = self.table.candidates(ask, avoid)
        options = self._policy.options(ask, engines, now)
        parts = self._policy.parts(ask, options, now)
        verdicts = [
            EngineVerdict(
                option.engine, option.cost, option.hit_tokens, self._room.admits(option.engine, ask, now), its_parts
            )
            for option, its_parts in zip(options, parts, strict=True)
        ]
        return sorted(
            verdicts, key=lambda verdict: (verdict.cost, verdict.engine.load.in_flight, verdict.engine.placed)
        )

    def retry_after_seconds(self, model: str, now: float) -> float:
        """When a place may come free for one who is not in the model's line."""
        return self._service_rates.seconds_for(model, self._queue.waiting(model) + 1, now)

    def first_token(self, binding: Binding, now: float) -> None:
        work = binding.work
        if not binding.released and binding.engine.load.first_token(work, now) and work.alone:
            calibration = self._calibrations.learning(binding.ask.model)
            calibration.first_token(work.uncached_tokens, work.first_token_seconds, now - work.started_seconds)

    def release(
        self, binding: Binding, now: float, *, answered: bool = False, served_tokens: int | None = None
    ) -> None:
        """Give back everything the request took. Only the first call counts. `answered`: it got its whole answer.

        `served_tokens`: uncached prompt and output, as reported; None = nothing is known but what was expected.
        """
        if binding.released:
            return
        binding.released = True
        ask, more = binding.ask, 0.0 if served_tokens is None else served_tokens - binding.charged_tokens
        self._queue.tenants(ask.model).released(binding.tenant, ask, binding.work.sequences, more)
        self._service_rates.left(ask.model, now)
        work = binding.work
        binding.engine.load.finish(work, now)
        binding.engine.kv.release(binding.reservation)
        if answered and work.alone and not work.observable:
            calibration = self._calibrations.learning(ask.model)
            calibration.at_most(work.uncached_tokens, work.first_token_seconds, now - work.started_seconds)

    def refresh(self) -> None:
        """The fleet has changed: look at it again."""
        self._views.clear()

    def _bind(self, ask: Ask, option: Option, now: float, ticket: Ticket | None = None) -> Binding:
        engine = option.engine
        uncached = max(0, ask.prompt_tokens - option.hit_tokens)
        model = self._calibrations.of(ask.model).model
        first_token = option.prefill_seconds + step_seconds(model, engine.slowness, engine.load)
        work = Work(
            self._room.slots_of(ask, engine),
            ask.prompt_tokens,
            option.prefill_seconds,
            ask.streams,
            uncached,
            first_token,
        )
        engine.load.start(work, now)
        engine.placed += 1
        reservation = self._room.reserve(engine, ask)
        self._policy.placed(ask, option)
        if len(self._queue):  # nobody else's hits are kept
            self._hits.bound(ask, now)
        tenants = self._queue.tenants(ask.model)
        tenant, tokens, waited_seconds = tenants.of(ask), 0.0, 0.0
        if ticket is not None:
            waited_seconds = now - ticket.arrived_seconds
        if ask.sequences:
            tokens = expected_tokens(ask, option.hit_tokens, reservation.output_tokens)
            tenants.bound(tenant, ask, work.sequences, tokens, ticket is None)
        return Binding(engine, work, reservation, option.hit_tokens, waited_seconds, ask, tenant, tokens)


_goes_anywhere = attrgetter("goes_anywhere")
_in_flight = attrgetter("load.in_flight")


def choose(
    options: Sequence[Option], ask: Ask, room: Capacity, now: float, waits_for_best: bool, guarded: bool
) -> Option | None:
    """The cheapest option, if that admits the request; where nobody waits for the best, the cheapest that does."""
    best: Option | None = None
    for option in options:
        if not waits_for_best and not room.admits(option.engine, ask, now, guarded=guarded):
            continue
        if best is None or option.cost < best.cost or (option.cost == best.cost and _is_quieter(option, best)):
            best = option
    if best is None or not waits_for_best or room.admits(best.engine, ask, now, guarded=guarded):
        return best
    return None


def _is_quieter(option: Option, other: Option) -> bool:
    """Of two engines at the same cost, the one with less in flight, then the one that was chosen less often."""
    one, two = option.engine, other.engine
    return (one.load.in_flight, one.placed) < (two.load.in_flight, two.placed)
