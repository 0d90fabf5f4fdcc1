"""Events followed from a publisher, in tests."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from gateway.features.exact.endpoints import Source
from gateway.features.exact.feed import KvEvents
from tests.unit.exact.listener import Listener


@asynccontextmanager
async def following(listener: Listener, *sources: Source) -> AsyncIterator[KvEvents]:
    """Each rank has the engine of its number."""
    async with KvEvents(listener, lambda _, rank: rank, time.monotonic) as events:
        events.subscribe("a", sources)
        yield events


def prompt(number: int, blocks: int = 5) -> Sequence[int]:
    """A prompt that shares nothing with those of other numbers."""
    return range(number * 1000, number * 1000 + 4 * blocks)
