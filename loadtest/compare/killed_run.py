"""One engine goes under load and comes back: killed and started again, or hanging and let go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp
import uvloop

from loadtest.compare.killed_fates import Moments
from loadtest.compare.killed_schema import Fault
from loadtest.compare.killed_watch import Reached, Watch
from loadtest.drive.client import open_session
from loadtest.drive.driver import Driver
from loadtest.drive.plan import Plan
from loadtest.drive.record import Record
from loadtest.servers.engines import Engines
from loadtest.servers.serving import serves

_LOOK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Outage:
    """Which engine goes, how, and when, in seconds from the start of the load; from when on a wait is a long one."""

    engine: int
    fault: Fault
    gone: float
    let_back: float
    long_wait: float


@dataclass(frozen=True, slots=True)
class Observed:
    """What came of it."""

    records: list[Record]
    moments: Moments
    seen: Reached


def observe(engines: Engines, outage: Outage, plan: Plan) -> Observed:
    """Drives the plan through it; however this ends, the engine serves afterwards.

    Raises what engines raise that do not start again, NotServing or VllmFailed, and TimeoutError.
    """
    with _made_whole(engines, outage.engine), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(_observe(engines, outage, plan))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None


@contextmanager
def _made_whole(engines: Engines, number: int) -> Iterator[None]:
    try:
        yield
    finally:
        process = engines.processes[number]
        process.resume()
        if not serves(f"{process.url}/health", _LOOK_SECONDS):
            engines.restart(number)


async def _observe(engines: Engines, outage: Outage, plan: Plan) -> Observed:
    records: list[Record] = []
    async with open_session(plan) as session, aiohttp.ClientSession() as pages:
        await Driver(plan, 0, session, time.monotonic, records.append).warm_up()
        await engines.make_cold()
        origin = time.monotonic()

        def clock() -> float:
            return time.monotonic() - origin

        watch = Watch(pages, engines.urls, clock)
        await watch.look()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch.go_on())
            going = group.create_task(_go(engines, outage, watch, clock))
            await Driver(plan, 0, session, clock, records.append).run()
            moments = await going
            watching.cancel()
        await watch.look()
    return Observed(sorted(records, key=lambda record: record.sent), moments, watch.seen)


async def _go(engines: Engines, outage: Outage, watch: Watch, clock: Callable[[], float]) -> Moments:
    process = engines.processes[outage.engine]
    await asyncio.sleep(max(0.0, outage.gone - clock()))
    await watch.look()  # what it counted is lost with it
    gone = clock()
    await asyncio.to_thread(process.kill if outage.fault is Fault.KILL else process.suspend)
    await asyncio.sleep(max(0.0, outage.let_back - clock()))
    let_back = clock()
    if outage.fault is Fault.HANG:
        process.resume()
        return Moments(gone, let_back, let_back, outage.long_wait)
    await asyncio.to_thread(engines.start, outage.engine)
    await asyncio.to_thread(process.wait_ready)
    return Moments(gone, let_back, clock(), outage.long_wait)
