"""How late the event loop is."""

import asyncio

from gateway.observe.metrics import Histogram

_EVERY_SECONDS = 0.1


async def watch_lag(histogram: Histogram) -> None:
    """Sample the delay of a timer until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _EVERY_SECONDS
        await asyncio.sleep(_EVERY_SECONDS)
        histogram.observe((), max(0.0, loop.time() - due))
