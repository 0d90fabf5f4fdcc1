"""Placement: which engine a request is bound to, and when. Pure: values in, decisions out, time passed in.

A request goes to its best engine if that engine has capacity; otherwise it joins the queue. After every change the
queue is scanned: each request is bound if its own best engine has capacity, and keeps waiting for that engine
otherwise, while later requests overtake it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter

from gateway.errors import GatewayError, InvalidRequest, ModelNotFound, NoBackend, QueueFull
from gateway.request import Demand
from gateway.routing.engine import Engine, Option, Work, prefill_seconds, step_seconds
from gateway.routing.estimates import Calibrations, OutputLengths
from gateway.routing.kv_reservations import Reservation
from gateway.routing.policy import EngineVerdict, Policy
from gateway.scheduling.admission import Capacity, HitCache, QueueScan
from gateway.scheduling.fair_share import Tenant, Tenants, expected_tokens
from gateway.scheduling.wait_queue import Queue, ScanOrder, Ticket, WaitEstimator


class EngineTable:
    """Which engines may take a request. `views` has the engines of each model until the fleet changes."""

    def __init__(self, serving: Callable[[str], Sequence[Engine] | None], capacity: Capacity) -> None:
        self.views: dict[str, list[Engine]] = {}
        self._serving = serving
        self._capacity = capacity

    def is_served(self, demand: Demand, avoid: frozenset[str] = frozenset()) -> bool:
        """Whether some engine can take this request, now or after a wait."""
        try:
            return bool(self.candidates(demand, avoid))
        except (NoBackend, ModelNotFound):
            return False

    def may_be_served(self, model: str) -> bool:
        """Whether a scan can do anything: an engine serves the model now, or none ever will (then requests fail)."""
        try:
            return bool(self.views.get(model) or self.view(model))
        except ModelNotFound:
            return True

    def candidates(self, demand: Demand, avoid: frozenset[str]) -> list[Engine]:
        """The engines that may take this request. Raises ModelNotFound or NoBackend."""
        engines = self.views.get(demand.model)
        if engines is None:
            engines = self.view(demand.model)
        if demand.pinned is not None:
            engines = [engine for engine in engines if engine.name == demand.pinned]
        if demand.sequences > 1 and not all(self._capacity.is_large_enough(engine, demand) for engine in engines):
            engines = [engine for engine in engines if self._capacity.is_large_enough(engine, demand)] or engines
        if avoid and demand.pinned is None:
            engines = [engine for engine in engines if engine.name not in avoid] or engines
        if demand.rank is not None:
            engines = [
                engine for engine in engines if engine.rank == demand.rank
            ] or engines  # a single engine ignores it
        if not engines:
            raise NoBackend(f"No backend for model {demand.model!r} is available.", retry_after_seconds=2.0)
        return engines

    def view(self, model: str) -> list[Engine]:
        """The engines of a model, read from the fleet. Raises ModelNotFound."""
        serving = self._serving(model)
        if serving is None:
            raise ModelNotFound.of(model)
        engines = list(serving)
        if engines:  # model names that do not exist are not kept
            self.views[model] = engines
        return engines

    def refuse_what_never_fits(self, demand: Demand, engines: Sequence[Engine]) -> None:
        """Raises InvalidRequest if none of these could run it, even if idle."""
        if not any(self._capacity.is_large_enough(engine, demand) for engine in engines):
            largest = max(engine.cap for engine in engines)
            raise InvalidRequest(
                f"This request needs {demand.sequences} sequences (n x prompts); the limit of the backends for model"
                f" {demand.model!r} is {largest}. Send fewer per request.",
                param="n",
            )


_IDLE_SHARE = 0.5  # of the mean in flight: an engine with less is worth a longer scan


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Settings from the configuration's `routing` and `admission`."""

    aging: float = 0.05
    kv_headroom: float = 0.95
    scan: int = 32
    starvation_seconds: float = 30.0
    hold_without_backend: bool = True


@dataclass(slots=True, eq=False)
class Binding:
    """A request bound to an engine, and what it holds there until it is released."""

    engine: Engine
    work: Work
    reservation: Reservation
    hit_tokens: int
    waited_seconds: float
    demand: Demand
    tenant: Tenant
    charged_tokens: float  # to the tenant's share
    released: bool = False


class Scheduler:
    """The scheduler: owner of what requests hold on each engine."""

    def __init__(
        self,
        serving: Callable[[str], Sequence[Engine] | None],
        policy: Policy,
        queue: Queue,
        lengths: OutputLengths,
        calibrations: Calibrations,
        settings: SchedulerSettings,
    ) -> None:
        self._policy = policy
        self._queue = queue
        self._calibrations = calibrations
        self._settings = settings
        self._capacity = Capacity(calibrations, lengths, settings.kv_headroom)
        self.table = EngineTable(serving, self._capacity)
        self._views = self.table.views
        self.wait_estimator = WaitEstimator(queue)
        self._hits = HitCache(policy.hits)

    @property
    def waits_for_best(self) -> bool:
        """Whether a request may wait for its best engine while another is open."""
        return self._policy.waits_for_best

    def place(self, demand: Demand, now: float, avoid: frozenset[str] = frozenset()) -> Binding | Ticket:
        """Bind a new request at once, or queue it.

        Raises ModelNotFound, NoBackend, QueueFull, DeadlineUnmeetable, or InvalidRequest if it can never fit.
        """
        try:
            engines = self.table.candidates(demand, avoid)
        except NoBackend:
            if not self._settings.hold_without_backend:
                raise
            held = self._hold(demand, now, avoid)
            if held is None:
                raise
            return held
        if demand.sequences == 0:
            return self._bind_light(demand, engines, now)
        if demand.sequences > 1:
            self.table.refuse_what_never_fits(demand, engines)
        tenants = self._queue.tenants(demand.model)
        tenant = tenants.arrived(demand, now)
        if tenants.waiting:  # refuse early: refusals should be cheap
            self._queue.refuse_if_full(demand, now, self.wait_estimator.retry_after_seconds(demand.model, now))
        options = self._policy.options(demand, engines, now)
        if not tenants.waiting:
            guarded = tenants.is_over_share(tenant, now, batch=demand.batch)
            option = choose(options, demand, self._capacity, now, self._policy.waits_for_best, guarded)
            if option is not None:
                return self._bind(demand, option, now)
        ticket = Ticket(demand, now, avoid, min(option.prefill_seconds for option in options))
        if demand.deadline_seconds is not None:
            self.wait_estimator.refuse_late(ticket, now)
        self._join(ticket, max(option.hit_tokens for option in options), now)
        if engines is self._views[demand.model]:
            ticket.keep_hits([option.hit_tokens for option in options], engines, now)
        return ticket

    def _hold(self, demand: Demand, now: float, avoid: frozenset[str]) -> Ticket | None:
        """Queue a request that no backend can serve now, in case one comes back in time.

        None: the queue is full, or the deadline has passed. Wait estimates are not used: they say nothing of outages.
        """
        self._queue.tenants(demand.model).arrived(demand, now)
        model = self._calibrations.of(demand.model).model
        ticket = Ticket(demand, now, avoid, prefill_seconds(model, 1.0, demand.prompt_tokens, 0))
        if ticket.late_seconds < now:
            return None
        try:
            self._join(ticket, 0, now)
        except QueueFull:
            return None
        return ticket

    def _join(self, ticket: Ticket, hit_tokens: int, now: float) -> None:
        demand = ticket.demand
        tokens = expected_tokens(demand, hit_tokens, demand.sequences * self._capacity.output_tokens(demand))
        ticket.enqueue(ticket.prefill_seconds + self._settings.aging * now, tokens)
        self._queue.join(ticket, self.wait_estimator.retry_after_seconds(demand.model, now))

    def scan_queue(self, model: str, now: float) -> list[tuple[Ticket, Binding | GatewayError]]:
        """Bind the requests that can be bound now, and remove them; an error for those that no backend can serve."""
        granted: list[tuple[Ticket, Binding | GatewayError]] = []
        order = ScanOrder(self._settings.scan, now - self._settings.starvation_seconds, self._policy.waits_for_best)
        if self._scan(model, order, now, granted) and (queue := self._queue.of_model(model)) is not None:
            further = queue.further(order, now)
            if further is not None:
                self._scan(model, further, now, granted)
        return granted

    def _scan(
        self, model: str, order: ScanOrder, now: float, granted: list[tuple[Ticket, Binding | GatewayError]]
    ) -> bool:
        """One scan; returns whether an engine is left idle and requests further back may be bound to it."""
        tickets, eligible = self._next_tickets(model, order, now, granted)
        if not tickets:
            return False
        engines = self._views[model]
        is_over_share = self._over_share_check(self._queue.tenants(model), now)
        all_guarded = is_over_share is not None and all(is_over_share(ticket) for ticket in tickets)
        is_open = self._capacity.are_open(engines, model, now, guarded=all_guarded)
        if not any(is_open):
            return False
        hits = self._hits.of(tickets, engines, now)
        ranking = self._policy.ranking([ticket.demand for ticket in tickets], hits, engines, now)
        for row, its_engines in eligible.items():
            for column, engine in enumerate(engines):
                if engine not in its_engines:
                    ranking.close(column, row)

        def bind(ticket: Ticket, column: int, prefill_seconds: float) -> None:
            option = Option(engines[column], 0.0, prefill_seconds, int(ticket.hits[column]))
            self._queue.serve(ticket, order)
            granted.append((ticket, self._bind(ticket.demand, option, now, ticket)))

        QueueScan(
            engines, ranking, is_open, self._capacity, self._settings.starvation_seconds, self.waits_for_best, bind,
            is_over_share, all_guarded,
        ).run(tickets, now)  # fmt: skip
        if len(tickets) < order.scan:
            return False
        few = _IDLE_SHARE * sum(engine.load.in_flight for engine in engines) / len(engines)
        return any(engine.load.in_flight < few for engine in compress(engines, is_open))

    def _over_share_check(self, tenants: Tenants, now: float) -> Callable[[Ticket], bool] | None:
        """Whether the last slots are kept from a ticket; None = from none."""
        if not tenants.guards(now, batch=tenants.waiting_batch > 0):
            return None
        return lambda ticket: tenants.is_over_share(tenants.of(ticket.demand), now, batch=ticket.demand.batch)

    def _next_tickets(
        self, model: str, order: ScanOrder, now: float, granted: list[tuple[Ticket, Binding | GatewayError]]
    ) -> tuple[list[Ticket], dict[int, list[Engine]]]:
        """The tickets to scan; by position, the engines of those that may not use every engine.

        Tickets that no backend can serve for now are passed over; they do not count in the length of the scan.
        """
        start, count = order.start, order.start + order.scan
        end = count
        if self._settings.hold_without_backend and not self.table.may_be_served(model):
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
        if waiting and self._views.get(waiting[0].demand.model) and all(map(_goes_anywhere, waiting)):
            return waiting, {}
        tickets: list[Ticket] = []
        eligible: dict[int, list[Engine]] = {}
        for ticket in waiting:
            demand = ticket.demand
            if not self._views.get(demand.model) or not ticket.goes_anywhere:
                try:
                    its_engines = self.table.candidates(demand, ticket.avoid)
                    if demand.sequences > 1:
                        self.table.refuse_what_never_fits(demand, its_engines)
                except GatewayError as error:
                    if isinstance(error, NoBackend) and self._settings.hold_without_backend:
                        continue
                    self._queue.leave(ticket)
                    granted.append((ticket, error))
                    continue
                if demand.sequences == 0:
                    self._queue.leave(ticket)
                    granted.append((ticket, self._bind_light(demand, its_engines, now, ticket)))
                    continue
                if its_engines is not self._views[demand.model]:
                    eligible[len(tickets)] = its_engines
            tickets.append(ticket)
        return tickets, eligible

    def _bind_light(self, demand: Demand, engines: list[Engine], now: float, ticket: Ticket | None = None) -> Binding:
        """A request that takes no slot goes to the engine with the least in flight."""
        return self._bind(demand, Option(min(engines, key=_in_flight), 0.0, 0.0, 0), now, ticket)

    def explain(self, demand: Demand, now: float, avoid: frozenset[str] = frozenset()) -> list[EngineVerdict]:
        """What each engine would mean for a request now, best first. Changes nothing.

        Raises ModelNotFound or NoBackend.
        """
        engines = self.table.candidates(demand, avoid)
        options = self._policy.options(demand, engines, now)
        parts = self._policy.parts(demand, options, now)
        verdicts = [
            EngineVerdict(
                option.engine,
                option.cost,
                option.hit_tokens,
                self._capacity.admits(option.engine, demand, now),
                its_parts,
            )
            for option, its_parts in zip(options, parts, strict=True)
        ]
        return sorted(
            verdicts, key=lambda verdict: (verdict.cost, verdict.engine.load.in_flight, verdict.engine.placed)
        )

    def first_token(self, binding: Binding, now: float) -> None:
        work = binding.work
        if not binding.released and binding.engine.load.first_token(work, now) and work.alone:
            calibration = self._calibrations.learning(binding.demand.model)
            calibration.first_token(work.uncached_tokens, work.first_token_seconds, now - work.started_seconds)

    def release(
        self, binding: Binding, now: float, *, answered: bool = False, served_tokens: int | None = None
    ) -> None:
        """Release everything the request holds. Only the first call counts. `answered`: the response was complete.

        `served_tokens`: uncached prompt and output, as reported; None = not reported.
        """
        if binding.released:
            return
        binding.released = True
        demand, more = binding.demand, 0.0 if served_tokens is None else served_tokens - binding.charged_tokens
        self._queue.tenants(demand.model).released(binding.tenant, demand, binding.work.sequences, more)
        self.wait_estimator.released(demand.model, now)
        work = binding.work
        binding.engine.load.finish(work, now)
        binding.engine.kv.release(binding.reservation)
        if answered and work.alone and not work.observable:
            calibration = self._calibrations.learning(demand.model)
            calibration.at_most(work.uncached_tokens, work.first_token_seconds, now - work.started_seconds)

    def refresh(self) -> None:
        """Read the engines from the fleet again: it has changed."""
        self._views.clear()

    def _bind(self, demand: Demand, option: Option, now: float, ticket: Ticket | None = None) -> Binding:
        engine = option.engine
        uncached = max(0, demand.prompt_tokens - option.hit_tokens)
        model = self._calibrations.of(demand.model).model
        first_token = option.prefill_seconds + step_seconds(model, engine.slowness, engine.load)
        work = Work(
            self._capacity.slots_of(demand, engine),
            demand.prompt_tokens,
            option.prefill_seconds,
            demand.streams,
            uncached,
            first_token,
        )
        engine.load.start(work, now)
        engine.placed += 1
        reservation = self._capacity.reserve(engine, demand)
        self._policy.placed(demand, option)
        if len(self._queue):  # only waiting requests have cached hits
            self._hits.bound(demand, now)
        tenants = self._queue.tenants(demand.model)
        tenant, tokens, waited_seconds = tenants.of(demand), 0.0, 0.0
        if ticket is not None:
            waited_seconds = now - ticket.arrived_seconds
        if demand.sequences:
            tokens = expected_tokens(demand, option.hit_tokens, reservation.output_tokens)
            tenants.bound(tenant, demand, work.sequences, tokens, ticket is None)
        return Binding(engine, work, reservation, option.hit_tokens, waited_seconds, demand, tenant, tokens)


_goes_anywhere = attrgetter("goes_anywhere")
_in_flight = attrgetter("load.in_flight")


def choose(
    options: Sequence[Option], demand: Demand, capacity: Capacity, now: float, waits_for_best: bool, guarded: bool
) -> Option | None:
    """The cheapest option, if its engine admits the request; without `waits_for_best`, the cheapest that does."""
    best: Option | None = None
    for option in options:
        if not waits_for_best and not capacity.admits(option.engine, demand, now, guarded=guarded):
            continue
        if best is None or option.cost < best.cost or (option.cost == best.cost and _is_quieter(option, best)):
            best = option
    if best is None or not waits_for_best or capacity.admits(best.engine, demand, now, guarded=guarded):
        return best
    return None


def _is_quieter(option: Option, other: Option) -> bool:
    """Between equal costs, the engine with less in flight wins, then the one chosen less often."""
    one, two = option.engine, other.engine
    return (one.load.in_flight, one.placed) < (two.load.in_flight, two.placed)
