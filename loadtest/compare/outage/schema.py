"""The results of an outage test, and the fate of each request while an engine is away.

Moments are seconds from the start of the load; latencies milliseconds, from when a request was due.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum

from pydantic import Field

from loadtest.drive.record import Record
from loadtest.report.schema import FrozenModel


class Fate(StrEnum):
    """How a request ended, and how far it had come when the engine went."""

    ANSWERED = "answered"
    HELD_UP = "held_up"
    LOST_BEFORE = "lost_before"
    BEGUN = "begun"
    NOT_BEGUN = "not_begun"
    WHILE_AWAY = "while_away"
    AFTERWARDS = "afterwards"


@dataclass(frozen=True, slots=True)
class Moments:
    """When the engine went, when it was let back, and when it served again; seconds from the start of the load.

    A stream that begins once the engine is let back, `long_wait` seconds or more after it was sent, has waited for it.
    """

    gone: float
    let_back: float
    serving: float
    _: KW_ONLY
    long_wait: float


def fate_of(record: Record, moments: Moments) -> Fate:
    """Lost requests got no whole answer: refused, broken, or not answered within the client's patience."""
    if record.ok:
        # A whole answer does not separate waiting from length.
        began = record.sent if record.first_token is None else record.first_token
        waited_for_it = record.sent < moments.let_back <= began and began - record.sent >= moments.long_wait
        return Fate.HELD_UP if waited_for_it else Fate.ANSWERED
    if record.end < moments.gone:
        return Fate.LOST_BEFORE
    if record.sent >= moments.serving:
        return Fate.AFTERWARDS
    if record.sent > moments.gone:
        return Fate.WHILE_AWAY
    # The client's part of an answer cannot be taken back, so such a request cannot be sent again.
    return Fate.BEGUN if record.first_token is not None else Fate.NOT_BEGUN


def fates(records: Sequence[Record], moments: Moments) -> dict[Fate, int]:
    found = Counter(fate_of(record, moments) for record in records)
    return {fate: found[fate] for fate in Fate}


def steered_away_seconds(records: Sequence[Record], moments: Moments) -> float:
    """How long after the engine went a request was still sent that was lost or held up; 0 where none was."""
    bad = (Fate.WHILE_AWAY, Fate.HELD_UP)
    sent = [record.sent for record in records if fate_of(record, moments) in bad]
    return max(0.0, max(sent, default=0.0) - moments.gone)


class Fault(StrEnum):
    """The fault of one engine from a third to two thirds of the load."""

    KILL = "kill"
    HANG = "hang"


class Span(FrozenModel):
    """A stretch of time in which as many requests were sent, by how they ended."""

    start: float
    answered: int
    lost: int


class OutageFigures(FrozenModel):
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


class OutageTurn(FrozenModel):
    """One proxy under one fault in one repetition."""

    arm: str
    fault: Fault
    repetition: int
    figures: OutageFigures | None = None
    failure: str = ""
    log: list[str] = []


class OutageResults(FrozenModel):
    """All of it; turns in the order in which they ran."""

    load: str
    patience_seconds: float = Field(description="How long a client waits for a whole answer.")
    turns: list[OutageTurn]

    def turns_of(self, arm: str, fault: Fault) -> list[OutageTurn]:
        """The turns of an arm under a fault that have figures."""
        return [one for one in self.turns if (one.arm, one.fault) == (arm, fault) and one.figures is not None]
