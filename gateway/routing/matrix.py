"""The costs of all waiting requests on all engines at once: `cost.placement_seconds`, vectorised.

Looking through the line binds some requests and lets others hold out; either makes one engine dearer for all that come
after. Long runs of requests that hold out are found at once (`skip`).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.routing.cost import CostModel
from gateway.routing.seat import Seat

Floats = npt.NDArray[np.float64]
Hit = npt.NDArray[np.int64]  # predicted hit tokens of one request, for each engine

_TIE = 1e-9  # seconds that a sequence in flight is worth: it decides between equal costs only
_FINE_TIE = 1e-14  # the same for a request that was placed there before
_INFINITE = float("inf")
_ROUNDS = 4
_MOST_ROWS = 64  # weighed against one another at once


@lru_cache(maxsize=256)
def _before(rows: int) -> Floats:
    """What sums, for each row, all rows before it."""
    return np.tri(rows, k=-1)


class TermsTable:
    """The terms of a fleet's engines as an array, of which only those are made anew whose load has changed."""

    def __init__(self) -> None:
        self._seats: Sequence[Seat] = ()
        self._model: CostModel | None = None
        self._changes: list[int] = []
        self._array: Floats = np.zeros((0, 0))

    def columns(self, seats: Sequence[Seat], model: CostModel) -> Floats:
        """A row for each term, a column for each engine. Good until the next call.

        Engines whose sizes have changed come in another list.
        """
        changes = [seat.load.changes for seat in seats]
        if seats is not self._seats or model is not self._model:
            self._seats, self._model = seats, model
            self._array = np.array([seat.terms(model) for seat in seats], dtype=np.float64).T.copy()
        elif changes != self._changes:
            for at, seat in enumerate(seats):
                if changes[at] != self._changes[at]:
                    self._array[:, at] = seat.terms(model)
        self._changes = changes
        return self._array


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
        table: TermsTable | None = None,
    ) -> None:
        self._model = model
        self._seats = seats
        self._now = now
        self._prompt: Floats = np.array(prompt_tokens, dtype=np.float64)
        self._output: Floats = np.array(output_tokens, dtype=np.float64)
        prompt, shape = self._prompt[:, None], (len(prompt_tokens), len(seats))
        hit = np.concatenate(hits).reshape(shape) if hits else np.zeros(shape)
        loads = [seat.load for seat in seats]
        # First: it may change loads.
        ahead = np.array([seat.ahead_seconds(model, now) for seat in seats])
        columns = (table or TermsTable()).columns(seats, model)
        uncached = prompt - np.minimum(hit, prompt - 1)
        self._prefill_seconds: Floats = columns[0] * uncached * (model.b + model.e * (prompt - uncached / 2))
        self._chunks: Floats = np.ceil(uncached / model.max_batched_tokens)
        in_flight: Floats = np.array([load.in_flight for load in loads], dtype=np.float64)
        placed: Floats = np.array([seat.placed for seat in seats], dtype=np.float64)
        ahead += _TIE * in_flight + _FINE_TIE * (placed - placed.min())
        self._mean_batch = float(in_flight.mean())
        self.cost: Floats = self._cost(
            columns, self._prefill_seconds, self._chunks, prompt, self._output[:, None], ahead
        )
        self._held: Floats = np.zeros(len(seats))  # seconds of prefill that others hold out for

    def best(self, row: int) -> int | None:
        """The cheapest engine for a request; None if all are closed to it."""
        column = int((self.cost[row] + self._held).argmin())
        return column if self.cost[row, column] < _INFINITE else None

    def skip(self, row: int, is_open: Sequence[bool]) -> int:
        """The first request from `row` on that may be bound, after letting those before it hold out for their best.

        First all are taken to hold out for what is best for them now; then for what is best with that counted; and so
        on, which is right for some more of them each time.
        """
        count = _MOST_ROWS
        while count == _MOST_ROWS and row < len(self.cost):
            count = self._skip_some(self.cost[row : row + _MOST_ROWS] + self._held, row, is_open)
            row += count
        return row

    def _skip_some(self, cost: Floats, row: int, is_open: Sequence[bool]) -> int:
        rows, prefill, opens = np.arange(len(cost)), self._prefill_seconds[row : row + len(cost)], np.array(is_open)
        count, best = 0, cost.argmin(axis=1)
        for _ in range(_ROUNDS):
            holds = np.zeros_like(cost)
            holds[rows, best] = prefill[rows, best]
            held = _before(len(best)) @ holds
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
        seat, at = self._seats[column], column
        ahead = seat.ahead_seconds(self._model, self._now)
        closed = np.isinf(self.cost[:, at])
        self.cost[:, at] = self._cost(
            seat.terms(self._model), self._prefill_seconds[:, at], self._chunks[:, at], self._prompt, self._output,
            ahead,
        )  # fmt: skip
        self.cost[closed, at] = _INFINITE

    def close(self, column: int, row: int | None = None) -> None:
        """Nobody more is bound there; or not this request."""
        if row is None:
            self.cost[:, column] = _INFINITE
        else:
            self.cost[row, column] = _INFINITE

    def _cost(self, terms: Any, own: Floats, chunks: Floats, prompt: Floats, output: Floats, ahead: Any) -> Floats:
        _, step, waits, stall, by_mean, slowdown, by_prompt, slot, room, room_by_output, room_rate = terms
        cost: Floats = own * (stall + by_mean * self._mean_batch)
        cost += step * chunks
        cost += output * (slowdown + slot + by_prompt * prompt)
        cost += ahead + waits
        lacking = prompt - room + output * room_by_output
        if lacking.max(initial=0.0) > 0:
            cost += output * room_rate * np.maximum(lacking, 0.0)
        return cost
