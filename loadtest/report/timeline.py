"""A run over time: requests in flight, steady stretches, rates, stalls, and backlog of an open loop. Pure.

Requests in flight are counted by an event sweep: exact, where buckets over-count.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from statistics import median

from loadtest.drive.record import Record
from loadtest.report.schema import Bucket, Stall, Throughput
from loadtest.report.statistics import percentile


@dataclass(frozen=True, slots=True)
class Level:
    """From `start` until the next level, `in_flight` requests were open."""

    start: float
    in_flight: int


def sweep(intervals: Iterable[tuple[float, float]]) -> list[Level]:
    """The step function of open (start, end) intervals. An end at the moment of a start comes first."""
    events = sorted((moment, step) for start, end in intervals for moment, step in ((start, 1), (end, -1)))
    levels: list[Level] = []
    in_flight = 0
    for moment, step in events:
        in_flight += step
        if levels and levels[-1].start == moment:
            # Within one moment all ends come before all starts, so the last value is also the highest after them.
            levels[-1] = Level(moment, in_flight)
        else:
            levels.append(Level(moment, in_flight))
    return levels


def peak(levels: list[Level]) -> int:
    """The most that were ever in flight."""
    return max((level.in_flight for level in levels), default=0)


def mean(levels: list[Level]) -> float:
    """The time-weighted mean from the first start to the last end."""
    if not levels or levels[-1].start <= levels[0].start:
        return 0.0
    area = sum(a.in_flight * (b.start - a.start) for a, b in pairwise(levels))
    return area / (levels[-1].start - levels[0].start)


def span_at_least(levels: list[Level], wanted: float) -> tuple[float, float] | None:
    """From the first moment at or above `wanted` to the last moment it is left; None where it is never reached."""
    start = next((level.start for level in levels if level.in_flight >= wanted), None)
    if start is None:
        return None
    last = max(index for index, level in enumerate(levels) if level.in_flight >= wanted)
    return start, levels[last + 1].start


def longest_above(levels: list[Level], limit: float) -> float:
    """The longest stretch, in seconds, with more than `limit` in flight."""
    longest, since = 0.0, None
    for level in levels:
        if level.in_flight > limit:
            since = level.start if since is None else since
        elif since is not None:
            longest, since = max(longest, level.start - since), None
    return longest


def highest_within(levels: list[Level], edges: list[float]) -> list[int]:
    """The highest level inside each bucket between neighbouring edges."""
    highest: list[int] = []
    position, current = 0, 0
    for end in edges[1:]:
        top = current
        while position < len(levels) and levels[position].start < end:
            current = levels[position].in_flight
            top = max(top, current)
            position += 1
        highest.append(top)
    return highest


_FULL = 0.95


def whole_window(records: Sequence[Record]) -> tuple[float, float]:
    """From the first due request to the last end."""
    return min(record.due for record in records), max(record.end for record in records)


def steady_window(
    records: Sequence[Record], levels: list[Level], concurrency: int | None, ramp_seconds: float = 0.0
) -> tuple[float, float] | None:
    """After the ramp and the first whole answer; closed loop: while slots are full; open loop: while requests come."""
    done = [record.end for record in records if record.ok]
    if not done:
        return None
    if concurrency is not None:
        span = span_at_least(levels, _FULL * concurrency)
    else:
        span = min(record.due for record in records), max(record.due for record in records)
    if span is None:
        return None
    start, end = max(span[0], min(done), ramp_seconds), span[1]
    # In less than the time of a request, one that ends there by chance makes any rate.
    spans = [record.end - record.sent for record in records if record.ok]
    return (start, end) if end - start > sum(spans) / len(spans) else None


def throughput(records: Sequence[Record], window: tuple[float, float]) -> Throughput:
    """Rates over the window: answers that ended in it, tokens decoded in it, prompts whose prefill ended in it."""
    start, end = window
    length = max(end - start, 1e-9)
    good = [record for record in records if record.ok]
    prefilled = (record for record in good if start <= _decode_start(record) <= end)
    return Throughput(
        start=start,
        end=end,
        requests_per_second=requests_per_second(good, window),
        output_tokens_per_second=sum(tokens_within(record, start, end) for record in good) / length,
        prompt_tokens_per_second=sum(record.prompt_tokens or 0 for record in prefilled) / length,
    )


def requests_per_second(good: Sequence[Record], window: tuple[float, float]) -> float:
    """Of those of the requests that ended in the window."""
    start, end = window
    return sum(start <= record.end <= end for record in good) / max(end - start, 1e-9)


def tokens_within(record: Record, start: float, end: float) -> float:
    """The output tokens of a request that fall into [start, end), spread evenly over its decode."""
    tokens = record.completion_tokens or 0
    decode_start = _decode_start(record)
    length = record.end - decode_start
    if length <= 0:
        return float(tokens) if start <= record.end < end else 0.0
    overlap = min(record.end, end) - max(decode_start, start)
    return tokens * max(0.0, overlap) / length


def _decode_start(record: Record) -> float:
    return record.sent if record.first_token is None else record.first_token


_MOST_BUCKETS = 60
_WIDTHS_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)


def bucket_width(length_seconds: float) -> float:
    """The smallest round width that needs no more than 60 buckets."""
    fitting = (width for width in _WIDTHS_SECONDS if length_seconds / width <= _MOST_BUCKETS)
    return next(fitting, length_seconds / _MOST_BUCKETS)


def timeline(records: Sequence[Record], levels: list[Level]) -> list[Bucket]:
    """From zero to the last end. Latencies count from the intended send, in the bucket where they were due."""
    length = max(record.end for record in records)
    width = bucket_width(length)
    edges = [index * width for index in range(math.floor(length / width) + 2)]
    ended: dict[int, list[Record]] = defaultdict(list)
    due: dict[int, list[Record]] = defaultdict(list)
    tokens: dict[int, float] = defaultdict(float)
    for record in records:
        ended[int(record.end / width)].append(record)
        if record.ok:
            due[max(0, int(record.due / width))].append(record)
            for index in range(max(0, int(record.sent / width)), int(record.end / width) + 1):
                tokens[index] += tokens_within(record, edges[index], edges[index] + width)
    highest = highest_within(levels, edges)
    return [
        Bucket(
            start=edges[index],
            in_flight=highest[index],
            succeeded=sum(record.ok for record in ended[index]),
            failed=sum(not record.ok for record in ended[index]),
            output_tokens_per_second=tokens[index] / width,
            **_latencies(due[index]),
        )
        for index in range(len(edges) - 1)
    ]


def _latencies(records: Sequence[Record]) -> dict[str, float | None]:
    measured = {
        "ttft": [record.first_token - record.due for record in records if record.first_token is not None],
        "e2e": [record.end - record.due for record in records],
        "tpot": [tpot for record in records if (tpot := record.tpot_seconds) is not None],
    }
    return {
        f"{name}_p{percent}": percentile(sorted(seconds), percent) * 1e3 if seconds else None
        for name, seconds in measured.items()
        for percent in (50, 95, 99)
    }


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


_GROWTH = 1.5
_REQUESTS = 5
_EIGHTHS = 8


def backlog(first: float, last: float, levels: list[Level], stalls: Sequence[Stall]) -> tuple[float, float] | None:
    """The mean in flight in the second and in the last quarter of the arrivals; None where they did not pile up.

    One event raises what is in flight once; a rate above capacity raises it from quarter to quarter and to the end.
    What came in while the servers stood still is no sign of the rate either.
    """
    eighth = (last - first) / _EIGHTHS
    if eighth <= 0:
        return None
    ends = [first + place * eighth for place in range(_EIGHTHS + 1)]
    second, third, fourth = (mean_between(levels, ends[place], ends[place + 2]) for place in (2, 4, 6))
    still = mean_between(levels, ends[7], ends[8]) > mean_between(levels, ends[6], ends[7])
    held = sum(_rise(levels, stall) for stall in stalls if ends[2] <= stall.start < last)
    if second < third < fourth and still and fourth - held > max(_GROWTH * second, second + _REQUESTS):
        return second, fourth
    return None


def mean_between(levels: list[Level], start: float, end: float) -> float:
    inside = [level for level in levels if start < level.start < end]
    cut = [Level(start, _at(levels, start)), *inside]
    return mean([*cut, Level(end, cut[-1].in_flight)])


def _rise(levels: list[Level], stall: Stall) -> int:
    """How many more were in flight before the answers that ended it."""
    end = stall.start + stall.seconds
    before = _at(levels, stall.start)
    return max((level.in_flight - before for level in levels if stall.start <= level.start < end), default=0)


def _at(levels: list[Level], moment: float) -> int:
    return next((level.in_flight for level in reversed(levels) if level.start <= moment), 0)
