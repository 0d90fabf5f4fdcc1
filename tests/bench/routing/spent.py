"""Who used the machine's processors during a turn: the router, the engines and the client, or others."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

from loadtest.servers.processes import CpuTimes, core_busy_seconds, cpu_seconds_between, cpu_times


@dataclass(frozen=True)
class Snapshot:
    """The processors at a moment."""

    at: float
    busy_seconds: float
    router: CpuTimes
    all_of_ours: CpuTimes
    cores: int


@dataclass(frozen=True)
class Spent:
    """Between two moments."""

    router_seconds: float
    others_share: float
    """Of all cores' time: what was used by none of ours. Then the figures are of a machine that was shared."""


def snapshot(router: int, engines: Iterable[int]) -> Snapshot:
    """Now; takes the first process of the router and of each engine."""
    cores = os.sched_getaffinity(0)
    router_times = cpu_times(router)
    ours = dict(router_times) | cpu_times(os.getpid())
    for engine in engines:
        ours |= cpu_times(engine)
    busy = sum(core_busy_seconds(core) for core in cores)
    return Snapshot(time.monotonic(), busy, router_times, ours, len(cores))


def between(before: Snapshot, after: Snapshot) -> Spent:
    """What was spent. Engines that were restarted in between count as others."""
    ours = cpu_seconds_between(before.all_of_ours, after.all_of_ours)
    wall_seconds = max(after.at - before.at, 1e-9) * after.cores
    others = (after.busy_seconds - before.busy_seconds - ours) / wall_seconds
    return Spent(cpu_seconds_between(before.router, after.router), max(0.0, others))
