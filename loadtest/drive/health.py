"""Watches the client itself: how late its event loop runs and how much of its core it uses."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

_LAG_INTERVAL_SECONDS = 0.01
_CPU_INTERVAL_SECONDS = 1.0


@dataclass(slots=True)
class WorkerHealth:
    """What one worker saw of itself during the measured part of a run."""

    worker: int
    loop_lags_seconds: array[float] = field(default_factory=lambda: array("d"))
    cpu_shares: array[float] = field(default_factory=lambda: array("d"))


async def watch_health(health: WorkerHealth, clock: Callable[[], float], cpu_clock: Callable[[], float]) -> None:
    """Samples until cancelled. A lag is how much later than asked a 10 ms sleep ends; a share is CPU s per wall s."""
    window_start, window_cpu = clock(), cpu_clock()
    try:
        while True:
            due = clock() + _LAG_INTERVAL_SECONDS
            await asyncio.sleep(_LAG_INTERVAL_SECONDS)
            now = clock()
            health.loop_lags_seconds.append(max(0.0, now - due))
            if now - window_start >= _CPU_INTERVAL_SECONDS:
                cpu = cpu_clock()
                health.cpu_shares.append((cpu - window_cpu) / (now - window_start))
                window_start, window_cpu = now, cpu
    finally:
        # A run shorter than a window still gets its share told.
        if not health.cpu_shares and clock() > window_start:
            health.cpu_shares.append((cpu_clock() - window_cpu) / (clock() - window_start))
