"""When a batch is sent, and what is in it. Pure: the time is passed in.

While few batches are in flight, what waits goes at once; otherwise the next one gathers until one of them ends, it is
full, or its oldest part has waited long enough. Short requests and long lists have batches of their own, so that short
ones never wait behind long ones. The next part comes by deficit round robin over tenants, by tokens and weight. Credit
is counted in whole units, so that many rounds at once equal the same rounds one by one.
"""

import asyncio
import math
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from gateway.embeddings.members import Part
from gateway.embeddings.sizes import ModelSizes

_UNITS = 65536  # of credit, in a token
_QUANTUM = 32 * _UNITS  # of a tenant of weight 1, in each round


class _Flow:
    """What one tenant has waiting, and how much of its turn it has left."""

    __slots__ = ("credit", "parts")

    def __init__(self) -> None:
        self.parts: OrderedDict[Part, None] = OrderedDict()  # oldest first
        self.credit = 0

    @property
    def first(self) -> Part:
        """The part that has waited for longest."""
        return next(iter(self.parts))

    @property
    def quantum(self) -> int:
        return max(1, round(_QUANTUM * self.first.weight))

    @property
    def missing(self) -> int:
        """The credit that its first part needs besides what is there; 0 or less = none."""
        return self.first.tokens * _UNITS - self.credit


class Lane:
    """Parts that wait, in order within a tenant, in turn between tenants.

    What is taken from the front leaves gaps in a `dict`, so that each look at its front takes longer.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[Part, None] = OrderedDict()  # oldest first
        self._flows: OrderedDict[str, _Flow] = OrderedDict()  # whose turn it is first
        self.items = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __repr__(self) -> str:
        return f"<Lane {len(self)} parts, {self.items} items, {self.tokens} tokens, {len(self._flows)} tenants>"

    def join(self, part: Part, now: float) -> None:
        """Take a place at the end of the tenant's line."""
        part.joined_seconds = now
        self._waiting[part] = None
        self.items += part.items
        self.tokens += part.tokens
        flow = self._flows.get(part.tenant)
        if flow is None:
            flow = self._flows[part.tenant] = _Flow()
        flow.parts[part] = None

    def leave(self, part: Part) -> bool:
        """Give the place up; False if the part does not wait here any more."""
        if part not in self._waiting:
            return False
        self._drop(part)
        flow = self._flows[part.tenant]
        del flow.parts[part]
        if not flow.parts:
            del self._flows[part.tenant]
        return True

    @property
    def oldest_seconds(self) -> float:
        """When the one who waits longest came. Only while somebody waits."""
        return next(iter(self._waiting)).joined_seconds

    @property
    def next_items(self) -> int:
        """Inputs of the part that a batch would begin with."""
        return next(iter(self._flows.values())).first.items if self._flows else 0

    def take(self, max_items: int, max_tokens: int) -> list[Part]:
        """The next batch: at least one part, and more while they fit. What must be alone is."""
        taken: list[Part] = []
        items = tokens = passed = 0
        while self._flows:
            tenant, flow = next(iter(self._flows.items()))
            part = flow.first
            fits = not taken or (
                items + part.items <= max_items and tokens + part.tokens <= max_tokens and not part.alone
            )
            if not fits:
                break
            if flow.missing > 0 and len(self._flows) > 1:
                flow.credit += flow.quantum
                if flow.missing > 0:
                    self._flows.move_to_end(tenant)
                    passed += 1
                    if passed == len(self._flows):
                        self._pass_rounds()
                        passed = 0
                    continue
            passed = 0
            flow.credit = max(0, -flow.missing)
            del flow.parts[part]
            self._drop(part)
            taken.append(part)
            items, tokens = items + part.items, tokens + part.tokens
            if not flow.parts:
                del self._flows[tenant]
            elif flow.missing > 0:
                self._flows.move_to_end(tenant)
            if part.alone:
                break
        return taken

    def _pass_rounds(self) -> None:
        """Nobody could afford anything in a whole round: add the next ones, up to the one in which somebody can."""
        flows = self._flows.values()
        rounds = min(-(-flow.missing // flow.quantum) for flow in flows) - 1
        for flow in flows:
            flow.credit += rounds * flow.quantum

    def _drop(self, part: Part) -> None:
        del self._waiting[part]
        self.items -= part.items
        self.tokens -= part.tokens


_RATE_SECONDS = 0.1  # over which arrivals are averaged
_LOOK_SECONDS = 0.001
_EARLY_SECONDS = 0.0005  # by which a timer may come
_TRUST_GAIN = 0.5
_TRUST_REGROWS = 0.01


class BatchReason(StrEnum):
    """Why a batch was sent just then."""

    IDLE = "idle"  # nothing of its kind was under way
    SLOT = "slot"  # fewer than wanted were under way, and nothing was to be gained by waiting
    FULL = "full"  # its budget of items or tokens was reached
    DELAY = "delay"  # its oldest part had waited for the longest time allowed


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of one batch, and of the time for which it gathers."""

    items: int
    tokens: int
    max_delay_seconds: float


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What matters besides the parts themselves.

    `slots`: batches that are wanted under way at once. `overhead_seconds`: what a batch takes whatever its size.
    `crowded`: requests wait for a place on the backends already, so that a batch sent now would only wait there.
    """

    slots: int = 1
    overhead_seconds: float = 0.0
    crowded: bool = False


class Gathering:
    """Parts that may share batches: those that wait, and how many batches of them are under way."""

    __slots__ = ("_at", "_held", "_rate_sum", "_trust", "in_flight", "lane")

    def __init__(self) -> None:
        self.lane = Lane()
        self.in_flight = 0
        self._rate_sum = 0.0
        self._at = -math.inf
        self._held: tuple[float, int] | None = None  # since when a free slot is held, with how many items then
        self._trust = 1.0  # how far holding a slot has brought what was hoped of it

    def __repr__(self) -> str:
        return f"<Gathering {self.lane!r}, {self.in_flight} batches under way>"

    @property
    def quiet(self) -> bool:
        """Nothing waits, and nothing is under way."""
        return not len(self.lane) and not self.in_flight

    def join(self, part: Part, now: float) -> None:
        self._rate_sum = self._rate_sum * math.exp((self._at - now) / _RATE_SECONDS) + part.items
        self._at = now
        self.lane.join(part, now)

    def due(self, now: float, budget: Budget, around: Surroundings) -> BatchReason | None:
        """Why to send a batch now; None = gather on."""
        lane = self.lane
        if not len(lane):
            self._held = None
            return None
        if lane.items >= budget.items or lane.tokens >= budget.tokens:
            return BatchReason.FULL
        if not self.in_flight:
            return BatchReason.IDLE
        waited = now - lane.oldest_seconds
        if around.crowded:
            return None
        if waited >= budget.max_delay_seconds - _EARLY_SECONDS:
            return BatchReason.DELAY
        if self.in_flight >= around.slots or self._is_worth_holding(now, around.overhead_seconds):
            return None
        return BatchReason.SLOT

    def look_again_seconds(self, now: float, budget: Budget) -> float | None:
        """When `due` may change by time alone; None = never."""
        if not len(self.lane):
            return None
        at = self.lane.oldest_seconds + budget.max_delay_seconds
        return at if at > now + _EARLY_SECONDS else now + max(_LOOK_SECONDS, budget.max_delay_seconds)

    def take(self, now: float, budget: Budget, overhead_seconds: float) -> list[Part]:
        """The parts of the batch that is due; it is under way until `ended`."""
        self._judge_hold(now, overhead_seconds)
        self.in_flight += 1
        return self.lane.take(budget.items, budget.tokens)

    def ended(self) -> None:
        """A batch is over, however it ended."""
        self.in_flight -= 1

    def _is_worth_holding(self, now: float, overhead_seconds: float) -> bool:
        """Whether the overhead that those save who will come meanwhile is more than the delay of those who wait."""
        rate = self._rate_sum * math.exp((self._at - now) / _RATE_SECONDS) / _RATE_SECONDS
        hoped, items = rate * overhead_seconds, self.lane.items
        if hoped * self._trust > items:
            if self._held is None:
                self._held = (now, items)
            return True
        if hoped > items:
            self._trust = min(1.0, self._trust + _TRUST_REGROWS)
        return False

    def _judge_hold(self, now: float, overhead_seconds: float) -> None:
        """Clients that ask again only when they are answered come at a high rate, and yet nobody comes meanwhile."""
        if self._held is None:
            return
        (since, items), self._held = self._held, None
        imposed, saved = items * (now - since), (self.lane.items - items) * overhead_seconds
        if imposed > 0:
            self._trust += _TRUST_GAIN * (min(1.0, max(0.0, saved / imposed)) - self._trust)


class GroupKey(NamedTuple):
    """What requests must have in common to share a batch."""

    model: str
    template: bytes
    are_ids: bool
    isolation: str
    batch: bool
    suspect: bool = False


@dataclass(slots=True, eq=False)
class Flight:
    """A batch under way. `present`: parts whose clients still wait. Without a task, its one client has it sent."""

    group: "BatchGroup"
    gathering: Gathering
    parts: list[Part]
    is_bulk: bool
    present: int = 0
    ended: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def items(self) -> int:
        return sum(part.items for part in self.parts)


class BatchGroup:
    """One such group, while any of it is there."""

    def __init__(self, key: GroupKey, sizes: ModelSizes) -> None:
        self.key = key
        self.sizes = sizes
        self.interactive = Gathering()
        self.bulk = Gathering()
        self.look: asyncio.Handle | None = None
        self.timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<BatchGroup {self.key.model} {self.interactive!r} {self.bulk!r}>"

    @property
    def quiet(self) -> bool:
        return self.interactive.quiet and self.bulk.quiet and self.look is None

    def gathering(self, *, bulk: bool) -> Gathering:
        return self.bulk if bulk else self.interactive

    def looked(self) -> None:
        """It is being looked at: what was to bring that about is of no use any more."""
        self.look = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def surroundings(self, *, crowded: bool) -> Surroundings:
        """What matters for when to send."""
        return Surroundings(self.sizes.slots, self.sizes.overhead_seconds, crowded)

    def makes_wait(self, gathering: Gathering, *, crowded: bool) -> bool:
        """Whether one more request may have to wait for others to end."""
        taken = self.sizes.bulk
        is_behind = gathering is self.bulk and (len(gathering.lane) > 0 or not taken.may_take(1, self.sizes.bulk_share))
        return crowded or is_behind or gathering.in_flight >= self.sizes.slots

    def has_room(self, gathering: Gathering) -> bool:
        """Whether the next batch may be sent: long lists leave some of the backends' slots to short ones."""
        sizes = self.sizes
        return gathering is not self.bulk or sizes.bulk.may_take(gathering.lane.next_items, sizes.bulk_share)

    def take(self, gathering: Gathering, now: float, budget: Budget) -> Flight:
        is_bulk, overhead = gathering is self.bulk, self.sizes.overhead_seconds
        if is_bulk and (left := self.sizes.bulk.left(self.sizes.bulk_share)) is not None:
            budget = Budget(min(budget.items, left), budget.tokens, budget.max_delay_seconds)
        flight = Flight(self, gathering, gathering.take(now, budget, overhead), is_bulk)
        if is_bulk:
            self.sizes.bulk.take(flight.items)
        return flight

    def ended(self, flight: Flight) -> None:
        """A batch is over, however it ended."""
        flight.gathering.ended()
        if flight.is_bulk:
            self.sizes.bulk.give_back(flight.items)

    def look_again_seconds(self, now: float, budget: Budget) -> float | None:
        """When something may be due by time alone; None = never."""
        times = [each.look_again_seconds(now, budget) for each in (self.interactive, self.bulk)]
        return min((at for at in times if at is not None), default=None)
