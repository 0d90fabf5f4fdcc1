"""The recorded requests through modelled engines, at their own times."""

from __future__ import annotations

import random
from collections.abc import Sequence

from loadtest.engine.step_time import StepTime
from loadtest.recording.access_log import Logged
from loadtest.recording.mooncake import trace_of
from loadtest.replay.engine import ReplayEngine
from loadtest.replay.policies import Site, router_of
from loadtest.replay.request import ReplayRequest
from loadtest.replay.scenario import Scenario
from loadtest.replay.simulation import Simulation
from loadtest.replay.trace import Row, Trace, TraceError
from loadtest.replay.workload import requests_of

_ONE_COPY = 1


def trace_from(requests: Sequence[Logged], block_tokens: int) -> Trace:
    """The trace that `loadtest record` makes of them, row by row."""
    rows = [
        Row(line["timestamp"] / 1000, line["input_length"], line["output_length"], tuple(line["hash_ids"]))
        for line in trace_of(requests, block_tokens)
    ]
    return Trace("recorded", rows, block_tokens)


def replayed(trace: Trace, scenario: Scenario, step_time: StepTime, policy: str) -> list[ReplayRequest]:
    """What the model makes of each row, in the trace's order. Raises TraceError."""
    limits = scenario.limits(trace.block_tokens)
    longest = max(row.prompt_tokens + row.output_tokens for row in trace.rows)
    if longest > limits.num_blocks * trace.block_tokens:
        raise TraceError(f"--kv-tokens: the longest request has {longest} tokens")
    requests = requests_of(trace, _ONE_COPY, trace.rate_per_second, seed=0)
    engines = [ReplayEngine(limits, step_time) for _ in range(scenario.engines)]
    router = router_of(policy, Site(scenario, trace.block_tokens, engines, random.Random(policy)))
    Simulation(requests, engines, router).run()
    return requests
