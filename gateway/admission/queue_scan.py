"""One look through the waiting line: who is bound where, and who holds out for the best.

Cheapest prefill first, aged by waiting. A request is bound if its own best engine is open, and holds out for it
otherwise, while others overtake. Nobody waits longer than `starvation_seconds` for the best: then any engine will do,
and if none has room, the emptiest takes nothing else until it has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gateway.admission.capacity import Capacity
from gateway.admission.ticket import Ticket
from gateway.routing.ranking import Ranking
from gateway.routing.seat import Seat


@dataclass(slots=True)
class QueueScan:
    """A pass over tickets in fair order; `is_open` has a flag for each seat, kept up to date.

    `bind` is told of ticket, seat, and seconds of prefill there. `has_much` tells from whom the last slots are kept;
    None = from nobody, or `all_guarded` = from everybody.
    """

    seats: Sequence[Seat]
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
        """Look at each ticket once."""
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
        elif self.room.admits(self.seats[column], ticket.ask, now, guarded=guarded):
            self._bind(row, ticket, column, now)
        # else it is too large for what is free there, which whoever fits may take

    def _take_any(self, row: int, ticket: Ticket, now: float, *, starving: bool) -> None:
        columns, guarded = self.ranking.by_cost(row), self._is_guarded(ticket)
        if guarded:
            columns = [column for column in columns if column not in self._kept]
        for column in columns:
            if self.room.admits(self.seats[column], ticket.ask, now, guarded=guarded):
                self._bind(row, ticket, column, now)
                return
        if starving and columns:
            seats = [self.seats[column] for column in columns]
            column = columns[seats.index(self.room.emptiest(ticket.ask, seats))]
            if guarded and not self.all_guarded:
                self._kept.add(column)
            else:
                self.ranking.close(column)
                self.is_open[column] = False

    def _is_guarded(self, ticket: Ticket) -> bool:
        return self.all_guarded or (self.has_much is not None and self.has_much(ticket))

    def _is_open_to_guarded(self, ticket: Ticket, column: int, now: float) -> bool:
        seat = self.seats[column]
        return column not in self._kept and self.room.is_open(seat, ticket.ask.model, now, guarded=True)

    def _bind(self, row: int, ticket: Ticket, column: int, now: float) -> None:
        self.bind(ticket, column, self.ranking.prefill(row, column))
        self.ranking.bound(column)
        self.is_open[column] = self.room.is_open(self.seats[column], ticket.ask.model, now, guarded=self.all_guarded)
