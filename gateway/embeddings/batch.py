"""When a batch is sent. Pure: the time is passed in.

The clock is the batches' own: while few are under way, what waits goes at once; while they are, the next one gathers,
until one of them ends, it is full, or its oldest part has waited for long enough.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from gateway.embeddings.fair import Lane
from gateway.embeddings.part import Part

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
        """A part came."""
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
