"""The schema of sweep.json, and how it comes of what the runs left."""

from __future__ import annotations

import shlex
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from loadtest.sweep.judge import Judged
from loadtest.sweep.plan import FlagValue, Plan, Way
from loadtest.sweep.run import Stage, Sweep
from loadtest.sweep.search import best, tied, winner
from loadtest.sweep.server import told_command
from loadtest.sweep.space import Configuration

# 2: ties.
SWEEP_SCHEMA_VERSION = 2


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Entry(_Part):
    """A configuration under a workload: what it came to, or why it failed."""

    label: str
    flags: dict[str, FlagValue]
    workload: str
    through: Way
    share: float = Field(description="Of a whole run: the longest that it was tried for.")
    runs: int
    figures: dict[str, float] = Field(description="Medians of the runs.")
    value: float | None = Field(description="What is maximised.")
    fits: bool
    complaints: list[str]
    log: list[str] = Field(default_factory=list, description="Of a server that failed.")
    folder: str


class Winner(_Part):
    """The configuration with the best median within all bounds, and those that its runs cannot be told from."""

    workload: str
    label: str
    flags: dict[str, FlagValue]
    value: float
    command: str = Field(description="That starts it.")
    runs: int = Field(1, description="Of it, that count.")
    tied: list[str] = Field(default_factory=list, description="Labels of the configurations that tie with it.")


class Outcome(_Part):
    """A sweep: finished, or as far as it came."""

    schema_version: int = SWEEP_SCHEMA_VERSION
    finished: bool
    plan: dict[str, Any]
    gpus: dict[str, int] = Field(description="Of each configuration, by label.")
    winners: list[Winner]
    entries: list[Entry] = Field(description="By workload and way, best first.")
    left_out: dict[str, str] = Field(description="Why configurations were not tried.")

    def of(self, workload: str, through: Way) -> list[Entry]:
        return [entry for entry in self.entries if (entry.workload, entry.through) == (workload, through)]


def outcome(sweep: Sweep, *, finished: bool) -> Outcome:
    """What the sweep's folder holds for its plan."""
    plan, space = sweep.plan, sweep.space
    winners, entries = [], []
    for workload in plan.workloads:
        stages = [stage for stage in sweep.stages if stage.workload is workload]
        for way in plan.through:
            entries += _entries(sweep, stages, way)
        whole = stages[-1] if stages and stages[-1].share == 1 else None
        found = sweep.found(whole, plan.through[0]) if whole else {}
        # Of a part of the configurations the best is no winner yet.
        if finished and (first := winner(found)) is not None:
            ties = [configuration.label for configuration in tied(found, first)]
            winners.append(_winner(plan, workload.name, first, found[first], ties))
    return Outcome(
        finished=finished,
        plan=plan.model_dump(mode="json", exclude={"serve": {"env"}}),
        gpus={configuration.label: sweep.gpus(configuration) for configuration in space.configurations},
        winners=winners,
        entries=entries,
        left_out={configuration.label: why for configuration, why in space.left_out},
    )


def _winner(plan: Plan, workload: str, first: Configuration, found: Judged, ties: list[str]) -> Winner:
    return Winner(
        workload=workload,
        label=first.label,
        flags=dict(first.flags),
        value=found.value,
        command=shlex.join(told_command(plan, first)),
        runs=len(found.values),
        tied=ties,
    )


def _entries(sweep: Sweep, stages: list[Stage], way: Way) -> list[Entry]:
    """Of each configuration the last stage that it ended or failed in; those that came further stand first."""
    entries: dict[Configuration, Entry] = {}
    for stage in reversed(stages):
        found, failures = sweep.found(stage, way), sweep.failures(stage, way)
        for configuration in best(found, len(found)):
            if configuration not in entries and configuration not in failures:
                this = found[configuration]
                entries[configuration] = _entry(
                    sweep, stage, way, configuration, figures=dict(this.figures), value=this.value, fits=this.fits,
                    complaints=this.complaints,
                )  # fmt: skip
        for configuration, failure in failures.items():
            if configuration not in entries:
                entries[configuration] = _entry(
                    sweep, stage, way, configuration, figures={}, value=None, fits=False, complaints=[failure.why],
                    log=failure.log,
                )  # fmt: skip
    return list(entries.values())


def _entry(sweep: Sweep, stage: Stage, way: Way, configuration: Configuration, **told: Any) -> Entry:
    return Entry(
        label=configuration.label,
        flags=dict(configuration.flags),
        workload=stage.workload.name,
        through=way,
        share=stage.share,
        runs=sweep.plan.repeat,
        folder=sweep.store.folder_of(configuration).relative_to(sweep.store.folder).as_posix(),
        **told,
    )
