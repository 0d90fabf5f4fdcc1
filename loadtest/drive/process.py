"""A worker process: warms up, runs from the parent's start message on, reports finished requests 4 times a second."""

from __future__ import annotations

import asyncio
import gc
import resource
import time
import traceback
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import uvloop

from loadtest.drive.client import open_session
from loadtest.drive.driver import Driver
from loadtest.drive.health import WorkerHealth, watch_health
from loadtest.drive.messages import Finished, FromWorker, Progress, Ready, Start, ToWorker
from loadtest.drive.pipe import Pipe
from loadtest.drive.plan import Plan
from loadtest.drive.record import Record

if TYPE_CHECKING:
    Channel = Connection[FromWorker, ToWorker]

_REPORT_INTERVAL_SECONDS = 0.25
# Collections of young objects by the default threshold cost more than they free here, and show as loop lag.
_GC_THRESHOLD = 20_000


def work(channel: Channel, plan: Plan, worker: int) -> None:
    """Entry point of the process. A parent that has gone ends it silently."""
    _raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, Pipe(channel, runner.get_loop()) as pipe:
        runner.run(_work(pipe, plan, worker))


class _Clock:
    """Seconds from an origin that is moved once, when the run starts."""

    def __init__(self) -> None:
        self.origin = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self.origin


async def _work(pipe: Pipe, plan: Plan, worker: int) -> None:
    async with open_session(plan) as session:
        clock = _Clock()
        ended: list[Record] = []
        driver = Driver(plan, worker, session, clock, ended.append)
        warmed = await driver.warm_up()
        _settle_memory()
        pipe.send(Ready(warmed))
        start = await pipe.receive()
        if not isinstance(start, Start):
            return
        clock.origin = start.origin
        health = WorkerHealth(worker)

        def report() -> None:
            pipe.send(Progress(worker, ended.copy(), driver.in_flight))
            ended.clear()

        failure = ""
        try:
            await _until_stopped(pipe, _measure(driver, health, clock, report))
        except Exception as error:
            # The parent reports what was measured until here.
            traceback.print_exc()
            failure = _shown(error)
        report()
        pipe.send(Finished(health, driver.itl_ticks, failure))


async def _until_stopped(pipe: Pipe, measured: Coroutine[None, None, None]) -> None:
    """Runs to the end, or until the parent sends a message or is gone."""
    loop = asyncio.get_running_loop()
    measuring, stopped = loop.create_task(measured), loop.create_task(pipe.receive())
    await asyncio.wait({measuring, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    measuring.cancel()
    await asyncio.wait({measuring})
    if not measuring.cancelled():
        measuring.result()


async def _measure(
    driver: Driver, health: WorkerHealth, clock: Callable[[], float], report: Callable[[], None]
) -> None:
    await asyncio.sleep(max(0.0, -clock()))
    async with asyncio.TaskGroup() as group:
        watching = [
            group.create_task(watch_health(health, clock, time.process_time)),
            group.create_task(_report_regularly(report)),
        ]
        try:
            await driver.run()
        finally:
            for task in watching:
                task.cancel()


async def _report_regularly(report: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(_REPORT_INTERVAL_SECONDS)
        report()


def _shown(error: BaseException) -> str:
    """The first cause in groups of exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _settle_memory() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)


def _raise_file_limit() -> None:
    """A connection is a file: take all that the system allows without asking."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
