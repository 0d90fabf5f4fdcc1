"""Offline batches: lines that use capacity which is idle, and give it back when interactive requests need it. Pure.

Offline lines wait apart from the queue and never age. The less laxity a batch has, the more its lines may use.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from math import exp, inf
from typing import Final

from gateway.errors import GatewayError
from gateway.routing.engine import Engine
from gateway.routing.policy import Policy
from gateway.scheduling.admission import Capacity, slots_of
from gateway.scheduling.fair_share import Tenants
from gateway.scheduling.idle import IdleCapacity, Prefills
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


_URGENT_SHARE: Final = 8  # one slot in 8 may be used by urgent lines as if they were interactive
_URGENCY_SECONDS: Final = 0.25  # between two looks at lines that wait; one that comes is looked at, too
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
