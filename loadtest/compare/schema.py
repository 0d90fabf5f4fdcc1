"""The schema of compare.json. Latencies are milliseconds, from the time a request was due."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from loadtest.compare.outage.schema import OutageResults
from loadtest.report.schema import Environment, FrozenModel

SCHEMA_VERSION = 1
DIRECT = "direct"


class ArmFigures(FrozenModel):
    """An arm under the workload, once."""

    requests: int
    failed: dict[str, int]
    first_error: str
    hit_ratio: float | None = Field(description="By the engines' counters: prompt tokens found in a prefix cache.")
    requests_per_second: float
    output_tokens_per_second: float = Field(description="Of all answers, from the first request to the last answer.")
    attainment: float | None = Field(description="Share of offered requests within the SLO.")
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    e2e_p50: float | None
    e2e_p99: float | None
    least_share: float | None = Field(description="Requests at the engine with the fewest, over an even share.")
    peak_running: list[float | None] = Field(description="By engine, the most sequences it said to run, seen at 1 Hz.")
    preemptions: float
    cpu_us_per_request: float | None
    cpu_us_per_event: float | None = Field(description="Of the same CPU time, divided by streamed events instead.")
    memory_mib: float | None = Field(description="Pss of the proxy's processes.")
    others_share: float | None = Field(
        None, description="Of the machine's cores, what was used by nothing of the comparison; None: unknown."
    )
    ttft_ms: list[float]


class Added(FrozenModel):
    """Requests one at a time, in turns with and without the proxy."""

    pairs: int
    direct_p50: float
    p50: float = Field(description="Of the differences.")
    p99: float


class Overhead(FrozenModel):
    """The proxy's own cost, with little other load."""

    added: Added | None = None
    cpu_us_per_request: float | None = Field(None, description="Whole answers of one token, several at once.")
    cpu_us_per_event: float | None = Field(None, description="Long streams, many at once.")


class ArmRun(FrozenModel):
    """One arm in one repetition."""

    arm: str
    repetition: int
    folder: str
    seconds: float
    overhead: Overhead = Overhead()
    figures: ArmFigures | None = None
    passes_salt: bool | None = Field(None, description="Whether engines get the cache_salt; None: unknown.")
    valid: bool = Field(True, description="Whether the client was not the limit.")
    passed: bool = True
    ended_early: bool = False
    reasons: list[str] = []
    failure: str = ""
    log: list[str] = []


class ArmInfo(FrozenModel):
    """An arm: its facts, or the way to install it."""

    name: str
    policy: str
    version: str
    missing: str = ""


class Setup(FrozenModel):
    """The load and conditions of all arms."""

    engines: str
    engine_count: int
    model: str
    load: str
    owned: bool
    slo: str = ""
    plan: dict[str, Any] = Field(description="Of the first run.")


class Comparison(FrozenModel):
    """A whole comparison; turns in the order in which they ran."""

    schema_version: int = SCHEMA_VERSION
    environment: Environment
    setup: Setup
    arms: list[ArmInfo]
    turns: list[ArmRun]
    killed: OutageResults | None = None
    passed: bool
    reasons: list[str]

    def turns_of(self, arm: str) -> list[ArmRun]:
        """The turns of an arm that have figures; turns spoilt by the client only if there are no others."""
        measured = [turn for turn in self.turns if turn.arm == arm and turn.figures is not None]
        return [turn for turn in measured if turn.valid] or measured
