"""The costs of all waiting requests on all engines at once: `cost.placement_seconds`, vectorised.

Looking through the line binds some requests and lets others hold out; either makes one engine dearer for all that come
after. So each request's best engine is worked out once, and again only if that engine has become dearer since.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.routing.cost import CostModel
from gateway.routing.seat import Seat

Floats = npt.NDArray[np.float64]
Hit = npt.NDArray[np.int64]  # predicted hit tokens of one request, for each engine

_TIE = 1e-9  # seconds that a rank in quietness is worth: it decides between equal costs only
_INFINITE = float("inf")


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
    ) -> None:
        self._model = model
        self._seats = seats
        self._now = now
        self._prompt: Floats = np.array(prompt_tokens, dtype=np.float64)
        self._output: Floats = np.array(output_tokens, dtype=np.float64)
        hit = np.array(hits, dtype=np.float64).reshape(len(prompt_tokens), len(seats))
        ahead = np.array([seat.load.prefill_ahead_seconds(now) for seat in seats])  # first: it may change loads
        columns = np.array([seat.terms(model) for seat in seats], dtype=np.float64).T
        prompt = self._prompt[:, None]
        uncached = prompt - np.minimum(hit, prompt - 1)
        self._prefill_seconds: Floats = columns[0] * uncached * (model.b + model.e * (prompt - uncached / 2))
        self._chunks: Floats = np.ceil(uncached / model.max_batched_tokens)
        quietness = sorted(range(len(seats)), key=lambda at: (seats[at].load.in_flight, seats[at].placed))
        ahead[quietness] += _TIE * np.arange(len(seats))
        self._mean_batch = sum([seat.load.in_flight for seat in seats]) / max(1, len(seats))
        self.cost: Floats = self._cost(
            columns, self._prefill_seconds, self._chunks, prompt, self._output[:, None], ahead
        )
        self._held = [0.0] * len(seats)
        self._best: list[int] = self.cost.argmin(axis=1).tolist()
        self._dearer_since = [0] * len(seats)
        self._cheaper_since = 0
        self._looked = [0] * len(prompt_tokens)
        self._changes = 0

    def best(self, row: int) -> int | None:
        """The cheapest engine for a request; None if all are closed to it."""
        column = self._best[row]
        if max(self._dearer_since[column], self._cheaper_since) > self._looked[row]:
            column = self._best[row] = int(self.cost[row].argmin())
            self._looked[row] = self._changes
        return column if self.cost[row, column] < _INFINITE else None

    def by_cost(self, row: int) -> list[int]:
        """The engines that are not closed to a request, cheapest first."""
        costs = self.cost[row]
        return [column for column in np.argsort(costs, kind="stable").tolist() if costs[column] < _INFINITE]

    def prefill(self, row: int, column: int) -> float:
        """Seconds of the request's own prefill there."""
        return float(self._prefill_seconds[row, column])

    def hold_out(self, row: int, column: int) -> None:
        """A request waits for this engine: its prefill counts there for all that come after."""
        seconds = float(self._prefill_seconds[row, column])
        self._held[column] += seconds
        self.cost[row + 1 :, column] += seconds
        self._is_dearer(column)

    def bound(self, column: int) -> None:
        """A request was bound to this engine, whose load has changed."""
        seat, at = self._seats[column], column
        ahead = seat.load.prefill_ahead_seconds(self._now) + self._held[at]
        terms = np.array(seat.terms(self._model), dtype=np.float64)
        before = self.cost[:, at]
        after = self._cost(terms, self._prefill_seconds[:, at], self._chunks[:, at], self._prompt, self._output, ahead)
        after[np.isinf(before)] = _INFINITE
        self._is_dearer(column)
        if (after < before).any():  # more context means that more of a small KV cache comes free with each answer
            self._cheaper_since = self._changes
        self.cost[:, at] = after

    def close(self, column: int, row: int | None = None) -> None:
        """Nobody more is bound there; or not this request."""
        if row is None:
            self.cost[:, column] = _INFINITE
        else:
            self.cost[row, column] = _INFINITE
        self._is_dearer(column)

    def _is_dearer(self, column: int) -> None:
        self._changes += 1
        self._dearer_since[column] = self._changes

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
