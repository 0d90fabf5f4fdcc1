"""One replay, from a trace to figures."""

from __future__ import annotations

import random
import time

from loadtest.replay.policies import Site, router_of
from loadtest.replay.scenario import Scenario
from loadtest.replay.simulation import Simulation, engines_of
from loadtest.replay.summary import Figures, figures_of
from loadtest.replay.trace import Trace
from loadtest.replay.workload import FlashCrowd, requests_of


def replay(trace: Trace, scenario: Scenario, policy: str) -> Figures:
    """Replay the trace under a policy. The same arguments give the same figures, but for the CPU time."""
    faults = scenario.faults
    requests = requests_of(
        trace, scenario.engines, scenario.rate_per_second, scenario.seed,
        FlashCrowd() if faults.flash_crowd else None, scenario.lengths,
    )  # fmt: skip
    engines = engines_of(scenario, trace.block_tokens)
    lots = random.Random(f"{policy}/{scenario.seed}")
    router = router_of(policy, Site(scenario, trace.block_tokens, engines, lots))
    wipe = None
    if faults.restart_at is not None:
        # Of a closed loop the last arrival is not known beforehand: the sessions' starts tell how long it lasts.
        length = max(request.arrival_seconds for request in requests if request.arrival_seconds < float("inf"))
        wipe = faults.restart_at * length, range(round(faults.restart_share * scenario.engines))
    began = time.process_time()
    Simulation(requests, engines, router, wipe).run()
    return figures_of(requests, scenario, engines, time.process_time() - began)
