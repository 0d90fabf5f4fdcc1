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
    long_wait: float


def fate_of(record: Record, moments: Moments) -> Fate:
    """Lost is what was not answered whole: refused, broken, or not answered within the client's patience."""
    if record.ok:
        # Of a whole answer nobody can tell waiting from being long.
        began = record.sent if record.first_token is None else record.first_token
        waited_for_it = record.sent < moments.let_back <= began and began - record.sent >= moments.long_wait
        return Fate.HELD_UP if waited_for_it else Fate.ANSWERED
    if record.end < moments.gone:
        return Fate.LOST_BEFORE
    if record.sent >= moments.serving:
        return Fate.AFTERWARDS
    if record.sent > moments.gone:
        return Fate.WHILE_AWAY
    # What a client has of an answer cannot be taken back, so nobody can send such a request again.
    return Fate.BEGUN if record.first_token is not None else Fate.NOT_BEGUN


def fates(records: Sequence[Record], moments: Moments) -> dict[Fate, int]:
    found = Counter(fate_of(record, moments) for record in records)
    return {fate: found[fate] for fate in Fate}


def steered_away_seconds(records: Sequence[Record], moments: Moments) -> float:
    """How long after the engine went a request was still sent that was lost or held up; 0 where none was."""
    bad = (Fate.WHILE_AWAY, Fate.HELD_UP)
    sent = [record.sent for record in records if fate_of(record, moments) in bad]
    return max(0.0, max(sent, default=0.0) - moments.gone)
