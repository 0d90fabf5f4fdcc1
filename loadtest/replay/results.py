"""All outcomes of a grid, looked at by policy, load and fleet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.replay.grid import Outcome
from loadtest.replay.summary import Figures, Ratios, ratios
from loadtest.replay.trace import Trace


@dataclass(frozen=True, slots=True)
class GridResults:
    """What was replayed and what came of it. `capacities` are requests per second, by number of engines."""

    trace: Trace
    baseline: str
    capacities: dict[int, float]
    outcomes: Sequence[Outcome]
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

    def of(self, engines: int, load: float, policy: str) -> list[Figures]:
        return [
            outcome.figures
            for outcome in self.outcomes
            if (outcome.cell.scenario.engines, outcome.cell.load, outcome.cell.policy) == (engines, load, policy)
        ]

    def mean(self, engines: int, load: float, policy: str, figure: Callable[[Figures], float]) -> float | None:
        """The mean of a figure over the seeds."""
        found = self.of(engines, load, policy)
        return math.fsum(map(figure, found)) / len(found) if found else None

    def ratios(self, policy: str, loads: Sequence[float] | None = None) -> Ratios | None:
        """Against the baseline, over all scenarios (of these loads); None if the baseline was not replayed."""
        base = {
            outcome.cell.scenario: outcome.figures for outcome in self.outcomes if outcome.cell.policy == self.baseline
        }
        pairs = [
            (outcome.figures, base[outcome.cell.scenario])
            for outcome in self.outcomes
            if outcome.cell.policy == policy
            and outcome.cell.scenario in base
            and (loads is None or outcome.cell.load in loads)
        ]
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
