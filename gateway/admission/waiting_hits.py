"""Predicted hits of those who wait. Caches change slowly, so a look is good for a while."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from gateway.admission.ticket import Ticket
from gateway.request import Ask
from gateway.routing.matrix import Hit
from gateway.routing.seat import Seat

_GOOD_FOR_SECONDS = 1.0  # unless a prompt that begins alike is bound meanwhile
_NEVER = -math.inf


class WaitingHits:
    """Keeps with each ticket what was found; `look` finds the predicted hit tokens of a prompt, for each engine.

    Bindings are kept in two generations of at least a second each: memory is bounded by the rate of bindings,
    whether anybody looks or not.
    """

    def __init__(self, look: Callable[[Ask, Sequence[Seat]], Sequence[int]]) -> None:
        self._look = look
        self._bound: dict[int, float] = {}  # by a prompt's first block: when one that begins so was last bound
        self._bound_before: dict[int, float] = {}  # the generation before
        self._since_seconds = _NEVER  # when the younger generation began

    def __len__(self) -> int:
        """Bindings that are kept."""
        return len(self._bound) + len(self._bound_before)

    def bound(self, ask: Ask, now: float) -> None:
        """A prompt is sent to an engine. Of use only while requests wait."""
        if ask.keys:
            if now - self._since_seconds > _GOOD_FOR_SECONDS:
                self._bound_before, self._bound, self._since_seconds = self._bound, {}, now
            self._bound[ask.keys[0]] = now

    def keep(self, ticket: Ticket, hits: Sequence[int], seats: Sequence[Seat], now: float) -> Hit:
        """What was found for a ticket just now."""
        ticket.hits = found = np.array(hits, dtype=np.float64)
        ticket.hits_seconds, ticket.hits_of = now, seats
        return found

    def of(self, tickets: Sequence[Ticket], seats: Sequence[Seat], now: float) -> list[Hit]:
        """For each ticket."""
        too_old, bound, before = now - _GOOD_FOR_SECONDS, self._bound, self._bound_before
        return [
            ticket.hits
            if (
                ticket.hits_of is seats
                and ticket.hits_seconds >= too_old
                and ticket.hits_seconds > bound.get(ticket.opening, _NEVER)
                and ticket.hits_seconds > before.get(ticket.opening, _NEVER)
            )
            else self.keep(ticket, self._look(ticket.ask, seats), seats, now)
            for ticket in tickets
        ]
