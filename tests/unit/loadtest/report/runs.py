"""Runs and series as they would be measured, without any load."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

from loadtest.drive.plan import Plan
from loadtest.drive.record import Harvest, Record, WorkerHealth
from loadtest.report.schema import Bounds, Environment, Results
from loadtest.report.series import Ran, Series, series_of
from loadtest.report.summarise import summarise

ENVIRONMENT = Environment(
    versions={"loadtest": "1.0"}, command=["loadtest", "run"], started_at="2026", host={"cpus": 2}, server={}
)


def records_of(ttft: float, *, count: int = 20, fails: int = 0, seconds: float = 0.4) -> list[Record]:
    """One request after the other."""
    made = []
    for index in range(count):
        start = index * seconds
        made.append(
            Record(
                index,
                0,
                start,
                sent=start,
                end=start + seconds,
                outcome="ok",
                first_token=start + ttft,
                completion_tokens=5,
                prompt_tokens=50,
                events=5,
                reads=5,
                backend="a",
            )
        )
    made += [
        Record(count + index, 0, 0.0, sent=0.0, end=0.1, outcome="http_503", detail="no") for index in range(fails)
    ]
    return made


def run_of(records: list[Record], bounds: Bounds | None = None, *, lag: float = 0.001, **plan: Any) -> Results:
    """What a closed loop of one user came to."""
    chosen = Plan.model_validate({"url": "http://x", "model": "m", "requests": 20, "concurrency": 1, **plan})
    health = WorkerHealth(0, array("d", [lag]), array("d", [0.2]))
    return summarise(chosen, Harvest(records, Counter(), [health]), bounds or Bounds(), ENVIRONMENT, {})


def curve_of(speeds: dict[str, float], repeat: int = 3, users: tuple[int, ...] = (1, 2, 4)) -> Series:
    """A series over users; a target of twice the speed gives twice the tokens."""
    ran = [
        Ran(
            target,
            f"c{count}",
            n,
            results=run_of(records_of(0.1 / speed, seconds=(0.4 + n / 100) / speed), concurrency=count),
        )
        for n in range(repeat)
        for count in users
        for target, speed in speeds.items()
    ]
    return series_of(ran, ENVIRONMENT)
