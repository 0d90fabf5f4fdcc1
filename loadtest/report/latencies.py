"""The latencies of a run as rows: those that the client measured, and their parts in gateway and engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field

from loadtest.drive.counted import ENGINE_PREFILL, ENGINE_QUEUE, mean_ms
from loadtest.report.schema import Interval, Results

POINTS = ("mean", "p50", "p90", "p95", "p99", "max")


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """Milliseconds and their intervals by point. Engines report sums: of theirs, there is only the mean."""

    name: str
    count: int | None
    points: Mapping[str, float]
    _: KW_ONLY
    intervals: Mapping[str, Interval | None] = field(default_factory=dict)


def latency_rows(results: Results) -> Iterator[LatencyRow]:
    """Of successful requests; those that were measured."""
    latency = results.latency
    rows = (
        ("TTFT, intended", "ttft", latency.ttft_from_intended),
        ("TTFT, sent", "", latency.ttft),
        ("TPOT", "tpot", latency.tpot),
        ("ITL", "", latency.itl),
        ("E2E, intended", "e2e", latency.e2e_from_intended),
        ("E2E, sent", "", latency.e2e),
        ("gateway queue", "", latency.gateway_queue),
    )
    for name, figure, values in rows:
        if values is not None:
            points = {point: getattr(values, point) for point in POINTS}
            yield LatencyRow(
                name,
                values.count,
                points,
                intervals={point: results.intervals.get(f"{figure}_{point}") for point in POINTS},
            )
    for name, histogram in (("engine queue", ENGINE_QUEUE), ("engine prefill", ENGINE_PREFILL)):
        if (mean := mean_ms(results.metrics_delta, histogram)) is not None:
            yield LatencyRow(name, None, {"mean": mean})
