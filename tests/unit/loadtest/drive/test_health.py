"""What a worker sees of itself."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from loadtest.drive.record import WorkerHealth
from loadtest.drive.worker import watch_health


async def test_each_second_reports_the_share_of_a_core_that_was_used_in_it() -> None:
    ticks = count()
    health = WorkerHealth(0)
    # Half a second passes at every look at the clock; the processor's is looked at once a second.
    used = iter([0.0, 0.9, 1.1, 2.1])
    watching = asyncio.create_task(watch_health(health, lambda: next(ticks) / 2, lambda: next(used)))
    async with asyncio.timeout(10):
        while len(health.cpu_shares) < 3:
            await asyncio.sleep(0)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert list(health.cpu_shares) == pytest.approx([0.9, 0.2, 1.0])
    assert health.loop_lags_seconds[0] == pytest.approx(0.49)
