"""Results of runs that were never made."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from loadtest.checkpoint.machine import environment
from loadtest.drive.plan import Plan
from loadtest.drive.record import Harvest, Record
from loadtest.report.schema import Bounds, Results
from loadtest.report.summarise import summarise


def records(count: int, *, ttft: float, tpot: float) -> list[Record]:
    """One request every 100 ms, 11 tokens each."""
    made = []
    for index in range(count):
        start = index / 10
        fields: dict[str, Any] = {"completion_tokens": 11, "prompt_tokens": 100, "events": 11, "reads": 11}
        end = start + ttft + 10 * tpot
        made.append(Record(index, 0, start, sent=start, end=end, outcome="ok", first_token=start + ttft, **fields))
    return made


def results(count: int = 100, *, ttft: float = 0.1, tpot: float = 0.01, valid: bool = True) -> Results:
    """A run of a closed loop."""
    plan = Plan(url="http://127.0.0.1:1", model="m", concurrency=4, requests=count)
    harvest = Harvest(records=records(count, ttft=ttft, tpot=tpot))
    found = summarise(plan, harvest, Bounds(), environment(["test"], datetime.now(UTC), {}), {})
    verdict = found.verdict.model_copy(update={"valid": valid, "reasons": [] if valid else ["the client was slow"]})
    return found.model_copy(update={"verdict": verdict})
