"""The order of engines for each of many waiting requests, while some are bound and others hold out."""

from collections.abc import Callable, Sequence
from typing import Protocol

from gateway.request import Ask
from gateway.routing.seat import Option, Seat


class Ranking(Protocol):
    """Rows are requests, columns are engines."""

    def best(self, row: int) -> int | None:
        """The best engine for a request; None if all are closed to it."""

    def skip(self, row: int, is_open: Sequence[bool]) -> int:
        """The first request from `row` on to look at; those before it hold out for their best."""

    def by_cost(self, row: int) -> Sequence[int]:
        """The engines that are not closed to a request, best first."""

    def prefill(self, row: int, column: int) -> float:
        """Seconds of the request's own prefill there."""

    def hold_out(self, row: int, column: int) -> None:
        """The request waits for this engine, which all that come after have to reckon with."""

    def bound(self, column: int) -> None:
        """A request was bound to this engine, whose load has changed."""

    def close(self, column: int, row: int | None = None) -> None:
        """Nobody more is bound there; or not this request."""


class OneByOne:
    """The ranking of a policy that looks at one request at a time."""

    def __init__(
        self, asks: Sequence[Ask], seats: Sequence[Seat], options: Callable[[Ask, Sequence[Seat]], list[Option]]
    ) -> None:
        self._asks = asks
        self._seats = seats
        self._options = options
        self._closed: set[tuple[int | None, int]] = set()

    def best(self, row: int) -> int | None:
        """The cheapest."""
        order = self.by_cost(row)
        return order[0] if order else None

    def skip(self, row: int, is_open: Sequence[bool]) -> int:  # noqa: ARG002
        """Each is looked at."""
        return row

    def by_cost(self, row: int) -> list[int]:
        """Cheapest first, then quietest."""
        options = self._options(self._asks[row], self._seats)

        def rank(column: int) -> tuple[float, int, int]:
            return options[column].cost, self._seats[column].load.in_flight, self._seats[column].placed

        places = [at for at in range(len(options)) if not self._closed & {(None, at), (row, at)}]
        return sorted(places, key=rank)

    def prefill(self, row: int, column: int) -> float:  # noqa: ARG002
        """Not known to these policies."""
        return 0.0

    def hold_out(self, row: int, column: int) -> None:
        """Nobody holds out under these policies."""

    def bound(self, column: int) -> None:
        """Loads are read anew each time."""

    def close(self, column: int, row: int | None = None) -> None:
        """Leave it out."""
        self._closed.add((row, column))
