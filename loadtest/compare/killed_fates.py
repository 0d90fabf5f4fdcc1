"""What became of each request while one engine was away: every request has exactly one fate. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from loadtest.drive.record import Record


class Fate(StrEnum):
    """How a request ended, and how far it had come when the engine went."""

    ANSWERED = "answered"
    LOST_BEFORE = "lost_before"
    BEGUN = "begun"
    NOT_BEGUN = "not_begun"
    WHILE_AWAY = "while_away"
    AFTERWARDS = "afterwards"


@dataclass(frozen=True, slots=True)
class Moments:
    """When the engine went, when it was let back, and when it served again; seconds from the start of the load."""

    gone: float
    let_back: float
    serving: float


def fate_of(record: Record, moments: Moments) -> Fate:
    """Lost is what was not answered whole: refused, broken, or not answered within the client's patience."""
    if record.ok:
        return Fate.ANSWERED
    if record.end < moments.gone:
        return Fate.LOST_BEFORE
    if record.sent >= moments.serving:
        return Fate.AFTERWARDS
    if record.sent > moments.gone:
        return Fate.WHILE_AWAY
    # What a client has of an answer cannot be taken back, so nobody can send such a request again.
    return Fate.BEGUN if record.first_token is not None else Fate.NOT_BEGUN


def fates(records: Sequence[Record], moments: Moments) -> dict[Fate, int]:
    """How many have each fate."""
    found = Counter(fate_of(record, moments) for record in records)
    return {fate: found[fate] for fate in Fate}


def steered_away_seconds(records: Sequence[Record], moments: Moments) -> float:
    """How long after the engine went a request was still sent that was lost; 0 where none was."""
    lost = [record.sent for record in records if fate_of(record, moments) is Fate.WHILE_AWAY]
    return max(lost) - moments.gone if lost else 0.0
