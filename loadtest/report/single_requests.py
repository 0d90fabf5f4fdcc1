"""The requests that a page shows one by one: which ones of many, and what is known of each. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.drive.record import DROPPED, OK, Record

MOST_SHOWN = 1200
_MOST_FAILED = 200
_SLOWEST = 50  # by each of the latencies: outliers are what the eye looks for


@dataclass(frozen=True, slots=True)
class ShownRequests:
    """Requests in the order in which they were due, of so many in all; charts name them by their place here."""

    records: Sequence[Record]
    total: int

    def dots(self, at: Callable[[Record], tuple[float, float] | None]) -> tuple[list[tuple[float, float]], list[int]]:
        """Where requests are drawn, and the place of each; None leaves one out."""
        found = [(place, row) for row, record in enumerate(self.records) if (place := at(record)) is not None]
        return [place for place, _ in found], [row for _, row in found]

    def data(self) -> dict[str, Any]:
        """For the page's script: seconds from the start of the run, None for what was not reported."""
        return {"total": self.total, "rows": [_row(record) for record in self.records]}


def shown_requests(records: Sequence[Record]) -> ShownRequests:
    """All of them, or failed ones, the slowest, and every n-th of the others."""
    if len(records) <= MOST_SHOWN:
        return ShownRequests(records, len(records))
    failed = [place for place, record in enumerate(records) if not record.ok]
    kept = set(_evenly(failed, _MOST_FAILED))
    for latency in (ttft_seconds, tpot_seconds, e2e_seconds):
        known = [(value, place) for place, record in enumerate(records) if (value := latency(record)) is not None]
        kept.update(place for _, place in sorted(known)[-_SLOWEST:])
    kept.update(_evenly(range(len(records)), MOST_SHOWN - len(kept)))
    return ShownRequests([records[place] for place in sorted(kept)], len(records))


def ttft_seconds(record: Record) -> float | None:
    """From the intended send; None of a request that did not succeed."""
    return record.first_token - record.due if record.ok and record.first_token is not None else None


def tpot_seconds(record: Record) -> float | None:
    """None of a request that did not succeed, or came in one read."""
    return record.tpot_seconds if record.ok else None


def e2e_seconds(record: Record) -> float | None:
    """From the intended send; None of a request that did not succeed."""
    return record.end - record.due if record.ok else None


def _evenly(places: Sequence[int], most: int) -> Sequence[int]:
    return places[:: -(-len(places) // most)] if places else []


def _row(record: Record) -> dict[str, Any]:
    """What the record has; what is empty is left out, for pages stay small."""
    first = record.first_token
    pause = record.quiet_until - record.quiet_from
    facts = {
        "index": record.index,
        "turn": record.turn or None,
        "due": round(record.due, 5),
        "sent": None if record.outcome == DROPPED else round(record.sent, 5),
        "queue": record.queue_seconds,
        "first": None if first is None else round(first, 5),
        "end": round(record.end, 5),
        "pause": [round(record.quiet_from, 5), round(record.quiet_until, 5)] if pause > 0 else None,
        "outcome": record.outcome,
        "failed": record.outcome != OK or None,
        "status": record.status,
        "detail": record.detail,
        "prompt": record.prompt_tokens,
        "cached": record.cached_tokens,
        "predicted": record.predicted_tokens,
        "output": record.completion_tokens,
        "asked": record.asked_tokens or None,
        "tpot": None if (tpot := record.tpot_seconds) is None else round(tpot, 6),
        "events": record.events or None,
        "reads": record.reads or None,
        "backend": record.backend,
        "part": record.part,
        "group": record.group if record.group >= 0 else None,
    }
    return {name: value for name, value in facts.items() if value is not None}
