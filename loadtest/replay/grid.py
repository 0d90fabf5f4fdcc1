"""Every policy in every scenario, over several processes."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

from loadtest.replay.capacity import find_capacity
from loadtest.replay.run import replay
from loadtest.replay.scenario import Scenario
from loadtest.replay.summary import Figures
from loadtest.replay.trace import Trace

_COLLECTED_AFTER = (100_000, 50, 50)  # a trace is many objects and no garbage: looking for it took a fifth of the time


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay to be made. `load` is the share of capacity that the scenario's rate stands for."""

    load: float
    scenario: Scenario
    policy: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """A cell and what it came to."""

    cell: Cell
    figures: Figures


class Workers:
    """Processes that replay; with one job, this process. Use it in a `with` block."""

    def __init__(self, trace: Trace, jobs: int) -> None:
        self._trace = trace
        self._pool = None
        if jobs > 1:
            self._pool = ProcessPoolExecutor(jobs, get_context("spawn"), gc.set_threshold, _COLLECTED_AFTER)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def capacities(self, scenarios: Sequence[Scenario]) -> Iterator[float]:
        """The capacity of each, in order."""
        if self._pool is None:
            return (find_capacity(self._trace, scenario) for scenario in scenarios)
        return self._pool.map(find_capacity, [self._trace] * len(scenarios), scenarios)

    def outcomes(self, cells: Sequence[Cell]) -> Iterator[Outcome]:
        if self._pool is None:
            yield from (_outcome(self._trace, cell) for cell in cells)
            return
        for done in as_completed([self._pool.submit(_outcome, self._trace, cell) for cell in cells]):
            yield done.result()


def _outcome(trace: Trace, cell: Cell) -> Outcome:
    return Outcome(cell, replay(trace, cell.scenario, cell.policy))
