"""What the engines of a fleet add to the cost of any request, as arrays with a column for each engine."""

from collections.abc import Sequence
from math import exp
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gateway.routing.cost import CostModel, mean_stall_of
from gateway.routing.load import MEMORY_SECONDS, EngineLoad
from gateway.routing.seat import INTERRUPTED_STEPS, LEAST_SHARE, MOST_SHARE, Seat

Floats = npt.NDArray[np.float64]

_TIE = 1e-9  # seconds that a sequence in flight is worth: it decides between equal costs only
_FINE_TIE = 1e-14  # the same for a request that was placed there before


class Column(NamedTuple):
    """Of one engine: its `Terms`, of which those that are multiplied with the same are one."""

    by_prompt: float  # for each token of output and of prompt
    waits: float  # in any case; it decides between equal costs, too
    by_output: float  # for each token of output
    slowness: float
    step: float
    stall: float
    room_tokens: float
    room_by_output: float
    room_rate: float
    recent: float  # share of the time that went into prefill lately
    interruption: float  # seconds that are worth a recent share of a half


class Columns(NamedTuple):
    """The same of all engines, with what is ahead on each now."""

    of_output: Floats  # by_prompt, waits and by_output
    slowness: Floats
    step: Floats
    stall: Floats
    room: tuple[Floats, Floats, Floats]  # tokens, by output, and rate
    mean_stall: float


class SeatTable:
    """Works out anew only what has changed since the last look."""

    def __init__(self) -> None:
        self._seats: Sequence[Seat] = ()
        self._model: CostModel | None = None
        self._loads: list[EngineLoad] = []
        self._changes: list[int] = []
        self._batches: list[int] = []
        self._array: Floats = np.zeros((0, 0))
        self._rows: tuple[Floats, ...] = ()
        self._seconds = 0.0

    def look(self, seats: Sequence[Seat], model: CostModel, now: float) -> Columns:
        """Good until the next look. Engines whose sizes have changed count as changed loads."""
        if seats is not self._seats or model is not self._model:
            self._begin(seats, model)
        array, changes, ahead = self._array, self._changes, [0.0] * len(seats)
        *_, recent, interruption = rows = self._rows
        recent *= exp((self._seconds - now) / MEMORY_SECONDS)
        self._seconds = now
        for at, load in enumerate(self._loads):
            if load.pending:
                ahead[at] = load.prefill_ahead_seconds(now)  # first: it may change the load
            if load.changes != changes[at]:
                changes[at], self._batches[at] = load.changes, load.in_flight
                array[:, at] = column_of(seats[at], model, now)
        of_output = array[:3].copy()
        share = np.minimum(recent, MOST_SHARE)
        of_output[1] += ahead + interruption * share / (1 - share)
        mean_stall = mean_stall_of(model, sum(self._batches), len(seats))
        return Columns(of_output, rows[3], rows[4], rows[5], (rows[6], rows[7], rows[8]), mean_stall)

    def _begin(self, seats: Sequence[Seat], model: CostModel) -> None:
        self._seats, self._model, self._loads = seats, model, [seat.load for seat in seats]
        self._changes, self._batches = [-1] * len(seats), [0] * len(seats)
        self._array = np.zeros((len(Column._fields), len(seats)))
        self._rows = tuple(self._array)


def column_of(seat: Seat, model: CostModel, now: float) -> Column:
    """What it adds to the cost of every request, but for the prefill that is ahead."""
    slowness, step, waits, stall, slowdown, by_prompt, slot, room, room_by_output, room_rate = seat.terms(model)
    load = seat.load
    made = (  # no call of Column itself, which takes as long as all else here
        by_prompt, waits + _TIE * load.in_flight + _FINE_TIE * seat.placed, slowdown + slot,
        slowness, step, stall, room, room_by_output, room_rate,
        load.prefill_share(now) if load.recent_share >= LEAST_SHARE else 0.0,
        INTERRUPTED_STEPS * model.decode_weight * step,
    )  # fmt: skip
    return tuple.__new__(Column, made)
