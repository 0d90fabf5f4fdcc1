"""The schema of sweep.json: each configuration's figures, winners, and their ties."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from loadtest.report.schema import Interval, StrictModel
from loadtest.report.statistics import FEWEST
from loadtest.sweep.plan import FlagValue, Way

# 2: ties. 3: intervals, configurations without a valid run.
SWEEP_SCHEMA_VERSION = 3


class ConfigurationResult(StrictModel):
    """A configuration under a workload: its result, or the cause of its failure."""

    label: str
    flags: dict[str, FlagValue]
    workload: str
    through: Way
    share: float = Field(description="Of a whole run: the longest that it was tried for.")
    runs: int
    figures: dict[str, float] = Field(description="Medians of the runs.")
    value: float | None = Field(description="What is maximised.")
    interval: Interval | None = Field(None, description="95 % confidence of it: of the runs, or within a single one.")
    fits: bool
    valid: bool = Field(True, description="Whether the client kept up in any of the runs.")
    complaints: list[str]
    log: list[str] = Field(default_factory=list, description="Of a server that failed.")
    folder: str


class Winner(StrictModel):
    """The configuration with the best median within all bounds, and those with no significant difference to it."""

    workload: str
    label: str
    flags: dict[str, FlagValue]
    value: float
    command: str = Field(description="That starts it.")
    runs: int = Field(1, description="Of it, that count.")
    tied: list[str] = Field(default_factory=list, description="Labels of the configurations that tie with it.")
    unjudged: list[str] = Field(default_factory=list, description="Labels of those without a valid run.")


class SweepOutcome(StrictModel):
    """A sweep, finished or partial."""

    schema_version: int = SWEEP_SCHEMA_VERSION
    finished: bool
    plan: dict[str, Any]
    gpus: dict[str, int] = Field(description="Of each configuration, by label.")
    winners: list[Winner]
    entries: list[ConfigurationResult] = Field(description="By workload and way, best first.")
    left_out: dict[str, str] = Field(description="Why configurations were not tried.")

    def of(self, workload: str, through: Way) -> list[ConfigurationResult]:
        return [entry for entry in self.entries if (entry.workload, entry.through) == (workload, through)]


def unsure(won: Winner) -> str:
    """Why it is no clear winner; empty if it is one."""
    reasons = []
    if won.tied and won.runs >= FEWEST:
        reasons.append(f"it ties with {', '.join(won.tied)}")
    elif won.tied:
        runs = "1 run" if won.runs == 1 else f"{won.runs} runs"
        reasons.append(f"{runs} of each cannot separate configurations, repeat: {FEWEST} or more can")
    if won.unjudged:
        reasons.append(f"the client could not keep up with {', '.join(won.unjudged)}")
    return f"no clear winner: {'; '.join(reasons)}" if reasons else ""
