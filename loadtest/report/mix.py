"""A row for each part of a mix."""

from __future__ import annotations

from loadtest.report.figure import milliseconds, number
from loadtest.report.schema import PartFigures

PART_COLUMNS = ("offered", "good", "TTFT p50", "TTFT p99", "E2E p50", "E2E p99")


def part_cells(part: PartFigures) -> list[str]:
    """The part's name and its cells."""
    ttft, e2e = part.latency.ttft_from_intended, part.latency.e2e_from_intended
    return [
        part.name,
        number(part.requests.offered),
        number(part.requests.succeeded),
        milliseconds(ttft.p50 if ttft else None),
        milliseconds(ttft.p99 if ttft else None),
        milliseconds(e2e.p50 if e2e else None),
        milliseconds(e2e.p99 if e2e else None),
    ]
