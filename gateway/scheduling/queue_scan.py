"""One scan of the queue: which request is bound where, and which keeps waiting for its best engine.

Cheapest prefill first, aged by waiting. A request is bound if its own best engine has capacity, and keeps waiting for
it otherwise, while others overtake. After `starvation_seconds` any engine will do; if none has capacity, the emptiest
takes nothing else until it has. Predicted hits are kept between scans, because caches change slowly.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gateway.request import Ask
from gateway.routing.cost_matrix import Hit, Ranking
from gateway.routing.engine import Engine
from gateway.scheduling.capacity import Capacity
from gateway.scheduling.wait_queue import Ticket


@dataclass(slots=True)
class QueueScan:
    """A pass over tickets in fair order; `is_open` has a flag for each engine, kept up to date.

    `bind` is told of ticket, engine, and seconds of prefill there. `has_much` tells from whom the last slots are kept;
    None = from nobody, or `all_guarded` = from everybody.
    """

    engines: Sequence[Engine]
    ranking: Ranking
    is_open: list[bool]
    room: Capacity
    starvation_seconds: float
    waits_for_best: bool
    bind: Callable[[Ticket, int, float], None]
    has_much: Callable[[Ticket], bool] | None = None
    all_guarded: bool = False
    _kept: set[int] = field(default_factory=set)  # for one that starves, from those from whom the last slots are kept

    def run(self, tickets: Sequence[Ticket], now: float) -> None:
        row, skipped = 0, False
        while row < len(tickets):
            ticket = tickets[row]
            starving = now - ticket.arrived_seconds > self.starvation_seconds
            if starving or not self.waits_for_best:
                self._take_any(row, ticket, now, starving=starving)
            elif not any(self.is_open):
                return
            elif not skipped:
                row, skipped = self.ranking.skip(row, self.is_open), True
                continue
            else:
                self._take_best(row, ticket, now)
            row += 1

    def _take_best(self, row: int, ticket: Ticket, now: float) -> None:
        column = self.ranking.best(row)
        if column is None:
            return
        guarded = self._is_guarded(ticket)
        if not self.is_open[column] or (guarded and not self._is_open_to_guarded(ticket, column, now)):
            self.ranking.hold_out(row, column)
        elif self.room.admits(self.engines[column], ticket.ask, now, guarded=guarded):
            self._bind(row, ticket, column, now)
        # else it is too large for what is free there, which whoever fits may take

    def _take_any(self, row: int, ticket: Ticket, now: float, *, starving: bool) -> None:
        columns, guarded = self.ranking.by_cost(row), self._is_guarded(ticket)
        if guarded:
            columns = [column for column in columns if column not in self._kept]
        for column in columns:
            if self.room.admits(self.engines[column], ticket.ask, now, guarded=guarded):
                self._bind(row, ticket, column, now)
                return
        if starving and columns:
            engines = [self.engines[column] for column in columns]
            column = columns[engines.index(self.room.emptiest(ticket.ask, engines))]
            if guarded and not self.all_guarded:
                self._kept.add(column)
            else:
                self.ranking.close(column)
                self.is_open[column] = False

    def _is_guarded(self, ticket: Ticket) -> bool:
        return self.all_guarded or (self.has_much is not None and self.has_much(ticket))

    def _is_open_to_guarded(self, ticket: Ticket, column: int, now: float) -> bool:
        engine = self.engines[column]
        return column not in self._kept and self.room.is_open(engine, ticket.ask.model, now, guarded=True)

    def _bind(self, row: int, ticket: Ticket, column: int, now: float) -> None:
        self.bind(ticket, column, self.ranking.prefill(row, column))
        self.ranking.bound(column)
        self.is_open[column] = self.room.is_open(self.engines[column], ticket.ask.model, now, guarded=self.all_guarded)


_GOOD_FOR_SECONDS = 1.0  # unless a prompt that begins alike is bound meanwhile
_NEVER = -math.inf


class WaitingHits:
    """Keeps with each ticket what was found; `look` finds the predicted hit tokens of a prompt, for each engine.

    Bindings are kept in two generations of at least a second each: memory is bounded by the rate of bindings,
    whether anybody looks or not.
    """

    def __init__(self, look: Callable[[Ask, Sequence[Engine]], Sequence[int]]) -> None:
        self._look = look
        self._bound: dict[int, float] = {}  # by a prompt's first block: when one that begins so was last bound
        self._bound_before: dict[int, float] = {}  # the generation before
        self._since_seconds = _NEVER  # when the younger generation began

    def __len__(self) -> int:
        return len(self._bound) + len(self._bound_before)

    def bound(self, ask: Ask, now: float) -> None:
        """A prompt is sent to an engine. Of use only while requests wait."""
        if ask.keys:
            if now - self._since_seconds > _GOOD_FOR_SECONDS:
                self._bound_before, self._bound, self._since_seconds = self._bound, {}, now
            self._bound[ask.keys[0]] = now

    def keep(self, ticket: Ticket, hits: Sequence[int], engines: Sequence[Engine], now: float) -> Hit:
        """What was found for a ticket just now."""
        ticket.hits = found = np.array(hits, dtype=np.float64)
        ticket.hits_seconds, ticket.hits_of = now, engines
        return found

    def of(self, tickets: Sequence[Ticket], engines: Sequence[Engine], now: float) -> list[Hit]:
        too_old, bound, before = now - _GOOD_FOR_SECONDS, self._bound, self._bound_before
        return [
            ticket.hits
            if (
                ticket.hits_of is engines
                and ticket.hits_seconds >= too_old
                and ticket.hits_seconds > bound.get(ticket.opening, _NEVER)
                and ticket.hits_seconds > before.get(ticket.opening, _NEVER)
            )
            else self.keep(ticket, self._look(ticket.ask, engines), engines, now)
            for ticket in tickets
        ]
