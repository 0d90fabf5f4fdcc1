"""The load of a run in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def asked_told(plan: Mapping[str, Any]) -> str:
    """What was asked of which model."""
    if not plan.get("mix"):
        how = "" if plan["stream"] or plan["endpoint"] == "embeddings" else ", not streamed"
        return f"{plan['endpoint']}{how} · {plan['model']} · {plan['workload']['kind']}"
    total = sum(part["share"] for part in plan["mix"])
    parts = (f"{part['share'] / total:.0%} {part['name']}" for part in plan["mix"])
    return f"{plan['model']} · mix of {', '.join(parts)}"


def load_told(plan: Mapping[str, Any]) -> str:
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
