"""Figures and loads as text, and a table row for each part of a mix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadtest.report.schema import Interval, PartFigures


def milliseconds(value: float | None) -> str:
    """Three significant digits and a fitting unit."""
    if value is None:
        return "-"
    if value >= 10_000:
        return f"{value / 1e3:.1f} s"
    if value >= 1_000:
        return f"{value / 1e3:.2f} s"
    return f"{value:.0f} ms" if value >= 99.95 else f"{value:.1f} ms" if value >= 9.995 else f"{value:.2f} ms"


def number(value: float | None) -> str:
    """Three significant digits at least, thousands set apart."""
    if value is None:
        return "-"
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"


def margin(value: float, interval: Interval | None) -> str:
    """The farther end of the interval in percent of the value, to be put behind it; nothing where it is not known."""
    ratio = reach(value, interval) / value if interval is not None and value else 0.0
    if ratio < 0.0005:
        return ""
    return " ±>100%" if ratio > 1 else f" ±{ratio:.0%}" if ratio >= 0.0095 else f" ±{ratio:.1%}"


def reach(value: float, interval: Interval) -> float:
    """How far the farther end of the interval is from the value."""
    return max(interval[1] - value, value - interval[0])


def seconds_text(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def requested_text(plan: Mapping[str, Any]) -> str:
    """What was asked of which model."""
    if not plan.get("mix"):
        how = "" if plan["stream"] or plan["endpoint"] in ("embeddings", "rerank", "score") else ", not streamed"
        return f"{plan['endpoint']}{how} · {plan['model']} · {plan['workload']['kind']}"
    total = sum(part["share"] for part in plan["mix"])
    parts = (f"{part['share'] / total:.0%} {part['name']}" for part in plan["mix"])
    return f"{plan['model']} · mix of {', '.join(parts)}"


def load_text(plan: Mapping[str, Any]) -> str:
    """How much was to be sent and when, from the plan as recorded."""
    ramp = f" in {plan['ramp_seconds']:g} s" if plan.get("ramp_seconds") else ""
    if plan["concurrency"] is not None:
        first = f"{plan['first_concurrency']} to " if ramp else ""
        return f"closed loop of {first}{plan['concurrency']}{ramp}"
    if plan["rate_per_second"] is None:
        return f"open loop at the trace's times, {plan['trace_speed']:g} times as fast"
    first = f"{plan['first_rate_per_second']:g} to " if ramp else ""
    shape = f" of burstiness {plan['burstiness']:g}" if plan["arrivals"] == "gamma" else ""
    return f"open loop of {first}{plan['rate_per_second']:g}/s{ramp}, {plan['arrivals']} arrivals{shape}"


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
