"""The costs of all waiting requests on all engines at once: `engine.placement_costs`, vectorised.

During a scan of the queue some requests are bound and others keep waiting for an engine; both raise the cost of one
engine for all that follow. Long runs of requests that keep waiting are found at once (`skip`).
"""

from collections.abc import Callable, Sequence
from math import exp
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from gateway.routing.engine import LEAST_SHARE, MEMORY_SECONDS, MOST_SHARE, CostModel, Engine, mean_stall_of

Floats: TypeAlias = npt.NDArray[np.float64]

_TIE = 1e-9  # seconds for each sequence in flight: decides between equal costs only
_FINE_TIE = 1e-14  # the same for each request that was placed there before


class Column(NamedTuple):
    """The `Terms` of one engine; terms with the same factor are added up."""

    by_prompt: float  # for each token of output and of prompt
    waits: float  # constant part, with what decides between equal costs
    by_output: float  # for each token of output
    slowness: float
    step: float
    stall: float
    room_tokens: float
    room_by_output: float
    room_rate: float
    recent: float  # share of the time that went into prefill lately
    interruption: float  # seconds at a recent share of a half


class EngineColumns:
    """The columns of all engines as arrays, and the fleet's `mean_stall`; recomputes engines whose load has changed.

    `of_output` is by_prompt, waits (with the prefill that is ahead now) and by_output; `room` is tokens, by output, and
    rate. They are valid until the next `refresh`.
    """

    def __init__(self) -> None:
        self._engines: Sequence[Engine] = ()
        self._model: CostModel | None = None
        self._seconds = 0.0

    def refresh(self, engines: Sequence[Engine], model: CostModel, now: float) -> "EngineColumns":
        """The same object, up to date. Engines whose sizes have changed count as changed loads."""
        if engines is not self._engines or model is not self._model:
            self._begin(engines, model)
        changes, ahead = self._changes, [0.0] * len(engines)
        self._recent *= exp((self._seconds - now) / MEMORY_SECONDS)
        self._seconds = now
        for at, load in enumerate(self._loads):
            if load.pending:
                ahead[at] = load.prefill_ahead_seconds(now)  # first: it may change the load
            if load.changes != changes[at]:
                changes[at], self._batches[at] = load.changes, load.in_flight
                self._array[:, at] = column_of(engines[at], model, now)
        self.of_output: Floats = self._array[:3].copy()
        share = np.minimum(self._recent, MOST_SHARE)
        self.of_output[1] += ahead + self._interruption * share / (1 - share)
        self.mean_stall = mean_stall_of(model, sum(self._batches), len(engines))
        return self

    def _begin(self, engines: Sequence[Engine], model: CostModel) -> None:
        self._engines, self._model, self._loads = engines, model, [engine.load for engine in engines]
        self._changes, self._batches = [-1] * len(engines), [0] * len(engines)
        self._array: Floats = np.zeros((len(Column._fields), len(engines)))
        _, _, _, self.slowness, self.step, self.stall, *self.room = self._array[:-2]
        self._recent: Floats = self._array[-2]
        self._interruption: Floats = self._array[-1]


def column_of(engine: Engine, model: CostModel, now: float) -> Column:
    """What the engine adds to the cost of every request, without the prefill that is ahead."""
    slowness, step, waits, stall, slowdown, by_prompt, slot, *room, interruption = engine.terms(model)
    load = engine.load
    waits = waits + _TIE * load.in_flight + _FINE_TIE * engine.placed
    recent = load.prefill_share(now) if load.recent_share >= LEAST_SHARE else 0.0
    # no call of Column itself, which takes as long as all else here
    return tuple.__new__(
        Column, (by_prompt, waits, slowdown + slot, slowness, step, stall, *room, recent, interruption)
    )


Hit: TypeAlias = Floats  # predicted hit tokens of one request, for each engine; less than its prompt has

_INFINITE = float("inf")
_ROUNDS = 4
_MOST_ROWS = 64  # compared at once
_ROWS = np.arange(_MOST_ROWS)
_BEFORE = np.tri(_MOST_ROWS, k=-1)  # sums, for each row, all rows before it


class Ranking:
    """The order of engines (columns) for each waiting request (row), by a policy's costs of that request.

    Costs are read anew at each call. Prefills are not predicted, and no request waits for an engine.
    """

    def __init__(self, engines: Sequence[Engine], costs: Callable[[int], list[float]]) -> None:
        self._engines = engines
        self._costs = costs
        self._closed: set[tuple[int | None, int]] = set()

    def by_cost(self, row: int) -> list[int]:
        """The engines that are not closed to a request, cheapest first."""
        costs, engines = self._costs(row), self._engines
        ranks = [(costs[at], engine.load.in_flight, engine.placed, at) for at, engine in enumerate(engines)]
        return [at for *_, at in sorted(ranks) if not self._closed & {(None, at), (row, at)}]

    def best(self, row: int) -> int | None:
        """The cheapest engine for a request; None if all are closed to it."""
        return next(iter(self.by_cost(row)), None)

    def close(self, column: int, row: int | None = None) -> None:
        """Close an engine to one request, or to all."""
        self._closed.add((row, column))

    def skip(self, row: int, is_open: Sequence[bool]) -> int:  # noqa: ARG002
        """The first request from `row` on that may be bound; those before it keep waiting for their best engine."""
        return row

    def prefill(self, row: int, column: int) -> float:  # noqa: ARG002
        """Seconds of the request's own prefill on the engine."""
        return 0.0

    def keep_waiting(self, row: int, column: int) -> None:
        """A request waits for this engine: its prefill counts there for all that come after."""

    def bound(self, column: int) -> None:
        """A request was bound to this engine, whose load has changed."""


class CostMatrix(Ranking):
    """The costs of each request on each engine, in seconds."""

    def __init__(
        self,
        model: CostModel,
        prompt_tokens: Sequence[int],
        output_tokens: Sequence[float],
        hits: Sequence[Hit],
        engines: Sequence[Engine],
        now: float,
        table: EngineColumns | None = None,
    ) -> None:
        self._model = model
        self._engines = engines
        self._now = now
        requests: Floats = np.array((prompt_tokens, output_tokens), dtype=np.float64)
        prompt, output = self._prompt, self._output = requests[0], requests[1]
        self._most_prompt, self._most_output = max(prompt_tokens, default=0), max(output_tokens, default=0.0)
        self._of_requests: Floats = np.empty((3, len(prompt)))
        np.multiply(output, prompt, out=self._of_requests[0])
        self._of_requests[1], self._of_requests[2] = 1.0, output
        columns = (table or EngineColumns()).refresh(engines, model, now)
        shape = (len(prompt), len(engines))
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
        self._discounts: list[tuple[int, int, float]] = []
        self._held: Floats = np.zeros(len(engines))  # seconds of prefill of requests that wait for the engine
        self._stale: list[int] = []

    def best(self, row: int) -> int | None:
        if self._stale:
            self._renew()
        column = int((self.cost[row] + self._held).argmin())
        return column if self.cost[row, column] < _INFINITE else None

    def skip(self, row: int, is_open: Sequence[bool]) -> int:
        """Iterates: first each request is assumed to wait for its best engine now, then for its best engine given what
        those before it wait for, and so on. Each round settles some more of them.
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
            # A request whose best engine is open stays so, whatever those before wait for: the rest is before it.
            at_open = opens[best].argmax()
            if opens[best[at_open]]:
                cost, best = cost[: at_open + 1], best[: at_open + 1]
            rows, holds = _ROWS[: len(best)], np.zeros(cost.shape)
            holds[rows, best] = prefill[rows, best]
            held = _BEFORE[: len(best), : len(best)] @ holds
            then_best = (cost + held).argmin(axis=1)
            # Settled up to the first that changed; nothing matters beyond the first that may be bound.
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
        if self._stale:
            self._renew()
        costs = self.cost[row] + self._held
        known: list[float] = costs.tolist()
        return [column for column in costs.argsort(kind="stable").tolist() if known[column] < _INFINITE]

    def prefill(self, row: int, column: int) -> float:
        return float(self._prefill_seconds[row, column])

    def keep_waiting(self, row: int, column: int) -> None:
        self._held[column] += self._prefill_seconds[row, column]

    def bound(self, column: int) -> None:
        self._stale.append(column)

    def _renew(self) -> None:
        """Recompute the columns of engines to which requests were bound; done late, since it is seldom needed."""
        for column in self._stale:
            engine = self._engines[column]
            ahead = engine.ahead_seconds(self._model, self._now)  # first: it may change the load
            by_prompt, waits, by_output, _, step, stall, *room, _, _ = column_of(engine, self._model, self._now)
            cost = self._cost(column, np.array((by_prompt, waits + ahead, by_output)), step, stall)
            if room[0] - self._most_output * room[1] < self._most_prompt:
                self._add_memory(cost, *room)
            cost[np.isinf(self.cost[:, column])] = _INFINITE
            self.cost[:, column] = cost
            for discount in self._discounts:
                if discount[1] == column:
                    self._discount(*discount)
        self._stale.clear()

    def favour(self, row: int, column: int, share: float) -> None:
        """This engine is cheaper for the request by a share of its prefill there."""
        self._discounts.append((row, column, share))
        self._discount(row, column, share)

    def _discount(self, row: int, column: int, share: float) -> None:
        self.cost[row, column] -= share * self._prefill_seconds[row, column]

    def close(self, column: int, row: int | None = None) -> None:
        if row is None:
            self.cost[:, column] = _INFINITE
        else:
            self.cost[row, column] = _INFINITE

    def _cost(self, columns: slice | int, of_output: Floats, step: Any, stall: Any) -> Floats:
        """Costs on these engines, or one, without the wait for KV cache (`_add_memory`)."""
        cost: Floats = self._prefill_seconds[:, columns] * (stall + self._mean_stall)
        if self._chunks is None:
            of_output[1] += step
        else:
            cost += step * self._chunks[:, columns]
        cost += self._of_requests.T @ of_output
        return cost

    def _add_memory(self, cost: Floats, room: Any, room_by_output: Any, room_rate: Any) -> None:
        """Add the time until enough KV cache is free."""
        lacking = np.add.outer(self._prompt, -room) + np.multiply.outer(self._output, room_by_output)
        np.maximum(lacking, 0.0, out=lacking)
        cost += (self._output * (lacking * room_rate).T).T
