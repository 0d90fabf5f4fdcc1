"""Offline batches: lines that use capacity which is idle, and give it back when interactive requests need it. Pure.

Offline lines wait apart from the queue and never age. An engine has capacity for one more while nothing else waits for
the model, slots and KV cache are left beyond the guarded ones, no prompt is in prefill there, and the predicted
time between tokens stays below the objective. The less laxity a batch has, the more its lines may use.

Lines of embeddings, scores and reranking only have a prefill, whose end is their answer. They are sent in short calls,
which are not worth aborting.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
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


class Urgency(IntEnum):
    """What lines of a batch may use: idle capacity, the share of batch requests, or a part of the interactive one."""

    IDLE = 0
    BATCH = 1
    INTERACTIVE = 2


_BATCH_LAXITY_SECONDS: Final = 1800.0
_INTERACTIVE_LAXITY_SECONDS: Final = 300.0


def urgency(laxity_seconds: float) -> Urgency:
    """By the time left beyond what the remaining lines need at the measured pace."""
    if laxity_seconds > _BATCH_LAXITY_SECONDS:
        return Urgency.IDLE
    return Urgency.BATCH if laxity_seconds > _INTERACTIVE_LAXITY_SECONDS else Urgency.INTERACTIVE


_URGENCY_SECONDS: Final = 0.05
_PAUSE_SECONDS: Final = 0.02
_PACE_SECONDS: Final = 600.0  # over which the pace is averaged: longer than bursts of interactive requests
_LEAST_PACE_SECONDS: Final = 60.0  # before, the pace is unknown


class BatchPace:
    """The pace of one batch, and its laxity. Times are on one clock; `expires_seconds` is the end of its window."""

    __slots__ = ("_at", "_began", "_done", "expires_seconds", "left")

    def __init__(self, began_seconds: float, expires_seconds: float, lines: int) -> None:
        self._began = self._at = began_seconds
        self.expires_seconds = expires_seconds
        self.left = lines
        self._done = 0.0  # fades with time

    def done(self, now: float) -> None:
        """A line has got its answer."""
        self._done = self._done * exp((self._at - now) / _PACE_SECONDS) + 1
        self._at = now
        self.left -= 1

    def remain(self, lines: int) -> None:
        """So many lines are left: other gateways have run some."""
        self.left = lines

    def laxity_seconds(self, now: float) -> float:
        """Time left less the remaining work; the work counts as nothing until the pace is known."""
        left_seconds, passed = self.expires_seconds - now, now - self._began
        if passed < _LEAST_PACE_SECONDS or not self.left:
            return left_seconds
        faded_seconds = _PACE_SECONDS * (1 - exp(-passed / _PACE_SECONDS))
        lines = self._done * exp((self._at - now) / _PACE_SECONDS)
        return left_seconds - self.left * faded_seconds / lines if lines else -inf


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

    __slots__ = ("_added", "_at", "_last", "_others", "_pooled", "_spent_seconds", "_tokens", "_total")

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, float]] = {}  # by the engine's index: when it was sent, and its length
        self._pooled: dict[int, int] = {}
        self._added = 0.0  # by offline lines, since the last look
        self._at = self._total = self._others = 0.0  # at the last look
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
        passed, count = now - self._at, len(engines)
        if passed > 0 or self._added:
            window_seconds = max(_BURST_SECONDS / count, _LEAST_BURST_SECONDS)
            total = MEMORY_SECONDS * sum([engine.load.prefill_share(now) for engine in engines])
            added = total - self._total * exp(-passed / MEMORY_SECONDS) - self._added
            self._others = self._others * exp(-passed / window_seconds) + added / (window_seconds * count)
            self._at, self._total, self._added = now, total, 0.0
        return min(_MOST_PREFILL_SHARE, max(0.0, self._others))


@dataclass(frozen=True, slots=True)
class IdleCapacity(Capacity):
    """Checks engines for offline lines of one model."""

    prefills: Prefills = field(default_factory=Prefills)
    engines: list[Engine] = field(default_factory=list)  # of the model
    itl_objective_seconds: float | None = None

    def is_open(self, engine: Engine, now: float, *, guarded: bool = True) -> bool:  # noqa: ARG002
        return Capacity.is_open(self, engine, now, guarded=True) and self._has_no_effect(engine, 0, 0, now)

    def admits(self, engine: Engine, demand: Demand, now: float, *, guarded: bool = True) -> bool:  # noqa: ARG002
        if not Capacity.admits(self, engine, demand, now, guarded=True):
            return False
        if demand.divisible:
            return self._has_no_effect(engine, 0, 0, now)
        return self._has_no_effect(engine, demand.sequences, demand.prompt_tokens, now)

    def is_closed(self, now: float) -> bool:
        """Whether no engine takes a line now."""
        return True not in self.are_open(self.engines, now)

    def opens_seconds(self, engine: Engine, now: float) -> float:
        """When it may be open to the next line by time alone: a prefill ends, or its share of the time has passed."""
        ahead_seconds = engine.load.prefill_ahead_seconds(now)
        if self.prefills.has_most_pooled(engine):
            return inf
        if engine.load.pending:
            return now + ahead_seconds if ahead_seconds > 0 else inf
        free_share = self._free_share(engine, 0, 0, now)
        opens = self.prefills.next_seconds(engine, free_share) if free_share > self._least_share(engine) else now
        return opens if opens > now else inf

    def excess(self, engine: Engine, now: float) -> int:
        """Sequences that are too many there for the time between tokens; about."""
        model, load = self.calibration.model, engine.load
        most = self._most_seconds(engine) * (1 - self.prefills.others_share(self.engines, now))
        over = step_seconds(model, engine) - most
        if over <= 0 or not load.in_flight:
            return 0
        return 1 + int(over / (engine.slowness * (model.c + model.d * load.context_tokens / load.in_flight)))

    def _has_no_effect(self, engine: Engine, sequences: int, tokens: int, now: float) -> bool:
        """Whether interactive requests there, and those that may come, would not feel so many more sequences."""
        load = engine.load
        load.prefill_ahead_seconds(now)  # first: it ends prefills that are not seen
        if load.pending or self.prefills.has_most_pooled(engine):
            return False
        if not load.in_flight:
            return True
        free_share = self._free_share(engine, sequences, tokens, now)
        return free_share > self._least_share(engine) and now >= self.prefills.next_seconds(engine, free_share)

    def _least_share(self, engine: Engine) -> float:
        return self.prefills.least_share(engine.load.in_flight - engine.load.pooled, self._most_seconds(engine))

    def _free_share(self, engine: Engine, sequences: int, tokens: int, now: float) -> float:
        """The share of the engine's time that is left with so many more sequences and tokens."""
        step, most = step_seconds(self.calibration.model, engine, sequences, tokens), self._most_seconds(engine)
        return 1 - step / most - self.prefills.others_share(self.engines, now)

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


class OfflineQueue:
    """Owner of the offline lines that wait for idle capacity, in the order of their batches, and of those that use it.

    Their tenants are counted apart: idle capacity is nobody's share.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, OrderedDict[Ticket, None]] = {}  # by model
        self._held: dict[int, dict[Lease, None]] = {}  # by the engine's index
        self._revoked: dict[int, dict[Lease, None]] = {}  # the same, until they are released
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
        self._held.setdefault(lease.engine_index, {})[lease] = None
        self._count += 1

    def released(self, lease: Lease) -> None:
        """A lease is released; one that was not bound to idle capacity changes nothing."""
        for leases in (self._held, self._revoked):
            own = leases.get(lease.engine_index)
            if own is not None and lease in own:
                self.prefills(lease.demand.model).ended(lease)
                del own[lease]
                if not own:
                    del leases[lease.engine_index]
                self._count -= 1
                return

    def held(self, engine: Engine) -> Iterable[Lease]:
        """The leases on an engine that are not revoked."""
        return self._held.get(engine.index, ())

    def revoked(self, engine: Engine) -> Iterable[Lease]:
        """The leases on an engine that are revoked, and whose requests have not ended yet."""
        return self._revoked.get(engine.index, ())

    def revoke(self, leases: list[Lease]) -> None:
        for lease in leases:
            own = self._held[lease.engine_index]
            del own[lease]
            if not own:
                del self._held[lease.engine_index]
            self._revoked.setdefault(lease.engine_index, {})[lease] = None


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
        excess = 0
        for engine, (slots, tokens) in zip(self.engines, self._wanted(waiting), strict=True):
            freed_slots, freed_tokens = _size(self.offline.revoked(engine))
            if slots:
                slots, tokens = self._lacking(engine, slots, tokens)
                chosen += self._revoke(engine, slots - freed_slots, tokens - freed_tokens)
            elif engine.load.in_flight > freed_slots + _size(self.offline.held(engine))[0]:
                excess += max(0, self.idle.excess(engine, self.now) - freed_slots)
        return chosen + self._level(excess)

    def _level(self, excess: int) -> list[Lease]:
        """Revoke so many sequences, from the fullest engines. An engine that alone became emptier would attract all new
        requests.
        """
        if excess <= 0:
            return []
        sizes = [engine.load.in_flight - _size(self.offline.revoked(engine))[0] for engine in self.engines]
        left = [_size(self.offline.held(engine))[0] for engine in self.engines]
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
        found = victims(self.offline.held(engine), slots, tokens, self.now)
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


def _size(leases: Iterable[Lease]) -> tuple[int, int]:
    """Slots and KV tokens that leases hold together."""
    return sum([lease.sequences for lease in leases]), sum([lease.tokens_alone for lease in leases])


def interactive_lines(waiting: Iterable[Ticket], engines: Iterable[Engine]) -> int:
    """Offline lines that run or wait as interactive requests."""
    demands = [ticket.demand for ticket in waiting]
    demands += [held.demand for engine in engines for held in engine.kv.held]
    return sum([demand.offline is not None and not demand.batch for demand in demands])
