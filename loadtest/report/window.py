"""Which stretch of a run is steady, and the rates over a stretch."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.drive.record import Record
from loadtest.report.concurrency import Level, span_at_least
from loadtest.report.schema import Throughput

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
    return (start, end) if end > start else None


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
