"""One look through the waiting line: who is bound where, and who holds out for the best.

Cheapest prefill first, aged by waiting. A request is bound if its own best engine is open, and holds out for it
otherwise, while others overtake. Nobody waits longer than `starvation_seconds` for the best: then any engine will do,
and if none has room, the emptiest takes nothing else until it has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.admission.queue import Ticket
from gateway.admission.room import Room
from gateway.routing.ranking import Ranking
from gateway.routing.seat import Seat


@dataclass(slots=True)
class Drain:
    """A pass over tickets in order of their turn; `is_open` has a flag for each seat, kept up to date.

    `bind` is told of ticket, seat, and seconds of prefill there.
    """

    seats: Sequence[Seat]
    ranking: Ranking
    is_open: list[bool]
    room: Room
    starvation_seconds: float
    waits_for_best: bool
    bind: Callable[[Ticket, int, float], None]

    def run(self, tickets: Sequence[Ticket], now: float) -> None:
        """Look at each ticket once."""
        row, skipped = 0, False
        while row < len(tickets):
            ticket = tickets[row]
            starving = now - ticket.arrived_seconds > self.starvation_seconds
            if starving or not self.waits_for_best:
                self._take_any(row, ticket, now, starving=starving)
            elif not any(self.is_open):
                return  # those who starve come first in the line
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
        if not self.is_open[column]:
            self.ranking.hold_out(row, column)
        elif self.room.admits(self.seats[column], ticket.ask, now):
            self._bind(row, ticket, column, now)
        # else it is too large for what is free there, which whoever fits may take

    def _take_any(self, row: int, ticket: Ticket, now: float, *, starving: bool) -> None:
        columns = self.ranking.by_cost(row)
        for column in columns:
            if self.room.admits(self.seats[column], ticket.ask, now):
                self._bind(row, ticket, column, now)
                return
        if starving and columns:
            seats = [self.seats[column] for column in columns]
            column = columns[seats.index(self.room.emptiest(ticket.ask, seats))]
            self.ranking.close(column)
            self.is_open[column] = False

    def _bind(self, row: int, ticket: Ticket, column: int, now: float) -> None:
        self.bind(ticket, column, self.ranking.prefill(row, column))
        self.ranking.bound(column)
        self.is_open[column] = self.room.is_open(self.seats[column], now)
