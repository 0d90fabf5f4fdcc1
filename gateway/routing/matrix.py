"""The costs of all waiting requests on all engines at once: `cost.placement_seconds`, vectorised.

Looking through the line binds some requests and lets others hold out; either makes one engine dearer for all that come
after. Long runs of requests that hold out are found at once (`skip`).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.routing.cost import CostModel, Terms
from gateway.routing.load import MEMORY_SECONDS
from gateway.routing.seat import INTERRUPTED_STEPS, LEAST_SHARE, MOST_SHARE, Seat

Floats = npt.NDArray[np.float64]
Hit = npt.NDArray[np.float64]  # predicted hit tokens of one request, for each engine

_TIE = 1e-9  # seconds that a sequence in flight is worth: it decides between equal costs only
_FINE_TIE = 1e-14  # the same for a request that was placed there before
_INFINITE = float("inf")
_ROUNDS = 4
_TERMS = len(Terms._fields)
_MOST_ROWS = 64  # weighed against one another at once


@lru_cache(maxsize=256)
def _before(rows: int) -> Floats:
    """What sums, for each row, all rows before it."""
    return np.tri(rows, k=-1)


class SeatTable:
    """A fleet's engines as an array, of which only the columns are made anew whose load has changed."""

    def __init__(self) -> None:
        self._seats: Sequence[Seat] = ()
        self._model: CostModel | None = None
        self._changes: list[int] = []
        self._array: Floats = np.zeros((0, 0))

    def columns(self, seats: Sequence[Seat], model: CostModel) -> Floats:
        """A row for each of `Terms`, then those of `_column`; a column for each engine. Good until the next call.

        Engines whose sizes have changed come in another list.
        """
        changes = [seat.load.changes for seat in seats]
        if seats is not self._seats or model is not self._model:
            self._seats, self._model = seats, model
            self._array = np.array([_column(seat, model) for seat in seats], dtype=np.float64).T.copy()
        elif changes != self._changes:
            for at, seat in enumerate(seats):
                if changes[at] != self._changes[at]:
                    self._array[:, at] = _column(seat, model)
        self._changes = changes
        return self._array


def _column(seat: Seat, model: CostModel) -> tuple[float, ...]:
    load = seat.load
    return (*seat.terms(model), load.in_flight, seat.placed, load.recent_share, load.share_at)


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
        prompt: Floats = np.array(prompt_tokens, dtype=np.float64)
        output: Floats = np.array(output_tokens, dtype=np.float64)
        self._of_requests = np.array((output * prompt, np.ones(len(prompt)), output, prompt)).T
        shape = (len(prompt), len(seats))
        uncached = np.concatenate(hits).reshape(shape) if hits else np.zeros(shape)
        np.minimum(uncached, prompt[:, None] - 1, out=uncached)
        np.subtract(prompt[:, None], uncached, out=uncached)
        ahead = np.array([load.prefill_ahead_seconds(now) if (load := seat.load).pending else 0.0 for seat in seats])
        columns = (table or SeatTable()).columns(seats, model)  # after that: it may change loads
        terms, (in_flight, placed, recent, since) = columns[:_TERMS], columns[_TERMS:]
        share = np.minimum(recent * np.exp((since - now) / MEMORY_SECONDS), MOST_SHARE) * (recent >= LEAST_SHARE)
        ahead += INTERRUPTED_STEPS * model.decode_weight * terms[1] * share / (1 - share)
        ahead += _TIE * in_flight + _FINE_TIE * (placed - placed.min())
        self._prefill_seconds: Floats = uncached * (-0.5 * model.e)
        self._prefill_seconds += (model.b + model.e * prompt)[:, None]
        self._prefill_seconds *= uncached
        self._prefill_seconds *= terms[0]
        self._chunks: Floats | None = None  # engine steps of each prefill, where any takes more than one
        if uncached.max(initial=0.0) > model.max_batched_tokens:
            self._chunks = np.ceil(uncached / model.max_batched_tokens)
        self._mean_batch = float(in_flight.mean())
        self.cost: Floats = self._cost(terms, slice(None), ahead)
        self._favours: list[tuple[int, int, float]] = []
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
        opens, prefill, best = np.array(is_open), self._prefill_seconds[row:], cost.argmin(axis=1)
        count = 0
        for _ in range(_ROUNDS):
            # Whoever is best off at an open engine stays so, whatever those before hold out for: all else is before.
            at_open = opens[best].argmax()
            if opens[best[at_open]]:
                cost, best = cost[: at_open + 1], best[: at_open + 1]
            rows, holds = np.arange(len(best)), np.zeros_like(cost)
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
        seat = self._seats[column]
        ahead = seat.ahead_seconds(self._model, self._now)
        cost = self._cost(seat.terms(self._model), column, ahead)
        cost[np.isinf(self.cost[:, column])] = _INFINITE
        self.cost[:, column] = cost
        for favour in self._favours:
            if favour[1] == column:
                self._discount(*favour)

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

    def _cost(self, terms: Any, columns: slice | int, ahead: Any) -> Floats:
        """`placement_seconds` on these engines, or one. Products of requests and engines are those of matrices."""
        _, step, waits, stall, by_mean, slowdown, by_prompt, slot, room, room_by_output, room_rate = terms
        cost: Floats = self._prefill_seconds[:, columns] * (stall + by_mean * self._mean_batch)
        base = ahead + waits
        if self._chunks is None:
            base = base + step
        else:
            cost += step * self._chunks[:, columns]
        cost += self._of_requests[:, :3] @ np.array((by_prompt, base, slowdown + slot))
        lacking = self._of_requests[:, 1:] @ np.array((-room, room_by_output, 0 * room + 1))
        if lacking.max(initial=0.0) > 0:
            np.maximum(lacking, 0.0, out=lacking)
            lacking *= room_rate
            cost += (self._of_requests[:, 2] * lacking.T).T
        return cost
