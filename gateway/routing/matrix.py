"""The costs of all waiting requests on all engines at once: `cost.placement_seconds`, vectorised.

Looking through the line binds some requests and lets others hold out; either makes one engine dearer for all that come
after. Long runs of requests that hold out are found at once (`skip`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gateway.routing.cost import CostModel
from gateway.routing.seat import Seat
from gateway.routing.seat_table import Floats, SeatTable, column_of

Hit = Floats  # predicted hit tokens of one request, for each engine; less than its prompt has

_INFINITE = float("inf")
_ROUNDS = 4
_MOST_ROWS = 64  # weighed against one another at once
_ROWS = np.arange(_MOST_ROWS)
_BEFORE = np.tri(_MOST_ROWS, k=-1)  # sums, for each row, all rows before it


class CostMatrix:
    """Rows are requests, columns are engines."""

    def __init__(
        self,
        model: CostModel,
        prompt_tokens: Sequence[int],
        output_tokens: Sequence[float],
        hits: Sequence[Hit],
        seats: Sequence[Seat],
        now: float,
        table: SeatTable | None = None,
    ) -> None:
        self._model = model
        self._seats = seats
        self._now = now
        requests: Floats = np.array((prompt_tokens, output_tokens), dtype=np.float64)
        prompt, output = self._prompt, self._output = requests[0], requests[1]
        self._most_prompt, self._most_output = max(prompt_tokens, default=0), max(output_tokens, default=0.0)
        self._of_requests: Floats = np.empty((3, len(prompt)))
        np.multiply(output, prompt, out=self._of_requests[0])
        self._of_requests[1], self._of_requests[2] = 1.0, output
        columns = (table or SeatTable()).look(seats, model, now)
        shape = (len(prompt), len(seats))
        uncached: Floats = np.concatenate(hits).reshape(shape) if hits else np.zeros(shape)
        np.subtract(prompt[:, None], uncached, out=uncached)
        self._prefill_seconds: Floats = uncached * (-0.5 * model.e)
        self._prefill_seconds += (model.b + model.e * prompt)[:, None]
        self._prefill_seconds *= uncached
        self._prefill_seconds *= columns.slowness
        self._chunks: Floats | None = None  # engine steps of each prefill, where any may take more than one
        if self._most_prompt > model.max_batched_tokens:
            uncached /= model.max_batched_tokens
            self._chunks = np.ceil(uncached, out=uncached)
        self._mean_stall = columns.mean_stall
        self.cost: Floats = self._cost(slice(None), columns.of_output, columns.step, columns.stall)
        room, room_by_output, room_rate = columns.room
        if (room - self._most_output * room_by_output).min(initial=_INFINITE) < self._most_prompt:
            self._add_memory(self.cost, room, room_by_output, room_rate)
        self._favours: list[tuple[int, int, float]] = []
        self._held: Floats = np.zeros(len(seats))  # seconds of prefill that others hold out for
        self._stale: list[int] = []

    def best(self, row: int) -> int | None:
        """The cheapest engine for a request; None if all are closed to it."""
        if self._stale:
            self._renew()
        column = int((self.cost[row] + self._held).argmin())
        return column if self.cost[row, column] < _INFINITE else None

    def skip(self, row: int, is_open: Sequence[bool]) -> int:
        """The first request from `row` on that may be bound, after letting those before it hold out for their best.

        First all are taken to hold out for what is best for them now; then for what is best with that counted; and so
        on, which is right for some more of them each time.
        """
        if self._stale:
            self._renew()
        count = _MOST_ROWS
        while count == _MOST_ROWS and row < len(self.cost):
            count = self._skip_some(self.cost[row : row + _MOST_ROWS] + self._held, row, is_open)
            row += count
        return row

    def _skip_some(self, cost: Floats, row: int, is_open: Sequence[bool]) -> int:
        opens, prefill, best = np.array(is_open), self._prefill_seconds[row:], cost.argmin(axis=1)
        count = 0
        for _ in range(_ROUNDS):
            # Whoever is best off at an open engine stays so, whatever those before hold out for: all else is before.
            at_open = opens[best].argmax()
            if opens[best[at_open]]:
                cost, best = cost[: at_open + 1], best[: at_open + 1]
            rows, holds = _ROWS[: len(best)], np.zeros(cost.shape)
            holds[rows, best] = prefill[rows, best]
            held = _BEFORE[: len(best), : len(best)] @ holds
            then_best = (cost + held).argmin(axis=1)
            # Right up to the first that is not as it was taken to be; nothing matters beyond the first that is open.
            is_settled = then_best == best
            matters = opens[then_best] | np.isinf(cost[rows, then_best])
            end = int(matters.argmax()) if matters.any() else len(best)
            count = end if is_settled[:end].all() else int(is_settled.argmin())
            if count == end:
                break
            best = then_best
        if count:
            self._held += held[count - 1] + holds[count - 1]
        return count

    def by_cost(self, row: int) -> list[int]:
        """The engines that are not closed to a request, cheapest first."""
        if self._stale:
            self._renew()
        costs = self.cost[row] + self._held
        return [column for column in np.argsort(costs, kind="stable").tolist() if costs[column] < _INFINITE]

    def prefill(self, row: int, column: int) -> float:
        """Seconds of the request's own prefill there."""
        return float(self._prefill_seconds[row, column])

    def hold_out(self, row: int, column: int) -> None:
        """A request waits for this engine: its prefill counts there for all that come after."""
        self._held[column] += self._prefill_seconds[row, column]

    def bound(self, column: int) -> None:
        """A request was bound to this engine, whose load has changed."""
        self._stale.append(column)

    def _renew(self) -> None:
        """Work out anew what engines cost to which requests were bound. Mostly that is not asked for any more."""
        for column in self._stale:
            seat = self._seats[column]
            ahead = seat.ahead_seconds(self._model, self._now)  # first: it may change the load
            by_prompt, waits, by_output, _, step, stall, *room, _, _ = column_of(seat, self._model, self._now)
            cost = self._cost(column, np.array((by_prompt, waits + ahead, by_output)), step, stall)
            if room[0] - self._most_output * room[1] < self._most_prompt:
                self._add_memory(cost, *room)
            cost[np.isinf(self.cost[:, column])] = _INFINITE
            self.cost[:, column] = cost
            for favour in self._favours:
                if favour[1] == column:
                    self._discount(*favour)
        self._stale.clear()

    def favour(self, row: int, column: int, share: float) -> None:
        """This engine is cheaper for the request by a share of its prefill there."""
        self._favours.append((row, column, share))
        self._discount(row, column, share)

    def _discount(self, row: int, column: int, share: float) -> None:
        self.cost[row, column] -= share * self._prefill_seconds[row, column]

    def close(self, column: int, row: int | None = None) -> None:
        """Nobody more is bound there; or not this request."""
        if row is None:
            self.cost[:, column] = _INFINITE
        else:
            self.cost[row, column] = _INFINITE

    def _cost(self, columns: slice | int, of_output: Floats, step: Any, stall: Any) -> Floats:
        """`placement_seconds` on these engines, or one, but for the time until there is room.

        Products of requests and engines are those of matrices.
        """
        cost: Floats = self._prefill_seconds[:, columns] * (stall + self._mean_stall)
        if self._chunks is None:
            of_output[1] += step
        else:
            cost += step * self._chunks[:, columns]
        cost += self._of_requests.T @ of_output
        return cost

    def _add_memory(self, cost: Floats, room: Any, room_by_output: Any, room_rate: Any) -> None:
        """The time until there is room."""
        lacking = np.add.outer(self._prompt, -room) + np.multiply.outer(self._output, room_by_output)
        np.maximum(lacking, 0.0, out=lacking)
        cost += (self._output * (lacking * room_rate).T).T
