"""Replays every policy in every scenario, over several processes, at rates relative to the fleet's capacity.

The capacity is the rate at which a reference router (LMetric, which has no settings) keeps the bounds for nine requests
in ten. A formula of prefill and decode seconds gives a first guess without queues; bisection finds the rate.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import KW_ONLY, asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from loadtest.replay.scenario import EngineFaults, Scenario
from loadtest.replay.simulation import replay
from loadtest.replay.summary import PolicyFigures, Ratios, ratios
from loadtest.workloads.trace import Trace

REFERENCE = "lmetric"
WANTED_GOODPUT = 0.9
_PRECISION = 0.02
_MODEL_VERSION = 1  # of the engine model and the workload: a change makes kept figures void


def ideal_rate(trace: Trace, scenario: Scenario) -> float:
    """Requests per second of engines that are always busy, share work evenly, and never forget a block.

    Steps last as long as the bound on TPOT allows, which gives how much of the time is overhead of steps.
    """
    step, seen, seconds = scenario.step_time, set[int](), 0.0
    for row in trace.rows:
        hit = 0
        for key in row.keys:
            if key not in seen:
                break
            hit += trace.block_tokens
        seen.update(row.keys)
        hit = min(hit, row.prompt_tokens - 1)
        seconds += step.prefill_seconds(row.prompt_tokens - hit, hit)
        seconds += row.output_tokens * step.decode_seconds(1, row.prompt_tokens + row.output_tokens // 2)
    busy = max(0.1, 1 - step.base_seconds / scenario.bounds.tpot_seconds)
    return scenario.engines * busy * len(trace.rows) / seconds


def find_capacity(trace: Trace, scenario: Scenario) -> float:
    """Requests per second that the scenario's engines carry, without faults and with seed 0."""
    scenario = _plain(scenario)

    def keeps(rate: float) -> bool:
        return replay(trace, replace(scenario, rate_per_second=rate), REFERENCE).goodput >= WANTED_GOODPUT

    high = ideal_rate(trace, scenario)
    low = high / 2
    while not keeps(low):
        low, high = low / 2, low
    while keeps(high):
        low, high = high, high * 1.5
    while high / low > 1 + _PRECISION:
        middle = (low * high) ** 0.5
        if keeps(middle):
            low = middle
        else:
            high = middle
    return low


def _plain(scenario: Scenario) -> Scenario:
    return replace(scenario, seed=0, rate_per_second=0.0, faults=EngineFaults())


def kept_in() -> Path:
    """Where capacities are kept between runs."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "loadtest" / "capacities.json"


class Kept:
    """Capacities that were found before; a file that cannot be read or written is no obstacle."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, trace: Trace, scenario: Scenario) -> float | None:
        """The rate, if it is known."""
        return self._read().get(_name(trace, scenario))

    def put(self, trace: Trace, scenario: Scenario, rate: float) -> None:
        known = self._read() | {_name(trace, scenario): rate}
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(known, indent=1, sort_keys=True), encoding="utf-8")

    def _read(self) -> dict[str, float]:
        try:
            known = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}


def _name(trace: Trace, scenario: Scenario) -> str:
    """Of everything that the capacity depends on."""
    digest = hashlib.sha256()
    for row in trace.rows:
        facts = (row.at_seconds, row.prompt_tokens, row.output_tokens, row.think_seconds, row.session, row.keys)
        digest.update(repr(facts).encode())
    plain = _plain(scenario)
    others = [_MODEL_VERSION, trace.block_tokens, asdict(plain), WANTED_GOODPUT]
    digest.update(json.dumps(others, sort_keys=True).encode())
    return f"{trace.name}-{scenario.engines}-{digest.hexdigest()[:16]}"


_COLLECTED_AFTER = (100_000, 50, 50)  # a trace is many objects and no garbage: looking for it took a fifth of the time


@dataclass(frozen=True, slots=True)
class GridCell:
    """One replay to be made. `load` is the share of capacity that the scenario's rate stands for."""

    load: float
    scenario: Scenario
    policy: str


@dataclass(frozen=True, slots=True)
class CellOutcome:
    """A cell and what it came to."""

    cell: GridCell
    figures: PolicyFigures


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

    def outcomes(self, cells: Sequence[GridCell]) -> Iterator[CellOutcome]:
        if self._pool is None:
            yield from (_outcome(self._trace, cell) for cell in cells)
            return
        for done in as_completed([self._pool.submit(_outcome, self._trace, cell) for cell in cells]):
            yield done.result()


def _outcome(trace: Trace, cell: GridCell) -> CellOutcome:
    return CellOutcome(cell, replay(trace, cell.scenario, cell.policy))


@dataclass(frozen=True, slots=True)
class GridResults:
    """What was replayed and what came of it. `capacities` are requests per second, by number of engines."""

    trace: Trace
    baseline: str
    capacities: dict[int, float]
    _: KW_ONLY
    outcomes: Sequence[CellOutcome]
    command: str

    @property
    def policies(self) -> list[str]:
        """In the order in which they were asked for."""
        return list(dict.fromkeys(outcome.cell.policy for outcome in self.outcomes))

    @property
    def fleets(self) -> list[int]:
        return sorted({outcome.cell.scenario.engines for outcome in self.outcomes})

    @property
    def loads(self) -> list[float]:
        return sorted({outcome.cell.load for outcome in self.outcomes})

    def of(self, engines: int, load: float, policy: str) -> list[PolicyFigures]:
        return [
            outcome.figures
            for outcome in self.outcomes
            if (outcome.cell.scenario.engines, outcome.cell.load, outcome.cell.policy) == (engines, load, policy)
        ]

    def mean(self, engines: int, load: float, policy: str, figure: Callable[[PolicyFigures], float]) -> float | None:
        """The mean of a figure over the seeds."""
        found = self.of(engines, load, policy)
        return math.fsum(map(figure, found)) / len(found) if found else None

    def pairs(self, policy: str, least_load: float = 0.0) -> list[tuple[PolicyFigures, PolicyFigures]]:
        """The policy's figures beside the baseline's, of all scenarios from that load on; empty without a baseline."""
        base = {
            outcome.cell.scenario: outcome.figures for outcome in self.outcomes if outcome.cell.policy == self.baseline
        }
        return [
            (outcome.figures, base[outcome.cell.scenario])
            for outcome in self.outcomes
            if outcome.cell.policy == policy and outcome.cell.scenario in base and outcome.cell.load >= least_load
        ]

    def ratios(self, policy: str) -> Ratios | None:
        """Against the baseline, over all scenarios; None if the baseline was not replayed."""
        pairs = self.pairs(policy)
        return ratios(pairs) if pairs else None

    def document(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "trace": {"name": self.trace.name, "rows": len(self.trace.rows), "block_tokens": self.trace.block_tokens},
            "capacity_requests_per_second": {str(engines): rate for engines, rate in self.capacities.items()},
            "baseline": self.baseline,
            "ratios": {policy: asdict(r) for policy in self.policies if (r := self.ratios(policy)) is not None},
            "outcomes": [
                {
                    "policy": outcome.cell.policy,
                    "load": outcome.cell.load,
                    "scenario": asdict(outcome.cell.scenario),
                    "figures": asdict(outcome.figures),
                }
                for outcome in self.outcomes
            ],
        }
