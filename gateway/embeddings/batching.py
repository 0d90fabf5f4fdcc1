"""When a batch is sent, and what is in it.

While few batches are in flight, what waits goes at once; otherwise the next one gathers until one of them ends, it is
full, or its oldest piece has waited long enough. Short requests and long lists have batches of their own, so that short
ones never wait behind long ones.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import NamedTuple, Protocol

from gateway.config import EmbeddingsConfig
from gateway.embeddings.sizes import ModelSizes
from gateway.embeddings.waiter import BufferedResponse, Piece
from gateway.observe.record import Record
from gateway.scheduling.fair_share import FairClock, Share

_MOST_TENANTS = 1024  # more are kept only while they wait


class _TenantShare(Share):
    """One tenant's share, which counts while several tenants wait, and its waiting pieces, oldest first."""

    __slots__ = ("pieces",)

    def __init__(self, weight: float) -> None:
        super().__init__(weight, 0.0)
        self.pieces: OrderedDict[Piece, None] = OrderedDict()


class FairQueue:
    """Owner of the pieces that wait: in order within a tenant, in fair turns between tenants.

    Turns are the scheduler's: start-time fair queueing by tokens and weight. They are counted only while several
    tenants wait, because a single tenant needs none. Pieces are in ordered dicts, because taking from the front of a
    `dict` leaves gaps: each look at its front takes longer.
    """

    def __init__(self) -> None:
        self._pieces: OrderedDict[Piece, None] = OrderedDict()  # oldest first
        self._tenants: dict[str, _TenantShare] = {}
        self._clock: FairClock | None = None  # from the second tenant until the queue is empty
        self._numbers = count()
        self._most_tenants = _MOST_TENANTS
        self.items = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def oldest_seconds(self) -> float:
        """When the oldest piece joined. Only while there is one."""
        return next(iter(self._pieces)).joined_seconds

    @property
    def head(self) -> Piece:
        """The piece that `take` would begin with. Only while there is one."""
        clock = self._clock
        if clock is None:  # there is one tenant
            return next(iter(self._pieces))
        tenant: _TenantShare = next(clock.waiting.after(clock.now))[3]
        return next(iter(tenant.pieces))

    def join(self, piece: Piece) -> None:
        self._pieces[piece] = None
        self.items += piece.items
        self.tokens += piece.tokens
        tenant = self._tenants.get(piece.tenant) or self._new_tenant(piece)
        tenant.pieces[piece] = None
        if self._clock is not None and len(tenant.pieces) == 1:
            self._begin(tenant, self._clock)

    def leave(self, piece: Piece) -> bool:
        """Remove a piece; False if it does not wait here any more."""
        if piece not in self._pieces:
            return False
        del self._pieces[piece]
        self.items -= piece.items
        self.tokens -= piece.tokens
        tenant = self._tenants[piece.tenant]
        del tenant.pieces[piece]
        if not self._pieces:
            self._tenants, self._clock = {}, None
        elif not tenant.pieces and self._clock is not None:
            self._clock.waiting.leave(tenant)  # the share stays: a tenant that comes back is not ahead of others
        return True

    def take(self, max_items: float, max_tokens: int) -> list[Piece]:
        """The next batch: at least one piece, and more while they fit."""
        taken: list[Piece] = []
        items = tokens = 0
        while self._pieces:
            piece = self.head
            items, tokens = items + piece.items, tokens + piece.tokens
            if taken and (items > max_items or tokens > max_tokens or piece.alone):
                break
            if self._clock is not None:
                self._clock.serve(self._tenants[piece.tenant], piece.tokens)
            self.leave(piece)
            taken.append(piece)
            if piece.alone:
                break
        return taken

    def _new_tenant(self, piece: Piece) -> _TenantShare:
        if self._tenants and self._clock is None:
            self._clock = FairClock()
            [only] = self._tenants.values()
            self._begin(only, self._clock)
        if len(self._tenants) >= self._most_tenants:
            self._tenants = {each: tenant for each, tenant in self._tenants.items() if tenant.pieces}
            self._most_tenants = max(_MOST_TENANTS, 2 * len(self._tenants))  # else each new one would look at all
        tenant = self._tenants[piece.tenant] = _TenantShare(piece.weight)
        return tenant

    def _begin(self, tenant: _TenantShare, clock: FairClock) -> None:
        weight = next(iter(tenant.pieces)).weight
        if tenant.weight != weight:
            clock.weigh(tenant, weight)
        clock.wake(tenant)
        clock.waiting.join(tenant, next(self._numbers), tenant)


_RATE_SECONDS = 0.1  # over which arrivals are averaged
_LOOK_SECONDS = 0.001
_EARLY_SECONDS = 0.0005  # by which a timer may come
_TRUST_GAIN = 0.5
_TRUST_REGROWS = 0.01


class BatchReason(StrEnum):
    """Why a batch was sent just then."""

    IDLE = "idle"  # nothing of its kind was in flight
    SLOT = "slot"  # fewer than wanted were in flight, and nothing was to be gained by waiting
    FULL = "full"  # its limit of items or tokens was reached, or no other piece may share it
    DELAY = "delay"  # its oldest piece had waited for the longest time allowed


class BatchKey(NamedTuple):
    """What requests must have in common to share a batch. `quarantined`: their clients spoiled a batch lately."""

    model: str
    template: bytes
    are_ids: bool = False
    isolation: str = ""
    batch: bool = False
    bulk: bool = False
    quarantined: bool = False


class SentBatch:
    """A batch in flight. `record`: its own, from when it is sent; never of a request that its client's task sends."""

    def __init__(self, pending: "PendingBatch", pieces: list[Piece], sent_seconds: float) -> None:
        self.pending = pending
        self.key = pending.key
        self.pieces = pieces
        self.items = sum([piece.items for piece in pieces])
        self.size_bytes = sum([piece.size_bytes for piece in pieces])
        self.sent_seconds = sent_seconds
        self.clients = len(pieces)  # that still wait
        self.record: Record | None = None
        self.task: asyncio.Task[None] | None = None  # that sends it; None = a client's task does


class BatchKind(Protocol):
    """What is batched: inputs or documents. `work` is its name in errors."""

    work: str

    def observe(self, batch: SentBatch, reason: BatchReason) -> None:
        """Count a batch that is sent."""

    async def answer(self, batch: SentBatch) -> BufferedResponse | None:
        """Send a batch and hand out its answer; else what a backend says if it refuses the content."""


@dataclass
class BulkSlots:
    """The slots of one model that long lists have taken."""

    items: int = 0
    _last: "PendingBatch | None" = None

    def left(self, pending: "PendingBatch", waiting: "Iterable[PendingBatch]") -> float:
        """Slots that a batch may take now; any number if none is taken. The last taker leaves some to the others."""
        if not self.items:
            return math.inf
        others = 0
        if self._last is pending:
            others = max((each.next_items for each in waiting if each is not pending), default=0)
        return pending.sizes.bulk_share - self.items - others

    def take(self, pending: "PendingBatch", items: int) -> None:
        self.items += items
        self._last = pending

    def give_back(self, items: int) -> None:
        self.items -= items


@dataclass(eq=False, repr=False)
class PendingBatch:
    """Pieces that may share a batch and wait for the next one. `look` is called to send what is due."""

    key: BatchKey
    kind: BatchKind
    sizes: ModelSizes
    config: EmbeddingsConfig
    look: "Callable[[PendingBatch], None]"
    in_flight: int = 0
    queue: FairQueue = field(default_factory=FairQueue)
    _soon: asyncio.Handle | None = None
    _timer: asyncio.TimerHandle | None = None
    _rate_sum: float = 0.0
    _at: float = -math.inf
    _held: tuple[float, int] | None = None  # since when a free slot is held, with how many items then
    _trust: float = 1.0  # how far holding a slot has saved what was expected of it

    @property
    def is_idle(self) -> bool:
        """Nothing waits or is in flight, and no look is planned."""
        return not self.queue and not self.in_flight and self._soon is None

    @property
    def next_items(self) -> int:
        """Items of the piece that the next batch begins with; 0 = none waits."""
        return self.queue.head.items if self.queue else 0

    @property
    def _max_items(self) -> int:
        return min(self.sizes.most_items(self.config.max_batch_items), self.sizes.limit)

    def join(self, piece: Piece) -> None:
        now = piece.joined_seconds
        self._rate_sum = self._rate_sum * math.exp((self._at - now) / _RATE_SECONDS) + piece.items
        self._at = now
        self.queue.join(piece)

    def look_soon(self) -> None:
        """Look at the end of this turn of the loop, once for all requests of the turn."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self.look, self)

    def look_later(self, now: float) -> None:
        """Look again when `due` may change without an event."""
        if self.queue:
            delay = self.config.max_delay_seconds
            left = self.queue.oldest_seconds + delay - now
            seconds = left if left > _EARLY_SECONDS else max(_LOOK_SECONDS, delay)
            self._timer = asyncio.get_running_loop().call_later(seconds, self.look_soon)

    def looked(self) -> None:
        """Cancel the next look: this is one."""
        self._soon = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def due(self, now: float, *, crowded: bool) -> BatchReason | None:
        """The reason to send a batch now; None = keep waiting. `crowded`: on the backends it would wait, too."""
        queue, config = self.queue, self.config
        if not queue:
            self._held = None
            return None
        if queue.items >= self._max_items or queue.tokens >= config.max_batch_tokens or queue.head.alone:
            return BatchReason.FULL
        if not self.in_flight:
            return BatchReason.IDLE
        if crowded:
            return None
        if now - queue.oldest_seconds >= config.max_delay_seconds - _EARLY_SECONDS:
            return BatchReason.DELAY
        if self.in_flight >= self.sizes.slots or self._is_worth_holding(now):
            return None
        return BatchReason.SLOT

    def take(self, now: float, max_items: float = math.inf) -> SentBatch:
        """The batch that is due; it is in flight until `ended`."""
        self._judge_hold(now)
        self.in_flight += 1
        return SentBatch(self, self.queue.take(min(max_items, self._max_items), self.config.max_batch_tokens), now)

    def ended(self) -> None:
        self.in_flight -= 1

    def _is_worth_holding(self, now: float) -> bool:
        """Whether requests expected meanwhile save more overhead than the delay costs those that wait."""
        rate = self._rate_sum * math.exp((self._at - now) / _RATE_SECONDS) / _RATE_SECONDS
        expected, items = rate * self.sizes.overhead_seconds, self.queue.items
        if expected * self._trust > items:
            if self._held is None:
                self._held = (now, items)
            return True
        if expected > items:
            self._trust = min(1.0, self._trust + _TRUST_REGROWS)
        return False

    def _judge_hold(self, now: float) -> None:
        """Learn what holding saved: clients that send again when answered arrive often, but none arrives meanwhile."""
        if self._held is None:
            return
        (since, items), self._held = self._held, None
        imposed, saved = items * (now - since), (self.queue.items - items) * self.sizes.overhead_seconds
        if imposed > 0:
            self._trust += _TRUST_GAIN * (min(1.0, max(0.0, saved / imposed)) - self._trust)
