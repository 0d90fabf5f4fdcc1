"""Waiting for an engine to come to rest."""

import asyncio
from collections.abc import Callable

from loadtest.engine import SimulatedEngine

DEADLINE_SECONDS = 5.0


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds, for some seconds at most."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


def idle(engine: SimulatedEngine) -> bool:
    """Whether the engine holds nothing for any request."""
    schedulers = [rank.scheduler for rank in engine.service.engine.ranks]
    return (
        not any(scheduler.num_running or scheduler.num_waiting or scheduler.pool.num_used for scheduler in schedulers)
        and not engine.service.engine.num_requests
        and not engine.service.ledger.in_flight
    )
