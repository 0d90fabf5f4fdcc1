"""Stretches in which requests were in flight and nothing came for any of them: a closed loop hides what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import median

from loadtest.drive.record import Record
from loadtest.report.schema import Stall
from loadtest.report.statistics import percentile

_SHORTEST_SECONDS = 1.0
_USUAL_TIMES = 4.0


def stalls(records: Sequence[Record]) -> list[Stall]:
    """In order of time. A stall is at least a second, and several times as long as other requests wait for a read."""
    waited = [record for record in records if record.quiet_until > record.quiet_from]
    if not waited:
        return []
    quick = percentile(sorted(map(_quiet_seconds, waited)), 25)
    shortest = max(_SHORTEST_SECONDS, _USUAL_TIMES * quick)
    candidates = [stall for stall in _silences(waited) if stall.seconds >= shortest]
    return [stall for stall in candidates if stall.seconds >= _USUAL_TIMES * _usual_seconds(waited, stall)]


def _usual_seconds(waited: Sequence[Record], stall: Stall) -> float:
    """How long requests that the stall did not hold up waited at most for a read."""
    end = stall.start + stall.seconds
    others = [_quiet_seconds(r) for r in waited if r.quiet_until <= stall.start or r.quiet_from >= end]
    return median(others) if others else 0.0


def _quiet_seconds(record: Record) -> float:
    return record.quiet_until - record.quiet_from


def _silences(records: Sequence[Record]) -> Iterator[Stall]:
    """The stretches between two reads of whichever requests in which all that are in flight are in their quiet."""
    in_flight, quiet, since = 0, 0, None
    for moment, steps in groupby(sorted(_steps(records)), key=itemgetter(0)):
        before = in_flight
        came = False
        for _, sent, silent, was_read in steps:
            in_flight, quiet, came = in_flight + sent, quiet + silent, came or was_read
        goes_on = 0 < in_flight == quiet
        if since is not None and (came or not goes_on):
            yield Stall(start=since, seconds=moment - since, in_flight=before)
            since = None
        if goes_on and since is None:
            since = moment


def _steps(records: Sequence[Record]) -> Iterator[tuple[float, int, int, bool]]:
    """(moment, more or less in flight, more or less in quiet, whether something was read)."""
    for record in records:
        yield record.sent, 1, 0, False
        yield record.quiet_from, 0, 1, record.quiet_from > record.sent
        yield record.quiet_until, 0, -1, True
        yield record.end, -1, 0, True
