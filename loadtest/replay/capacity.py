"""What a fleet can carry of a trace: the rate at which a reference router keeps the bounds for nine requests in ten.

A formula of prefill and decode seconds gives where to look first; it knows nothing of queues, so the rate itself is
found by bisection. The reference is LMetric, a router without settings.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from loadtest.replay.run import replay
from loadtest.replay.scenario import Faults, Scenario
from loadtest.replay.trace import Trace

REFERENCE = "lmetric"
WANTED_GOODPUT = 0.9
_PRECISION = 0.02
_MODEL_VERSION = 1  # of the engine model and the workload: a change makes kept figures void


def ideal_rate(trace: Trace, scenario: Scenario) -> float:
    """Requests per second of engines that are always busy, share work evenly, and never forget a block.

    Steps last as long as the bound on TPOT allows, which tells how much of the time is overhead of steps.
    """
    step, seen, seconds = scenario.step_time, set[int](), 0.0
    for row in trace.rows:
        hit = 0
        for key in row.keys:
            if key not in seen:
                break
            hit += trace.block_tokens
        seen.update(row.keys)
        hit = min(hit, row.prompt_tokens - 1)
        seconds += step.prefill_seconds(row.prompt_tokens - hit, hit)
        seconds += row.output_tokens * step.decode_seconds(1, row.prompt_tokens + row.output_tokens // 2)
    busy = max(0.1, 1 - step.base_seconds / scenario.bounds.tpot_seconds)
    return scenario.engines * busy * len(trace.rows) / seconds


def find_capacity(trace: Trace, scenario: Scenario) -> float:
    """Requests per second that the scenario's engines carry, without faults and with seed 0."""
    scenario = _plain(scenario)

    def keeps(rate: float) -> bool:
        return replay(trace, replace(scenario, rate_per_second=rate), REFERENCE).goodput >= WANTED_GOODPUT

    high = ideal_rate(trace, scenario)
    low = high / 2
    while not keeps(low):
        low, high = low / 2, low
    while keeps(high):
        low, high = high, high * 1.5
    while high / low > 1 + _PRECISION:
        middle = (low * high) ** 0.5
        if keeps(middle):
            low = middle
        else:
            high = middle
    return low


def _plain(scenario: Scenario) -> Scenario:
    return replace(scenario, seed=0, rate_per_second=0.0, faults=Faults())


def kept_in() -> Path:
    """Where capacities are kept between runs."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "loadtest" / "capacities.json"


class Kept:
    """Capacities that were found before; a file that cannot be read or written is no obstacle."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, trace: Trace, scenario: Scenario) -> float | None:
        """The rate, if it is known."""
        return self._read().get(_name(trace, scenario))

    def put(self, trace: Trace, scenario: Scenario, rate: float) -> None:
        known = self._read() | {_name(trace, scenario): rate}
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(known, indent=1, sort_keys=True), encoding="utf-8")

    def _read(self) -> dict[str, float]:
        try:
            known = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}


def _name(trace: Trace, scenario: Scenario) -> str:
    """Of everything that the capacity depends on."""
    digest = hashlib.sha256()
    for row in trace.rows:
        facts = (row.at_seconds, row.prompt_tokens, row.output_tokens, row.think_seconds, row.session, row.keys)
        digest.update(repr(facts).encode())
    plain = _plain(scenario)
    others = [_MODEL_VERSION, trace.block_tokens, asdict(plain), asdict(plain.step_time), WANTED_GOODPUT]
    digest.update(json.dumps(others, sort_keys=True).encode())
    return f"{trace.name}-{scenario.engines}-{digest.hexdigest()[:16]}"
