"""What is kept of how proxies behave while an engine is away.

Moments are seconds from the start of the load; latencies milliseconds, from when a request was due.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from loadtest.compare.killed_fates import Fate


class Fault(StrEnum):
    """What happens to one engine from a third to two thirds of the load."""

    KILL = "kill"
    HANG = "hang"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Span(_Part):
    """A stretch of time in which as many requests were sent, by how they ended."""

    start: float
    answered: int
    lost: int


class KilledFigures(_Part):
    """A proxy under one fault, once."""

    requests: int
    fates: dict[Fate, int]
    shown_as: dict[str, int] = Field(description="How those that were lost showed to their clients.")
    first_error: str
    gone: float
    let_back: float
    long_wait: float = Field(description="A stream that waits longer, until the engine is let back, is held up.")
    serving: float = Field(description="When the engine served again.")
    steered_away_seconds: float = Field(description="The last request that was lost or held up was sent so long after.")
    share_seconds: float | None = Field(description="From serving again to half of the earlier share of requests.")
    reached_engines: float = Field(description="Requests that engines got; more than were sent where some went twice.")
    ttft_p99_before: float | None
    ttft_p99_away: float | None
    ttft_p99_after: float | None
    spans: list[Span]

    @property
    def lost(self) -> int:
        """Requests that were not answered whole."""
        return self.requests - self.fates[Fate.ANSWERED] - self.fates[Fate.HELD_UP]


class KilledTurn(_Part):
    """One proxy under one fault in one repetition."""

    arm: str
    fault: Fault
    repetition: int
    figures: KilledFigures | None = None
    failure: str = ""
    log: list[str] = []


class Killed(_Part):
    """All of it; turns in the order in which they ran."""

    load: str
    patience_seconds: float = Field(description="How long a client waits for a whole answer.")
    turns: list[KilledTurn]

    def turns_of(self, arm: str, fault: Fault) -> list[KilledTurn]:
        """The turns of an arm under a fault that have figures."""
        return [one for one in self.turns if (one.arm, one.fault) == (arm, fault) and one.figures is not None]
