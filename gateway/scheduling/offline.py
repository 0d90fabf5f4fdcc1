"""Offline batches: lines that use capacity which is idle, and give it back when interactive requests need it. Pure.

Offline lines wait apart from the queue and never age. An engine has capacity for one more while nothing else waits for
the model, slots and KV cache are left beyond the guarded ones, no prompt is in prefill there, and the predicted
time between tokens stays below the objective. The less laxity a batch has, the more its lines may use.

Lines of embeddings, scores and reranking only have a prefill, whose end is their answer. They are sent in short calls,
which are not worth aborting.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from math import exp, inf
from typing import Final

from gateway.errors import GatewayError
from gateway.request import Demand
from gateway.routing.engine import MEMORY_SECONDS, CostModel, Engine, prefill_seconds
from gateway.routing.policy import Policy
from gateway.scheduling.admission import Capacity, slots_of
from gateway.scheduling.fair_share import Tenants
from gateway.scheduling.lease import Lease
from gateway.scheduling.wait_queue import Ticket

_URGENT_SHARE: Final = 8  # one slot in 8 may be used by urgent lines as if they were interactive
_URGENCY_SECONDS: Final = 0.25  # between two looks at lines that wait; one that comes is looked at, too
_PAUSE_SECONDS: Final = 0.02
OBJECTIVE_SHARE: Final = 0.92  # of the objective: the adaptive limit grows only while streams are faster than it
_MOST_SLOWDOWN: Final = 2.0  # of a decode step, compared with an empty engine: without an objective
_ENOUGH_SHARE: Final = 0.2  # of an engine's time, to be free for any prefill that others wait for
_FADING: Final = 0.98  # of earlier lines, with each that ends
_MOST_PREFILL_SHARE: Final = 0.9
_BURST_SECONDS: Final = 1.0  # of one engine's requests show that a burst has begun
_LEAST_BURST_SECONDS: Final = 0.2
_MOST_POOLED: Final = 2  # calls of pooled lines on an engine: one computes, and the next is there when it ends


class Prefills:
    """The prefills of one model's requests: the last offline one on each engine, the share of others, and what lines
    cost for a token; and how many calls of pooled lines are in flight on each engine.

    That share of time is a mean over a short time, because bursts begin suddenly, and over all engines, to be steady.
    """

    __slots__ = (
        "_added", "_at", "_last", "_others", "_others_share", "_pooled", "_spent_seconds", "_tokens", "_total",
    )  # fmt: skip

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, float]] = {}  # by the engine's index: when it was sent, and its length
        self._pooled: dict[int, int] = {}
        self._added = 0.0  # by offline lines, since the last look
        self._at = self._total = self._others = self._others_share = 0.0  # at the last look
        self._spent_seconds = self._tokens = 0.0  # of the last lines: for their prefills, and what they generated then

    def started(self, lease: Lease, now: float) -> None:
        """An offline line is sent: note its prefill, apart from those of others."""
        self._added += lease.prefill_seconds
        self._last[lease.engine_index] = now, lease.prefill_seconds
        self._count_pooled(lease, 1)

    def ended(self, lease: Lease) -> None:
        """An offline line is answered or paused: note what its prefill was good for."""
        self._count_pooled(lease, -1)
        if not lease.demand.divisible:
            tokens = max(lease.streamed_tokens, (lease.served_tokens or 0) - lease.uncached_tokens)
            model, engine = lease.calibration.model, lease.engine
            spent_seconds = prefill_seconds(model, engine.slowness, lease.demand.prompt_tokens, lease.hit_tokens)
            self._spent_seconds = _FADING * self._spent_seconds + spent_seconds
            self._tokens = _FADING * self._tokens + tokens

    def least_share(self, sequences: int, step_seconds: float) -> float:
        """The share of an engine's time to be free for one more prefill: what prefills of lines take while so many
        sequences are kept running, each for as many tokens as the last lines. With less, they would only replace each
        other. Of the first lines, nothing is known: any share will do.
        """
        return min(_ENOUGH_SHARE, sequences * self._spent_seconds / (max(1.0, self._tokens) * step_seconds))

    def has_most_pooled(self, engine: Engine) -> bool:
        """Whether so many calls of pooled lines are in flight there as may be, however long they were predicted."""
        return self._pooled.get(engine.index, 0) >= _MOST_POOLED

    def _count_pooled(self, lease: Lease, more: int) -> None:
        if lease.demand.divisible:
            self._pooled[lease.engine_index] = self._pooled.get(lease.engine_index, 0) + more

    def next_seconds(self, engine: Engine, share: float) -> float:
        """When the next offline line may be sent there, so that they take this share of the time."""
        at, length = self._last.get(engine.index, (0.0, 0.0))
        return at + length / share

    def others_share(self, engines: list[Engine], now: float) -> float:
        """The share of the engines' time that prefills of other requests take."""
        passed = now - self._at
        if passed > 0 or self._added:
            count = len(engines)
            window_seconds = max(_BURST_SECONDS / count, _LEAST_BURST_SECONDS)
            total = MEMORY_SECONDS * sum([engine.load.prefill_share(now) for engine in engines])
            added = total - self._total * exp(-passed / MEMORY_SECONDS) - self._added
            self._others = self._others * exp(-passed / window_seconds) + added / (window_seconds * count)
            self._others_share = min(_MOST_PREFILL_SHARE, max(0.0, self._others))
            self._at, self._total, self._added = now, total, 0.0
        return self._others_share


@dataclass(frozen=True, slots=True)
class IdleCapacity(Capacity):
    """Checks engines for offline lines of one model."""

    _: KW_ONLY
    prefills: Prefills = field(default_factory=Prefills)
    engines: list[Engine] = field(default_factory=list)  # of the model
    itl_objective_seconds: float | None = None

    def is_open(self, engine: Engine, now: float, *, guarded: bool = True) -> bool:  # noqa: ARG002
        if self._is_busy(engine, now):  # first: it is the usual case, and cheap
            return False
        return Capacity.is_open(self, engine, now, guarded=True) and self._has_no_effect(engine, 0, 0, now)

    def admits(self, engine: Engine, demand: Demand, now: float, *, guarded: bool = True) -> bool:  # noqa: ARG002
        if self._is_busy(engine, now) or not Capacity.admits(self, engine, demand, now, guarded=True):
            return False
        if demand.divisible:
            return self._has_no_effect(engine, 0, 0, now)
        return self._has_no_effect(engine, demand.sequences, demand.prompt_tokens, now)

    def opens_seconds(self, engine: Engine, now: float) -> float:
        """When it may be open to the next line by time alone: a prefill ends, and its share of the time has passed."""
        ahead_seconds = engine.load.prefill_ahead_seconds(now)
        if self.prefills.has_most_pooled(engine) or (engine.load.pending and ahead_seconds <= 0):
            return inf
        free_share, least_share = self._shares(engine, 0, 0, now)
        opens = now + ahead_seconds
        if free_share > least_share:
            opens = max(opens, self.prefills.next_seconds(engine, free_share))
        return opens if opens > now else inf

    def excess(self, engine: Engine, now: float) -> int:
        """Sequences that are too many there for the time between tokens; about."""
        model, load = self.calibration.model, engine.load
        most = self._most_seconds(engine) * (1 - self.prefills.others_share(self.engines, now))
        over = step_seconds(model, engine) - most
        if over <= 0 or not load.in_flight:
            return 0
        return 1 + int(over / (engine.slowness * (model.c + model.d * load.context_tokens / load.in_flight)))

    def _is_busy(self, engine: Engine, now: float) -> bool:
        """Whether a prompt is in prefill there, or as many pooled lines are in flight as may be."""
        load = engine.load
        if load.pending:
            load.prefill_ahead_seconds(now)  # it ends prefills that are not seen
        return bool(load.pending) or self.prefills.has_most_pooled(engine)

    def _has_no_effect(self, engine: Engine, sequences: int, tokens: int, now: float) -> bool:
        """Whether interactive requests there, and those that may come, would not feel so many more sequences."""
        if not engine.load.in_flight:
            return True
        free_share, least_share = self._shares(engine, sequences, tokens, now)
        return free_share > least_share and now >= self.prefills.next_seconds(engine, free_share)

    def _shares(self, engine: Engine, sequences: int, tokens: int, now: float) -> tuple[float, float]:
        """The share of the engine's time that is left with so many more sequences and tokens, and the least one."""
        step, most = step_seconds(self.calibration.model, engine, sequences, tokens), self._most_seconds(engine)
        prefills, running = self.prefills, engine.load.in_flight - engine.load.pooled
        return 1 - step / most - prefills.others_share(self.engines, now), prefills.least_share(running, most)

    def _most_seconds(self, engine: Engine) -> float:
        objective = self.itl_objective_seconds
        if objective is not None:
            return OBJECTIVE_SHARE * objective
        return _MOST_SLOWDOWN * engine.slowness * self.calibration.model.a


def step_seconds(model: CostModel, engine: Engine, sequences: int = 0, tokens: int = 0) -> float:
    """A step without prefill, with so many more sequences and tokens in the KV cache; 0 = none generates tokens."""
    load = engine.load
    generating = load.in_flight - load.pooled + sequences
    if generating <= 0:
        return 0.0
    return engine.slowness * (model.a + model.c * generating + model.d * (load.context_tokens + tokens))


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
    return line is None or not line.continues, (now - lease.started_seconds) / max(1, lease.tokens_alone)


class Every:
    """Says at most once in so many seconds that something is due."""

    __slots__ = ("_seconds", "_until")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = -inf

    def is_due(self, now: float) -> bool:
        if now < self._until:
            return False
        self._until = now + self._seconds
        return True


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

    def release(self, lease: Lease) -> bool:
        """False if it is not one of these."""
        if lease in self.held:
            del self.held[lease]
            self.held_sequences -= lease.sequences
        elif lease in self.revoked:
            del self.revoked[lease]
            self.revoked_sequences -= lease.sequences
        else:
            return False
        return True


class OfflineQueue:
    """Owner of the offline lines that wait for idle capacity, in the order of their batches, and of those that use it.

    Their tenants are counted apart: idle capacity is nobody's share.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, OrderedDict[Ticket, None]] = {}  # by model
        self._leases: dict[int, OfflineLeases] = {}  # by the engine's index
        self._tenants: dict[str, Tenants] = {}
        self._prefills: dict[str, Prefills] = {}
        self._count = 0  # of all that wait or hold leases
        self.urgency_check = Every(_URGENCY_SECONDS)
        self.pause_check = Every(_PAUSE_SECONDS)  # while no interactive request waits

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        waiting = sum([len(tickets) for tickets in self._waiting.values()])
        return f"<OfflineQueue {waiting} waiting, {self._count - waiting} in flight>"

    def models(self) -> list[str]:
        """The models that lines wait for."""
        return list(self._waiting)

    def waiting(self, model: str) -> Iterator[Ticket]:
        """In order of arrival; it must not change meanwhile."""
        return iter(self._waiting.get(model, ()))

    def is_behind_others(self, ticket: Ticket) -> bool:
        """Whether other lines of its model wait here before it."""
        tickets = self._waiting.get(ticket.demand.model, ())
        return ticket in tickets and next(iter(tickets)) is not ticket

    def counts(self) -> dict[str, tuple[int, int]]:
        """Lines that wait, and sequences in flight on idle capacity, of each model that has any."""
        models = dict.fromkeys((*self._waiting, *self._tenants))
        counts = {model: (len(self._waiting.get(model, ())), self.tenants(model).in_flight) for model in models}
        return {model: count for model, count in counts.items() if any(count)}

    def join(self, ticket: Ticket) -> None:
        waiting = self._waiting.setdefault(ticket.demand.model, OrderedDict())
        waiting[ticket] = None
        self._count += 1
        line = ticket.demand.offline
        if line is not None and line.generated_tokens:
            waiting.move_to_end(ticket, last=False)  # an engine may still have its prompt in its cache

    def leave(self, ticket: Ticket) -> bool:
        """Remove a ticket; False if it was removed before."""
        model = ticket.demand.model
        tickets = self._waiting.get(model)
        if tickets is None or ticket not in tickets:
            return False
        del tickets[ticket]
        if not tickets:
            del self._waiting[model]
        self._count -= 1
        return True

    def refused(self, granted: list[tuple[Ticket, Lease | GatewayError]]) -> None:
        """Remove the tickets of these, which have an answer."""
        for ticket, _ in granted:
            self.leave(ticket)

    def tenants(self, model: str) -> Tenants:
        tenants = self._tenants.get(model)
        if tenants is None:
            tenants = self._tenants[model] = Tenants()
        return tenants

    def prefills(self, model: str) -> Prefills:
        prefills = self._prefills.get(model)
        if prefills is None:
            prefills = self._prefills[model] = Prefills()
        return prefills

    def hold(self, lease: Lease, now: float) -> None:
        """A line is bound to idle capacity."""
        self.prefills(lease.demand.model).started(lease, now)
        self._leases.setdefault(lease.engine_index, OfflineLeases()).hold(lease)
        self._count += 1

    def released(self, lease: Lease) -> None:
        """A lease is released; one that was not bound to idle capacity changes nothing."""
        own = self._leases.get(lease.engine_index)
        if own is None or not own.release(lease):
            return
        self.prefills(lease.demand.model).ended(lease)
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
    """Whether so many urgent lines run or wait as interactive requests as may."""
    demands = [ticket.demand for ticket in waiting]
    demands += [held.demand for engine in engines for held in engine.kv.held]
    lines = sum([demand.offline is not None and not demand.batch for demand in demands])
    return lines >= max(1, sum([engine.slots for engine in engines]) // _URGENT_SHARE)
