"""The run cut into equal stretches, for the pictures."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from loadtest.drive.record import Record
from loadtest.report.concurrency import Level, highest_within
from loadtest.report.schema import Bucket
from loadtest.report.statistics import percentile
from loadtest.report.window import tokens_within

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
