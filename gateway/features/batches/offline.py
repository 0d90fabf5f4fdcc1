"""Offline lines: those that wait for idle capacity, those that use it, and what they give back when it is needed. Pure.

Offline lines wait in a queue of lower priority, apart from the scheduler's, and never age. They get capacity that is
idle (`idle_capacity.py`) while nothing else waits for the model, and interactive requests that need it get it back: the
leases of lines are revoked. The less laxity a batch has, the more its lines may use.

Lines of embeddings, scores and reranking only have a prefill, whose end is their answer. They are sent in short calls,
which are not worth aborting.
"""

from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from typing import Final

from gateway.core.errors import GatewayError, NoBackend, QueueFull
from gateway.core.request import Demand
from gateway.core.routing.engine import Engine
from gateway.core.routing.policy import Options, Policy
from gateway.core.scheduling.admission import Capacity, QueueScan, slots_of
from gateway.core.scheduling.fair_share import Tenants
from gateway.core.scheduling.scheduler import Lease, ModelView, Scheduler
from gateway.core.scheduling.wait_queue import Queue, Ticket
from gateway.features.batches.idle_capacity import IdleCapacity, Prefills
from gateway.features.batches.pace import OfflineLine, Urgency, urgency

_URGENT_SHARE: Final = 8  # one slot in 8 may be used by urgent lines as if they were interactive
_URGENCY_SECONDS: Final = 0.25  # between two looks at lines that wait; one that comes is looked at, too
_PAUSE_SECONDS: Final = 0.02
_PAUSED_FOR: Final = 16  # interactive requests for which lines are paused at once


def line_of(demand: Demand) -> OfflineLine:
    line = demand.offline
    assert isinstance(line, OfflineLine)
    return line


def victims(leases: Iterable[Lease], slots: int, tokens: int, now: float) -> list[Lease]:
    """Which leases on one engine to revoke, to free so many slots and KV tokens: the least work lost for what is freed.

    Lines that are continued lose hardly any, so the others are the last. Sequences on one engine advance together, so
    the time since the start is their progress.
    """
    chosen: list[Lease] = []
    if slots <= 0 and tokens <= 0:
        return chosen
    for lease in sorted(leases, key=lambda lease: _loss(lease, now)):
        chosen.append(lease)
        slots -= lease.sequences
        tokens -= lease.tokens_alone
        if slots <= 0 and tokens <= 0:
            break
    return chosen


def _loss(lease: Lease, now: float) -> tuple[bool, float]:
    line = lease.demand.offline
    continues = isinstance(line, OfflineLine) and line.continues
    return not continues, (now - lease.started_seconds) / max(1, lease.tokens_alone)


class ModelLines:
    """The lines of one model: those that wait, and what is known of its tenants, prefills and idle capacity."""

    __slots__ = ("_idle", "prefills", "tenants", "waiting")

    def __init__(self) -> None:
        self.waiting: OrderedDict[Ticket, None] = OrderedDict()
        self.tenants = Tenants()
        self.prefills = Prefills()
        self._idle: IdleCapacity | None = None  # of the engines when it was last looked at

    def idle_capacity(self, view: ModelView, itl_objective_seconds: float | None) -> IdleCapacity:
        idle = self._idle
        if idle is None or idle.engines is not view.engines or idle.itl_objective_seconds != itl_objective_seconds:
            capacity = view.capacity
            idle = self._idle = IdleCapacity(
                capacity.calibration,
                capacity.lengths,
                capacity.kv_headroom,
                window_seconds=capacity.window_seconds,
                prefills=self.prefills,
                engines=view.engines,
                itl_objective_seconds=itl_objective_seconds,
            )
        return idle


class OfflineLeases:
    """What offline lines have on one engine: leases that are held, and those that are revoked until they are released;
    and how many sequences these have."""

    __slots__ = ("held", "held_sequences", "revoked", "revoked_sequences")

    def __init__(self) -> None:
        self.held: dict[Lease, None] = {}
        self.revoked: dict[Lease, None] = {}
        self.held_sequences = self.revoked_sequences = 0

    def hold(self, lease: Lease) -> None:
        self.held[lease] = None
        self.held_sequences += lease.sequences

    def revoke(self, lease: Lease) -> None:
        del self.held[lease]
        self.held_sequences -= lease.sequences
        self.revoked[lease] = None
        self.revoked_sequences += lease.sequences

    def release(self, lease: Lease) -> None:
        if lease in self.held:
            del self.held[lease]
            self.held_sequences -= lease.sequences
        else:
            del self.revoked[lease]
            self.revoked_sequences -= lease.sequences


class OfflineQueue:
    """Owner of the offline lines that wait for idle capacity, in the order of their batches, and of those that use it.

    It is a lower queue of the lease broker. Tenants of lines are counted apart: idle capacity is nobody's share.
    """

    def __init__(self, *, scheduler: Scheduler, queue: Queue, itl_objective_seconds: float | None = None) -> None:
        """`queue`: of the scheduler; lines of urgent batches join it."""
        self._scheduler = scheduler
        self._queue = queue
        self._models: dict[str, ModelLines] = {}
        self._leases: dict[int, OfflineLeases] = {}  # by the engine's index
        self._count = 0  # of all that wait or hold leases
        self._urgency_due = self._pause_due = -inf  # when to look next; the latter if no interactive request waits
        self.apply(itl_objective_seconds)

    def apply(self, itl_objective_seconds: float | None) -> None:
        """Take over another objective for the time between tokens."""
        self._itl_objective_seconds = itl_objective_seconds

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        waiting = sum([len(lines.waiting) for lines in self._models.values()])
        return f"<OfflineQueue {waiting} waiting, {self._count - waiting} in flight>"

    def model(self, name: str) -> ModelLines:
        """The lines of this model; only this class changes which of them wait."""
        lines = self._models.get(name)
        if lines is None:
            lines = self._models[name] = ModelLines()
        return lines

    def is_behind_others(self, ticket: Ticket) -> bool:
        waiting = self.model(ticket.demand.model).waiting
        return ticket in waiting and next(iter(waiting)) is not ticket

    def counts(self) -> dict[str, tuple[int, int]]:
        """Lines that wait, and sequences in flight on idle capacity, of each model that has any."""
        counts = {name: (len(lines.waiting), lines.tenants.in_flight) for name, lines in self._models.items()}
        return {name: count for name, count in counts.items() if any(count)}

    def place(self, demand: Demand, now: float, avoid: frozenset[str] = frozenset()) -> Ticket:
        """Have a line wait. Scans find idle capacity for it; one of an urgent batch waits in the scheduler's queue.

        Raises ModelNotFound, or InvalidRequest if it can never fit.
        """
        scheduler = self._scheduler
        with suppress(NoBackend):
            scheduler.refuse_what_never_fits(demand, scheduler.candidates(demand, avoid))
        ticket = scheduler.uncached_ticket(demand, now, avoid)
        self._join(ticket)
        self._joins_queue(ticket, now)
        return ticket

    def _join(self, ticket: Ticket) -> None:
        waiting = self.model(ticket.demand.model).waiting
        waiting[ticket] = None
        self._count += 1
        if ticket.demand.generated_tokens:
            waiting.move_to_end(ticket, last=False)  # an engine may still have its prompt in its cache

    def leave(self, ticket: Ticket) -> bool:
        """Remove a ticket; False if it was removed before."""
        waiting = self.model(ticket.demand.model).waiting
        if ticket not in waiting:
            return False
        del waiting[ticket]
        self._count -= 1
        return True

    def scan(self, now: float) -> list[tuple[Ticket, Lease | GatewayError]]:
        """Revoke leases that are in the way of interactive requests, then bind lines to idle capacity."""
        for lease in self.pause(now):
            line_of(lease.demand).on_revoked()
        return self.bind(now)

    def bind(self, now: float) -> list[tuple[Ticket, Lease | GatewayError]]:
        """Bind lines to idle capacity; an error for those that no backend can serve. Urgent ones join the queue."""
        granted, is_due = list[tuple[Ticket, Lease | GatewayError]](), now >= self._urgency_due
        if is_due:
            self._urgency_due = now + _URGENCY_SECONDS
        scheduler, queue = self._scheduler, self._queue
        for name, lines in list(self._models.items()):
            if not lines.waiting:
                continue
            view = scheduler.view(name)
            is_open = [] if view is None or queue.waiting(name) else self._idle(lines, view).are_open(view.engines, now)
            if not is_due and view is not None and True not in is_open:
                continue  # the usual case
            tickets = [*islice(lines.waiting, scheduler.settings.scan)]
            tickets = [ticket for ticket in tickets if not is_due or not self._joins_queue(ticket, now)]
            if not tickets or queue.waiting(name):
                continue
            refused = list[tuple[Ticket, Lease | GatewayError]]()
            tickets, eligible = scheduler.eligible(tickets, now, refused)
            for ticket, _ in refused:
                self.leave(ticket)
            granted += refused
            if tickets:
                granted += self._bind_idle(name, tickets, eligible, is_open, now)
        return granted

    def _bind_idle(
        self, model: str, tickets: list[Ticket], eligible: dict[Ticket, list[int]], is_open: list[bool], now: float
    ) -> list[tuple[Ticket, Lease]]:
        """`is_open` has a flag for each engine; empty = not known."""
        scheduler, lines, granted = self._scheduler, self.model(model), list[tuple[Ticket, Lease]]()
        view, tenants = scheduler.view(model), lines.tenants
        assert view is not None  # there are eligible tickets

        def bind(ticket: Ticket, at: int, options: Options) -> None:
            self.leave(ticket)
            tenant = tenants.of(ticket.demand)
            lease = scheduler.bind(ticket.demand, options, at, tenants, tenant, now=now, ticket=ticket)
            self._hold(lease, now)
            granted.append((ticket, lease))

        idle = self._idle(lines, view)
        is_open = is_open or idle.are_open(view.engines, now)
        QueueScan(view.engines, scheduler.policy, idle, is_open, now, bind=bind).run(tickets, eligible)
        return granted

    def _idle(self, lines: ModelLines, view: ModelView) -> IdleCapacity:
        return lines.idle_capacity(view, self._itl_objective_seconds)

    def opens_seconds(self, now: float) -> float:
        """When lines that wait may be bound by time alone; infinite = not before something changes."""
        opens = inf
        for name, lines in self._models.items():
            view = self._scheduler.view(name) if lines.waiting else None
            if view is not None:
                idle = self._idle(lines, view)
                opens = min([opens, *[idle.opens_seconds(engine, now) for engine in view.engines]])
        return opens

    def _joins_queue(self, ticket: Ticket, now: float) -> bool:
        """Move a line of an urgent batch to the queue: as a batch request, or a few as interactive ones."""
        demand, scheduler = ticket.demand, self._scheduler
        wanted = urgency(line_of(demand).laxity_seconds(now))
        if wanted is Urgency.IDLE:
            return False
        view, waiting = scheduler.view(demand.model), self._queue.of_model(demand.model) or ()
        is_batch = wanted is Urgency.BATCH or has_most_interactive(waiting, [] if view is None else view.engines)
        self.leave(ticket)
        turn = scheduler.turn(ticket.prefill_seconds, now)
        ticket.enter(demand if demand.batch is is_batch else replace(demand, batch=is_batch), now, turn)
        try:
            self._queue.join(ticket)
        except QueueFull:
            self._join(ticket)
            return False
        return True

    def pause(self, now: float) -> list[Lease]:
        """Revoke leases of lines: for interactive requests that wait for what these hold, or that they slow down."""
        chosen, is_due = list[Lease](), now >= self._pause_due
        if not is_due and not self._queue.models():
            return chosen
        if is_due:
            self._pause_due = now + _PAUSE_SECONDS
        for model, view in self._scheduler.views():
            queue = self._queue.of_model(model)
            if not is_due and queue is None:
                continue
            if engines := [engine for engine in view.engines if self.leases(engine).held]:
                waiting = [] if queue is None else queue.in_order(_PAUSED_FOR)
                idle = self._idle(self.model(model), view)
                chosen += Pause(engines, self._scheduler.policy, view.capacity, idle, offline=self, now=now).run(
                    waiting
                )
        return chosen

    def _hold(self, lease: Lease, now: float) -> None:
        """A line is bound to idle capacity."""
        self.model(lease.demand.model).prefills.started(lease, now)
        self._leases.setdefault(lease.engine_index, OfflineLeases()).hold(lease)
        self._count += 1
        lease.when_released(self._released)

    def _released(self, lease: Lease) -> None:
        own = self._leases[lease.engine_index]
        own.release(lease)
        self.model(lease.demand.model).prefills.ended(lease)
        self._count -= 1
        if not own.held and not own.revoked:
            del self._leases[lease.engine_index]

    def leases(self, engine: Engine) -> OfflineLeases:
        """What they have there; it must not be changed."""
        return self._leases.get(engine.index) or OfflineLeases()

    def revoke(self, leases: list[Lease]) -> None:
        for lease in leases:
            self._leases[lease.engine_index].revoke(lease)


@dataclass(slots=True)
class Pause:
    """Finds the offline leases to revoke on engines of one model.

    For the next interactive requests that find no capacity, as if each went to its best engine of these; and where the
    predicted time between tokens of others is above the objective.
    """

    engines: list[Engine]
    policy: Policy
    capacity: Capacity  # for interactive requests
    idle: IdleCapacity
    offline: OfflineQueue
    now: float

    def run(self, waiting: Iterable[Ticket]) -> list[Lease]:
        """Revoke leases; their holders end the requests. `waiting`: the next requests, interactive ones first."""
        chosen: list[Lease] = []
        excess, offline = 0, self.offline
        for engine, (slots, tokens) in zip(self.engines, self._wanted(waiting), strict=True):
            own = offline.leases(engine)
            if slots:
                slots, tokens = self._lacking(engine, slots, tokens)
                freed_tokens = sum([lease.tokens_alone for lease in own.revoked])
                chosen += self._revoke(engine, slots - own.revoked_sequences, tokens - freed_tokens)
            elif engine.load.in_flight > own.held_sequences + own.revoked_sequences:
                excess += max(0, self.idle.excess(engine, self.now) - own.revoked_sequences)
        return chosen + self._level(excess)

    def _level(self, excess: int) -> list[Lease]:
        """Revoke so many sequences, from the fullest engines. An engine that alone became emptier would attract all new
        requests.
        """
        if excess <= 0:
            return []
        own = [self.offline.leases(engine) for engine in self.engines]
        sizes = [it.load.in_flight - its.revoked_sequences for it, its in zip(self.engines, own, strict=True)]
        left = [its.held_sequences for its in own]
        counts = [0] * len(sizes)
        for _ in range(min(excess, sum(left))):
            at = max([at for at, count in enumerate(left) if count > 0], key=sizes.__getitem__)
            for values, more in ((sizes, -1), (left, -1), (counts, 1)):
                values[at] += more
        return [
            lease
            for engine, count in zip(self.engines, counts, strict=True)
            for lease in self._revoke(engine, count, 0)
        ]

    def _revoke(self, engine: Engine, slots: int, tokens: int) -> list[Lease]:
        found = victims(self.offline.leases(engine).held, slots, tokens, self.now)
        self.offline.revoke(found)
        return found

    def _wanted(self, waiting: Iterable[Ticket]) -> list[tuple[int, int]]:
        """Slots and KV tokens on each engine for interactive requests that find no capacity there."""
        engines, capacity = self.engines, self.capacity
        wanted, costs = [(0, 0)] * len(engines), [0.0] * len(engines)
        for ticket in waiting:
            demand = ticket.demand
            if demand.batch:
                break
            able = [at for at, engine in enumerate(engines) if ticket.may_use(engine)]
            if not able:
                continue
            options = self.policy.options(demand, engines, capacity.calibration.model, self.now)
            options.add(costs)
            at = options.cheapest(able)
            costs[at] += options.prefill_seconds[at]
            engine, (slots, tokens) = engines[at], wanted[at]
            if not capacity.admits(engine, demand, self.now):
                output_tokens, _ = capacity.lengths.expected(demand.model, demand.tenant, demand.output_tokens)
                wanted[at] = slots + slots_of(demand, engine), tokens + engine.kv.needed(demand, output_tokens)
        return wanted

    def _lacking(self, engine: Engine, slots: int, tokens: int) -> tuple[int, int]:
        """What is missing there for these."""
        size = engine.kv_cache_tokens
        slots -= engine.slots - engine.load.in_flight
        if size is None:
            return slots, 0
        spare = self.capacity.kv_headroom * size - engine.kv.margin_tokens - engine.kv.taken_tokens
        return slots, tokens - int(spare)


def has_most_interactive(waiting: Iterable[Ticket], engines: list[Engine]) -> bool:
    """Whether urgent lines use their limit of slots as if they were interactive, an eighth, or wait for it."""
    demands = [ticket.demand for ticket in waiting]
    demands += [held.demand for engine in engines for held in engine.kv.held]
    lines = sum([demand.offline is not None and not demand.batch for demand in demands])
    return lines >= max(1, sum([engine.slots for engine in engines]) // _URGENT_SHARE)
