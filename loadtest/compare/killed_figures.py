"""What requests and engines' counts come to, for one proxy under one fault. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from loadtest.compare.killed_fates import Moments, fates, steered_away_seconds
from loadtest.compare.killed_schema import KilledFigures, Span
from loadtest.compare.killed_watch import Reached, back_in_share_seconds
from loadtest.drive.record import Record
from loadtest.report.statistics import percentile
from loadtest.report.timeline import bucket_width

_LINE_CHARS = 160


def figures(records: Sequence[Record], moments: Moments, seen: Reached, engine: int) -> KilledFigures:
    """`engine` is the number of the one that went."""
    lost = [record for record in records if not record.ok]
    return KilledFigures(
        requests=len(records),
        fates=fates(records, moments),
        shown_as=dict(Counter(record.shown_as or record.outcome for record in lost)),
        first_error=next((_in_a_line(f"{record.outcome}: {record.detail}") for record in lost), ""),
        gone=moments.gone,
        let_back=moments.let_back,
        serving=moments.serving,
        long_wait=moments.long_wait,
        steered_away_seconds=steered_away_seconds(records, moments),
        share_seconds=back_in_share_seconds(seen, engine, moments.gone, moments.serving),
        reached_engines=seen.total(),
        ttft_p99_before=_ttft_p99_ms(records, -math.inf, moments.gone),
        ttft_p99_away=_ttft_p99_ms(records, moments.gone, moments.serving),
        ttft_p99_after=_ttft_p99_ms(records, moments.serving, math.inf),
        spans=spans(records),
    )


def _in_a_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LINE_CHARS else f"{line[:_LINE_CHARS]} …"


def _ttft_p99_ms(records: Sequence[Record], start: float, end: float) -> float | None:
    """Of the streams that were due then and answered."""
    known = sorted(
        (record.first_token - record.due) * 1e3
        for record in records
        if record.ok and record.first_token is not None and start <= record.due < end
    )
    return percentile(known, 99) if known else None


def spans(records: Sequence[Record]) -> list[Span]:
    """From the start of the load on, in equal stretches of at least a second."""
    if not records:
        return []
    last = max(record.sent for record in records)
    width = max(1.0, bucket_width(last))
    answered: Counter[int] = Counter()
    lost: Counter[int] = Counter()
    for record in records:
        (answered if record.ok else lost)[int(max(0.0, record.sent) / width)] += 1
    return [
        Span(start=number * width, answered=answered[number], lost=lost[number])
        for number in range(int(last / width) + 1)
    ]
