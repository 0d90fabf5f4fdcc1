"""Placement: binds requests to engines, decides when, and owns the resources that they hold there. Pure: values in,
decisions out, time passed in.

A request goes to its best engine if that engine has capacity; otherwise it joins the queue. After every change the
queue is scanned: each request is bound if its own best engine has capacity, and keeps waiting for that engine
otherwise, while later requests overtake it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, ItemsView, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import compress, islice
from operator import attrgetter
from types import TracebackType
from typing import Final, Self

from gateway.core.errors import GatewayError, InvalidRequest, ModelNotFound, NoBackend, QueueFull
from gateway.core.request import Demand, UpstreamResult, Usage
from gateway.core.routing.engine import Engine, Shortlist, prefill_seconds
from gateway.core.routing.estimates import LEAST_PACED_TOKENS, Calibration, Calibrations, OutputLengths
from gateway.core.routing.kv_reservations import Reservation
from gateway.core.routing.policy import EngineVerdict, Options, Policy
from gateway.core.scheduling.admission import Capacity, QueueScan, choose, is_large_enough, slots_of
from gateway.core.scheduling.fair_share import Tenant, Tenants, expected_tokens
from gateway.core.scheduling.wait_queue import Queue, Ticket


class Lease(Reservation):
    """A request bound to an engine, with its resources until the release. In the gateway, a `with` block that ends at
    the last byte releases it."""

    __slots__ = (
        "_first_token", "_release", "answered", "backend", "calibration", "charged_tokens", "client_was_slow", "engine",
        "engine_index", "first_token_seconds", "hit_tokens", "on_release", "paced_tokens", "predicted_seconds", "rank",
        "served_tokens", "tenant", "tenants", "uncached_tokens", "waited_seconds",
    )  # fmt: skip
    _first_token: "Callable[[Lease], None]"
    _release: "Callable[[Lease], None]"

    def __init__(
        self,
        demand: Demand,
        engine: Engine,
        prefill_seconds: float,
        hit_tokens: int,
        tenants: Tenants,
        tenant: Tenant,
        calibration: Calibration,
        waited_seconds: float,
    ) -> None:
        sequences = slots_of(demand, engine) if demand.divisible else demand.sequences
        super().__init__(demand, sequences, prefill_seconds)
        self.engine = engine
        self.backend = engine.name
        self.engine_index = engine.index
        self.rank = engine.rank  # of the engine, if the backend runs several
        self.hit_tokens = hit_tokens  # prompt tokens predicted to be cached there
        self.uncached_tokens = max(0, demand.prompt_tokens - hit_tokens)
        self.tenants = tenants
        self.tenant = tenant
        self.calibration = calibration
        self.predicted_seconds = prefill_seconds + engine.terms(calibration.model).step  # to its first token, if alone
        self.charged_tokens = 0.0  # to the tenant's share
        self.waited_seconds = waited_seconds
        self.first_token_seconds: float | None = None  # by the broker's clock
        self.answered = False  # the response was complete
        self.client_was_slow = False
        self.paced_tokens = 0  # of a stream's sequence: the time that they took is the engine's alone
        self.served_tokens: int | None = None  # uncached prompt and output, as reported; None = as expected
        self.on_release: Callable[[Lease], None] | None = None  # of the lower queue that it is from

    def when_released(self, call: "Callable[[Lease], None]") -> None:
        """Call this at its release, when the engine is free of it, and before anything is learned from it."""
        self.on_release = call

    def hand_out(self, first_token: "Callable[[Lease], None]", release: "Callable[[Lease], None]") -> Self:
        """Set the callbacks for its first token and for the end of its block."""
        self._first_token, self._release = first_token, release
        return self

    def on_first_token(self) -> None:
        """The first token arrived: the prefill is over."""
        self._first_token(self)

    def on_tokens(self, tokens: int) -> int:
        """More tokens of a stream arrived; more than expected reserve more of the engine's KV cache.

        Returns the number of tokens until the next report.
        """
        if not self.released:
            self.engine.load.on_tokens(tokens)
        return self.engine.kv.on_tokens(self, tokens)

    def on_answer(self, answer: UpstreamResult) -> None:
        self.answered = answer.status == 200
        self.client_was_slow = answer.client_was_slow
        if self.first_token_seconds is None:
            self.first_token_seconds = answer.first_byte_seconds

    def on_usage(self, usage: Usage) -> None:
        """The backend reported its work: the tenant is charged the uncached prompt and the output."""
        if self.streamed_tokens:
            self.engine.kv.on_usage(self, usage.completion_tokens)
            if not self.client_was_slow:
                self.paced_tokens = usage.completion_tokens // max(1, self.sequences)
        cached = self.hit_tokens if usage.cached_tokens is None else usage.cached_tokens
        self.served_tokens = max(0, usage.prompt_tokens - cached) + usage.completion_tokens

    def on_failure(self) -> None:
        """Work that a backend lost is not charged to the tenant."""
        self.served_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release(self)


class LeaseSource(ABC):
    """Where a dispatcher gets its leases from."""

    @abstractmethod
    async def lease(
        self,
        demand: Demand,
        avoid: frozenset[str] = frozenset(),
        already_waited_seconds: float = 0.0,
        send_keep_alive: Callable[[], None] | None = None,
        holds: bool = True,
    ) -> Lease:
        """A slot on an engine, after waiting for one if necessary; see `LeaseBroker.lease`."""


class Broker(LeaseSource):
    """Where requests wait, as a dispatcher sees it."""

    max_wait_seconds: float

    @abstractmethod
    def now(self) -> float: ...

    @abstractmethod
    def retry_after_seconds(self, model: str) -> float: ...

    @abstractmethod
    def explain(self, demand: Demand, avoid: frozenset[str] = frozenset()) -> list[EngineVerdict]:
        """The verdict on each engine for a request now, best first. Raises ModelNotFound or NoBackend."""

    @abstractmethod
    async def change(self, at_most_seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class ModelView:
    """The engines that serve a model, and whether they have capacity, until the fleet changes."""

    engines: list[Engine]
    capacity: Capacity
    shortlist: Shortlist


_IDLE_SHARE: Final = 0.5  # of the mean in flight: an engine with less is worth a longer scan


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Settings from the configuration's `routing` and `admission`."""

    aging: float = 0.05
    kv_headroom: float = 1.0
    _: KW_ONLY
    scan: int = 32
    starvation_seconds: float = 30.0
    hold_without_backend: bool = True
    prefill_window_seconds: float = math.inf


class Scheduler:
    """The scheduler: owner of the resources that requests hold on each engine."""

    def __init__(
        self,
        serving: Callable[[str], Sequence[Engine] | None],
        policy: Policy,
        *,
        queue: Queue,
        lengths: OutputLengths,
        calibrations: Calibrations,
        settings: SchedulerSettings,
    ) -> None:
        self._policy = policy
        self._queue = queue
        self._tenants = queue.tenants
        self._lengths = lengths
        self._calibrations = calibrations
        self._settings = settings
        self._serving = serving
        self._views: dict[str, ModelView] = {}  # until the fleet changes
        self._on_bound: Callable[[Demand, Options, Engine], None] | None = None

    def watch(self, on_bound: Callable[[Demand, Options, Engine], None] | None) -> None:
        """Report each bound request, with the options and the engine of the choice. None = no longer."""
        self._on_bound = on_bound

    def apply(self, settings: SchedulerSettings, policy: Policy) -> None:
        """Take over other settings: waiting requests keep waiting, in the order of the new settings."""
        before = self._settings.aging, self._policy.waits_for_best
        self._settings, self._policy = settings, policy
        self._views.clear()
        if before != (settings.aging, policy.waits_for_best):
            self._queue.reorder(lambda ticket: self.turn(ticket.prefill_seconds, ticket.arrived_seconds))

    @property
    def settings(self) -> SchedulerSettings:
        return self._settings

    @property
    def policy(self) -> Policy:
        return self._policy

    @property
    def waits_for_best(self) -> bool:
        """Whether a request may wait for its best engine while another is open."""
        return self._policy.waits_for_best

    def place(
        self, demand: Demand, now: float, avoid: frozenset[str] = frozenset(), holds: bool = True
    ) -> Lease | Ticket:
        """Bind a new request or queue it. Without `holds`, it waits only while a backend serves its model.

        Raises ModelNotFound, NoBackend, QueueFull, DeadlineUnmeetable, or InvalidRequest if it can never fit.
        """
        try:
            engines = self.candidates(demand, avoid)
        except NoBackend:
            held = self._hold(demand, now, avoid) if holds and self._settings.hold_without_backend else None
            if held is None:
                raise
            return held
        if demand.sequences == 0:
            return self._bind_light(demand, engines, now)
        if demand.sequences > 1:
            self.refuse_what_never_fits(demand, engines)
        tenants, view = self._tenants.of(demand.model), self._views[demand.model]
        tenant = tenants.arrived(demand, now)
        if tenants.waiting:  # refuse early: refusals should be cheap
            self._queue.refuse_if_full(demand, now)
        model = view.capacity.calibration.model
        if engines is view.engines:
            options = self._policy.likely_options(demand, view.shortlist, model, now)
        else:
            options = self._policy.options(demand, engines, model, now)
        if not tenants.waiting:
            guarded = tenants.is_over_share(tenant, now, batch=demand.batch)
            at = choose(options, demand, view.capacity, now, self._policy.waits_for_best, guarded=guarded)
            if at is not None:
                return self.bind(demand, options, at, tenants, tenant, now=now)
        least_seconds, most_hit_tokens = min(options.prefill_seconds), max(options.hit_tokens)
        ticket = self._ticket(demand, now, avoid, least_seconds, hit_tokens=most_hit_tokens, holds=holds)
        if demand.deadline_seconds is not None:
            self._queue.refuse_late(ticket, now)
        self._queue.join(ticket)
        return ticket

    def _hold(self, demand: Demand, now: float, avoid: frozenset[str]) -> Ticket | None:
        """Queue a request that no backend can serve now, in case one comes back in time.

        None: the queue is full, or the deadline has passed. Wait estimates are not used: they say nothing of outages.
        """
        self._tenants.of(demand.model).arrived(demand, now)
        ticket = self.uncached_ticket(demand, now, avoid)
        if ticket.late_seconds < now:
            return None
        try:
            self._queue.join(ticket)
        except QueueFull:
            return None
        return ticket

    def uncached_ticket(self, demand: Demand, now: float, avoid: frozenset[str]) -> Ticket:
        """A ticket for a request without a price on any engine: its whole prompt counts as uncached."""
        model = self._calibrations.of(demand.model).model
        seconds = prefill_seconds(model, 1.0, demand.prompt_tokens, 0)
        return self._ticket(demand, now, avoid, seconds, hit_tokens=0, holds=True)

    def _ticket(
        self, demand: Demand, now: float, avoid: frozenset[str], prefill_seconds: float, hit_tokens: int, holds: bool
    ) -> Ticket:
        output_tokens, _ = self._lengths.expected(demand.model, demand.tenant, demand.output_tokens)
        turn = self.turn(prefill_seconds, now)
        tokens = expected_tokens(demand, hit_tokens, demand.sequences * output_tokens)
        return Ticket(demand, now, avoid, prefill_seconds, turn, tokens=tokens, holds=holds)

    def turn(self, prefill_seconds: float, arrived_seconds: float) -> float:
        """By least prefill, aged; in order of arrival where requests do not wait for their best engine."""
        if not self._policy.waits_for_best:
            return arrived_seconds
        return prefill_seconds + self._settings.aging * arrived_seconds

    def scan_queue(self, model: str, now: float) -> list[tuple[Ticket, Lease | GatewayError]]:
        """Bind and remove the requests that can be bound now; returns an error for those that no backend can serve."""
        granted: list[tuple[Ticket, Lease | GatewayError]] = []
        scan = self._settings.scan
        if self._scan(model, 0, scan, now, granted) and (queue := self._queue.of_model(model)) is not None:
            further = queue.further(scan, now)
            if further is not None:
                self._scan(model, *further, now, granted)
        return granted

    def _scan(
        self, model: str, start: int, end: int, now: float, granted: list[tuple[Ticket, Lease | GatewayError]]
    ) -> bool:
        """Scan this part of the queue; returns whether an engine is left idle and requests further back may be bound to
        it."""
        if self._is_closed_to_all(model, now):
            return False
        tickets, eligible = self._next_tickets(model, start, end, now, granted)
        if not tickets:
            return False
        engines, capacity = self._views[model].engines, self._views[model].capacity
        tenants, starving = self._tenants.of(model), self._starving(model, now, eligible, granted)

        def bind(ticket: Ticket, at: int, options: Options) -> None:
            self._queue.serve(ticket, now, starving=ticket is starving)
            tenant = tenants.of(ticket.demand)
            lease = self.bind(ticket.demand, options, at, tenants, tenant, now=now, ticket=ticket)
            granted.append((ticket, lease))

        guards = tenants.guards(now, batch=tenants.waiting_batch > 0)
        is_open = capacity.are_open(engines, now)
        scan = QueueScan(engines, self._policy, capacity, is_open, now, bind=bind, tenants=tenants if guards else None)
        scan.run(tickets, eligible, starving)
        if len(tickets) < end - start or True not in is_open:
            return False
        few = _IDLE_SHARE * sum(engine.load.in_flight for engine in engines) / len(engines)
        return any(engine.load.in_flight < few for engine in compress(engines, is_open))

    def _starving(
        self,
        model: str,
        now: float,
        eligible: dict[Ticket, list[int]],
        granted: list[tuple[Ticket, Lease | GatewayError]],
    ) -> Ticket | None:
        """The starving request that is next, if an engine may serve it."""
        queue = self._queue.of_model(model)
        if queue is None:
            return None
        since_seconds = now - self._settings.starvation_seconds
        for ticket in [*islice(queue.starving(since_seconds), self._settings.scan)]:  # a copy: tickets may leave
            if ticket.goes_anywhere:
                return ticket
            able, restricted = self.eligible([ticket], now, granted)
            eligible.update(restricted)
            if able:
                return ticket
        return None

    def _is_closed_to_all(self, model: str, now: float) -> bool:
        """Whether no engine has capacity: the usual case for a long queue, detected before it is read.

        Requests that may not use every engine can fail at any time, and those without a sequence need no capacity.
        """
        view, queue = self._views.get(model), self._queue.of_model(model)
        if view is None or queue is None or queue.restricted:
            return False
        return True not in view.capacity.are_open(view.engines, now)

    def _next_tickets(
        self, model: str, start: int, end: int, now: float, granted: list[tuple[Ticket, Lease | GatewayError]]
    ) -> tuple[list[Ticket], dict[Ticket, list[int]]]:
        """The tickets to scan; for tickets that may not use every engine, the positions of their engines.

        Tickets that no backend can serve for now are passed over; they do not count in the length of the scan.
        """
        queue, count, settings = self._queue.of_model(model), end, self._settings
        if queue is None or (not queue.unheld and settings.hold_without_backend and not self._may_be_served(model)):
            return [], {}
        if not queue.restricted and model in self._views:
            return queue.in_order(end, start), {}
        while True:
            waiting = queue.in_order(count)
            tickets, eligible = self.eligible(waiting, now, granted)
            if len(tickets) == len(waiting) or len(waiting) < count or len(tickets) >= end:
                return tickets[start:end], eligible
            count *= 2

    def _may_be_served(self, model: str) -> bool:
        """Whether a scan can do anything: an engine serves the model now, or none ever will (then requests fail)."""
        try:
            return model in self._views or bool(self._engines_of(model))
        except ModelNotFound:
            return True

    def eligible(
        self, waiting: list[Ticket], now: float, granted: list[tuple[Ticket, Lease | GatewayError]]
    ) -> tuple[list[Ticket], dict[Ticket, list[int]]]:
        """The tickets that an engine serves; for tickets that may not use every engine, the positions of their engines.

        Tickets that fail are added to `granted` with their errors.
        """
        tickets: list[Ticket] = []
        eligible: dict[Ticket, list[int]] = {}
        for ticket in waiting:
            demand = ticket.demand
            if demand.model not in self._views or not ticket.goes_anywhere:
                try:
                    its_engines = self.candidates(demand, ticket.avoid)
                    if demand.sequences > 1:
                        self.refuse_what_never_fits(demand, its_engines)
                except GatewayError as error:
                    if isinstance(error, NoBackend) and self._settings.hold_without_backend and ticket.holds:
                        continue
                    self._queue.leave(ticket)
                    granted.append((ticket, error))
                    continue
                if demand.sequences == 0:
                    self._queue.leave(ticket)
                    granted.append((ticket, self._bind_light(demand, its_engines, now, ticket)))
                    continue
                engines = self._views[demand.model].engines
                if its_engines is not engines:
                    eligible[ticket] = [at for at, engine in enumerate(engines) if engine in its_engines]
            tickets.append(ticket)
        return tickets, eligible

    def leave(self, ticket: Ticket) -> bool:
        """Remove a waiting request; False if it did not wait."""
        return self._queue.leave(ticket)

    def _bind_light(self, demand: Demand, engines: list[Engine], now: float, ticket: Ticket | None = None) -> Lease:
        """A request that takes no slot goes to the engine with the least in flight."""
        tenants, engine = self._tenants.of(demand.model), min(engines, key=_in_flight)
        options = Options([engine], [0.0])
        return self.bind(demand, options, 0, tenants, tenants.of(demand), now=now, ticket=ticket)

    def view(self, model: str) -> ModelView | None:
        """None = no request for the model has come since the fleet changed, or no engine serves it."""
        return self._views.get(model)

    def views(self) -> ItemsView[str, ModelView]:
        """The same by model; it must not change meanwhile."""
        return self._views.items()

    def is_served(self, demand: Demand, avoid: frozenset[str] = frozenset()) -> bool:
        """Whether some engine can take this request, now or after a wait."""
        try:
            return bool(self.candidates(demand, avoid))
        except (NoBackend, ModelNotFound):
            return False

    def candidates(self, demand: Demand, avoid: frozenset[str]) -> list[Engine]:
        """The engines that may take this request; `_views` has its model then. Raises ModelNotFound or NoBackend."""
        view = self._views.get(demand.model)
        engines = self._engines_of(demand.model) if view is None else view.engines
        if demand.pinned is not None:
            engines = [engine for engine in engines if engine.name == demand.pinned]
        if demand.sequences > 1 and not all(is_large_enough(engine, demand) for engine in engines):
            engines = [engine for engine in engines if is_large_enough(engine, demand)] or engines
        if avoid and demand.pinned is None:
            engines = [engine for engine in engines if engine.name not in avoid] or engines
        if demand.rank is not None:  # a single engine ignores it
            engines = [engine for engine in engines if engine.rank == demand.rank] or engines
        if not engines:
            raise NoBackend.of(demand.model, "at this moment", 2.0)
        return engines

    def _engines_of(self, model: str) -> list[Engine]:
        """The engines of a model, read from the fleet. Raises ModelNotFound."""
        serving = self._serving(model)
        if serving is None:
            raise ModelNotFound.of(model)
        engines = list(serving)
        if engines:  # model names that do not exist are not kept
            settings, calibration = self._settings, self._calibrations.learning(model)
            capacity = Capacity(
                calibration, self._lengths, settings.kv_headroom, window_seconds=settings.prefill_window_seconds
            )
            self._views[model] = ModelView(engines, capacity, Shortlist(engines))
        return engines

    def refuse_what_never_fits(self, demand: Demand, engines: list[Engine]) -> None:
        """Raises InvalidRequest if none of these could run it, even if idle."""
        if not any(is_large_enough(engine, demand) for engine in engines):
            largest = max(engine.cap for engine in engines)
            raise InvalidRequest(
                f"This request needs {demand.sequences} sequences (n x prompts); the limit of the backends for model"
                f" {demand.model!r} is {largest}. Send fewer per request.",
                param="n",
            )

    def explain(self, demand: Demand, now: float, avoid: frozenset[str] = frozenset()) -> list[EngineVerdict]:
        """The verdict on each engine for a request now, best first. Raises ModelNotFound or NoBackend."""
        engines = self.candidates(demand, avoid)
        capacity = self._views[demand.model].capacity
        model = capacity.calibration.model
        options = self._policy.options(demand, engines, model, now)
        parts = self._policy.parts(demand, options, model, now)
        is_open = [capacity.admits(engine, demand, now) for engine in engines]
        verdicts = list(map(EngineVerdict, engines, options.costs, options.hit_tokens, is_open, parts))
        verdicts.sort(key=lambda verdict: (verdict.cost, verdict.engine.load.in_flight, verdict.engine.placed))
        return verdicts

    def first_token(self, lease: Lease, now: float) -> None:
        lease.first_token_seconds = now
        if not lease.released and lease.engine.load.first_token(lease, now) and lease.alone:
            lease.calibration.first_token(lease.uncached_tokens, lease.predicted_seconds, now - lease.started_seconds)

    def release(self, lease: Lease, now: float, *, answered: bool = False, served_tokens: int | None = None) -> None:
        """Release everything the request holds. Only the first call counts. `answered`: the response was complete.

        `served_tokens`: uncached prompt and output, as reported; None = not reported.
        """
        if lease.released:
            return
        more = 0.0 if served_tokens is None else served_tokens - lease.charged_tokens
        lease.tenants.released(lease.tenant, lease.demand, lease.sequences, more)
        lease.tenants.rate.left(now)
        first_token_seconds = lease.first_token_seconds
        if answered and lease.paced_tokens >= LEAST_PACED_TOKENS and first_token_seconds is not None:
            token_seconds = (now - first_token_seconds) / (lease.paced_tokens - 1)
            lease.engine.streamed(lease.calibration, token_seconds, now)
        lease.engine.load.finish(lease, now)
        lease.engine.kv.release(lease)
        if lease.on_release is not None:
            lease.on_release(lease)
        if answered and lease.alone and not lease.demand.streams:
            calibration = lease.calibration
            learn = calibration.first_token if lease.demand.divisible else calibration.at_most
            learn(lease.uncached_tokens, lease.predicted_seconds, now - lease.started_seconds)

    def refresh(self) -> None:
        """Read the engines from the fleet again: it has changed."""
        self._views.clear()

    def bind(
        self,
        demand: Demand,
        options: Options,
        at: int,
        tenants: Tenants,
        tenant: Tenant,
        now: float,
        ticket: Ticket | None = None,
    ) -> Lease:
        """Bind the request to the engine at this position."""
        engine, prefill_seconds, hit_tokens = options.engines[at], options.prefill_seconds[at], options.hit_tokens[at]
        calibration = self._views[demand.model].capacity.calibration
        waited_seconds = 0.0 if ticket is None else now - ticket.arrived_seconds
        lease = Lease(demand, engine, prefill_seconds, hit_tokens, tenants, tenant, calibration, waited_seconds)
        engine.load.start(lease, now)
        engine.placed += 1
        output_tokens, margin_tokens = self._lengths.expected(demand.model, demand.tenant, demand.output_tokens)
        engine.kv.reserve(lease, output_tokens, margin_tokens)
        self._policy.placed(demand, engine)
        if demand.sequences:
            lease.charged_tokens = expected_tokens(demand, hit_tokens, lease.output_tokens)
            tenants.bound(tenant, demand, lease.sequences, lease.charged_tokens, ticket is None)
        if self._on_bound is not None:
            self._on_bound(demand, options, engine)
        return lease


_in_flight = attrgetter("load.in_flight")
