"""When a batch is sent, and what is in it.

While few batches are in flight, what waits goes at once; otherwise the next one gathers until one of them ends, it is
full, or its oldest piece has waited long enough. Short requests and long lists have batches of their own, so that short
ones never wait behind long ones.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from gateway.embeddings.fair_queue import FairQueue, Piece
from gateway.embeddings.sizes import ModelSizes
from gateway.embeddings.waiter import Waiter

_RATE_SECONDS = 0.1  # over which arrivals are averaged
_LOOK_SECONDS = 0.001
_EARLY_SECONDS = 0.0005  # by which a timer may come
_TRUST_GAIN = 0.5
_TRUST_REGROWS = 0.01


class BatchReason(StrEnum):
    """Why a batch was sent just then."""

    IDLE = "idle"  # nothing of its kind was in flight
    SLOT = "slot"  # fewer than wanted were in flight, and nothing was to be gained by waiting
    FULL = "full"  # its limit of items or tokens was reached
    DELAY = "delay"  # its oldest piece had waited for the longest time allowed


@dataclass(frozen=True, slots=True)
class BatchRules:
    """Limits of one batch, and what decides when it is sent.

    `slots`: batches that are wanted in flight at once. `overhead_seconds`: what a batch takes whatever its size.
    `crowded`: requests wait for a place on the backends already, so that a batch sent now would only wait there.
    """

    items: int
    tokens: int
    max_delay_seconds: float
    slots: int = 1
    overhead_seconds: float = 0.0
    crowded: bool = False


class BatchKey(NamedTuple):
    """What requests must have in common to share a batch. `quarantined`: their clients spoiled a batch lately."""

    model: str
    template: bytes
    are_ids: bool
    isolation: str
    batch: bool
    bulk: bool = False
    quarantined: bool = False


@dataclass(slots=True, eq=False)
class SentBatch:
    """A batch in flight."""

    pending: "PendingBatch"
    pieces: list[Piece[Waiter]]

    @property
    def key(self) -> BatchKey:
        return self.pending.key

    @property
    def sizes(self) -> ModelSizes:
        return self.pending.sizes

    @property
    def items(self) -> int:
        return sum(piece.items for piece in self.pieces)

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)


class PendingBatch:
    """Pieces that may share a batch and wait for the next one, and how many batches of them are in flight.

    `look` is called to send what is due.
    """

    def __init__(self, key: BatchKey, sizes: ModelSizes, look: "Callable[[PendingBatch], None]") -> None:
        self.key = key
        self.sizes = sizes
        self.queue: FairQueue[Waiter] = FairQueue()
        self.in_flight = 0
        self._look = look
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._rate_sum = 0.0
        self._at = -math.inf
        self._held: tuple[float, int] | None = None  # since when a free slot is held, with how many items then
        self._trust = 1.0  # how far holding a slot has saved what was expected of it

    def __repr__(self) -> str:
        return f"<PendingBatch {self.key.model} {self.queue!r}, {self.in_flight} in flight>"

    @property
    def is_idle(self) -> bool:
        """Nothing waits or is in flight, and no look is planned."""
        return not len(self.queue) and not self.in_flight and self._soon is None

    def join(self, piece: Piece[Waiter]) -> None:
        now = piece.joined_seconds
        self._rate_sum = self._rate_sum * math.exp((self._at - now) / _RATE_SECONDS) + piece.items
        self._at = now
        self.queue.join(piece)

    def look_soon(self) -> None:
        """Look at the end of this turn of the loop, once for all requests of the turn."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._look, self)

    def look_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self.look_soon)

    def looked(self) -> None:
        """Cancel the next look: this is one."""
        self._soon = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def makes_wait(self, *, crowded: bool) -> bool:
        """Whether a new request may have to wait for batches in flight."""
        is_behind = self.key.bulk and (len(self.queue) > 0 or not self.sizes.bulk.may_take(1, self.sizes.bulk_share))
        return crowded or is_behind or self.in_flight >= self.sizes.slots

    def has_slots(self) -> bool:
        """Whether the next batch may be sent: long lists leave some of the backends' slots to short ones."""
        return not self.key.bulk or self.sizes.bulk.may_take(self.queue.next_items, self.sizes.bulk_share)

    def due(self, now: float, rules: BatchRules) -> BatchReason | None:
        """The reason to send a batch now; None = keep waiting."""
        queue = self.queue
        if not len(queue):
            self._held = None
            return None
        if queue.items >= rules.items or queue.tokens >= rules.tokens:
            return BatchReason.FULL
        if not self.in_flight:
            return BatchReason.IDLE
        waited = now - queue.oldest_seconds
        if rules.crowded:
            return None
        if waited >= rules.max_delay_seconds - _EARLY_SECONDS:
            return BatchReason.DELAY
        if self.in_flight >= rules.slots or self._is_worth_holding(now, rules.overhead_seconds):
            return None
        return BatchReason.SLOT

    def next_look_seconds(self, now: float, max_delay_seconds: float) -> float | None:
        """The time until `due` may change without an event; None = never."""
        if not len(self.queue):
            return None
        left = self.queue.oldest_seconds + max_delay_seconds - now
        return left if left > _EARLY_SECONDS else max(_LOOK_SECONDS, max_delay_seconds)

    def take(self, now: float, rules: BatchRules) -> SentBatch:
        """The batch that is due; it is in flight until `ended`."""
        self._judge_hold(now, rules.overhead_seconds)
        self.in_flight += 1
        bulk, max_items = self.sizes.bulk, rules.items
        if self.key.bulk and (left := bulk.left(self.sizes.bulk_share)) is not None:
            max_items = min(max_items, left)
        batch = SentBatch(self, self.queue.take(max_items, rules.tokens))
        if self.key.bulk:
            bulk.take(batch.items)
        return batch

    def ended(self, batch: SentBatch) -> None:
        """A batch is over, however it ended."""
        self.in_flight -= 1
        if self.key.bulk:
            self.sizes.bulk.give_back(batch.items)

    def _is_worth_holding(self, now: float, overhead_seconds: float) -> bool:
        """Whether requests expected meanwhile save more overhead than the delay costs those that wait."""
        rate = self._rate_sum * math.exp((self._at - now) / _RATE_SECONDS) / _RATE_SECONDS
        expected, items = rate * overhead_seconds, self.queue.items
        if expected * self._trust > items:
            if self._held is None:
                self._held = (now, items)
            return True
        if expected > items:
            self._trust = min(1.0, self._trust + _TRUST_REGROWS)
        return False

    def _judge_hold(self, now: float, overhead_seconds: float) -> None:
        """Learn what holding saved: clients that send again when answered arrive often, but none arrives meanwhile."""
        if self._held is None:
            return
        (since, items), self._held = self._held, None
        imposed, saved = items * (now - since), (self.queue.items - items) * overhead_seconds
        if imposed > 0:
            self._trust += _TRUST_GAIN * (min(1.0, max(0.0, saved / imposed)) - self._trust)
