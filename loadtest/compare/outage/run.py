"""One outage under steady load: an engine is killed and restarted, or stopped and continued.

The load is an open loop, streams and whole answers in equal parts. Requests that reached each engine are read from its
own metrics page, a few times a second.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace

import aiohttp
import uvloop

from loadtest.compare.outage.schema import Fault, Moments
from loadtest.drive.client import open_session
from loadtest.drive.driver import Driver
from loadtest.drive.plan import MixPart, Plan
from loadtest.drive.record import Record
from loadtest.drive.sampling import page_values
from loadtest.servers.engines import Engines, Kind
from loadtest.servers.server import serves
from loadtest.workloads.prompts import Endpoint, WorkloadSpec

_EVERY_SECONDS = 0.25
_TIMEOUT = aiohttp.ClientTimeout(total=1.0)
_ENDED = re.compile(r"^http_requests_total(\{[^}]*\}) (\S+)", re.MULTILINE)
# An engine has its share again once it gets half of its former requests: routers that follow prefixes share unevenly.
_OF_ITS_SHARE = 0.5
_WINDOW_SECONDS = 2.0
_FEWEST = 3


def reached(page: str) -> float:
    """Requests that have reached an engine: ended ones of any outcome, and running ones."""
    ended = sum(
        float(value)
        for labels, value in _ENDED.findall(page)
        if 'method="POST"' in labels and 'handler="/v1/' in labels
    )
    held = page_values(page)
    return ended + held.get("running", 0.0) + held.get("waiting", 0.0)


@dataclass(slots=True)
class Reached:
    """The engines' reports, by time; None for an engine without one."""

    at: list[float] = field(default_factory=list)
    counts: list[tuple[float | None, ...]] = field(default_factory=list)

    def arrivals(self) -> list[tuple[float, ...]]:
        """New requests since the last look, by engine; a restarted engine counts from zero."""
        rows: list[tuple[float, ...]] = []
        last: dict[int, float] = {}
        missed: set[int] = set()
        for counts in self.counts:
            row = [0.0] * len(counts)
            for number, count in enumerate(counts):
                if count is None:
                    missed.add(number)
                    continue
                # A request that ends is for a moment neither held nor ended: only far less than before is a new start.
                is_new = number in missed and count < last.get(number, 0.0) / 2
                row[number] = count - (0.0 if is_new else last.get(number, count))
                last[number] = count
                missed.discard(number)
            rows.append(tuple(row))
        return rows

    def total(self) -> float:
        """Requests that reached any engine between the first look and the last."""
        return sum(map(sum, self.arrivals()))


def back_in_share_seconds(seen: Reached, engine: int, gone: float, serving: float) -> float | None:
    """How long after an engine served again it got half of its earlier share of requests; None: not in this run."""
    rows = list(zip(seen.at, seen.arrivals(), strict=True))
    before = _share([row for at, row in rows if at <= gone], engine)
    if not before:
        return None
    for start, _ in rows:
        if start < serving:
            continue
        window = [row for at, row in rows if start < at <= start + _WINDOW_SECONDS]
        if start + _WINDOW_SECONDS > rows[-1][0] or sum(map(sum, window)) < _FEWEST:
            continue
        if (_share(window, engine) or 0.0) >= _OF_ITS_SHARE * before:
            return start - serving
    return None


def _share(rows: Sequence[tuple[float, ...]], engine: int) -> float | None:
    whole = sum(map(sum, rows))
    return sum(row[engine] for row in rows) / whole if whole else None


class Watch:
    """Looks at the engines' pages, by `clock`."""

    def __init__(self, session: aiohttp.ClientSession, urls: Sequence[str], clock: Callable[[], float]) -> None:
        self._session = session
        self._urls = urls
        self._clock = clock
        self._one_at_a_time = asyncio.Lock()
        self.seen = Reached()

    async def look(self) -> None:
        async with self._one_at_a_time:
            counts = await asyncio.gather(*map(self._reached, self._urls))
            self.seen.at.append(self._clock())
            self.seen.counts.append(tuple(counts))

    async def go_on(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_EVERY_SECONDS)

    async def _reached(self, url: str) -> float | None:
        try:
            async with self._session.get(f"{url}/metrics", timeout=_TIMEOUT) as response:
                return reached(await response.text())
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None


_LOOK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Outage:
    """Which engine goes, how, and when, in seconds from the start of the load; from when on a wait is a long one."""

    engine: int
    fault: Fault
    gone: float
    _: KW_ONLY
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

    Raises ServerFailed of an engine that does not start again, and TimeoutError.
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
        await Driver(plan, 0, session, clock=time.monotonic, emit=records.append).warm_up()
        await engines.make_cold()
        origin = time.monotonic()

        def clock() -> float:
            return time.monotonic() - origin

        watch = Watch(pages, engines.urls, clock)
        await watch.look()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch.go_on())
            going = group.create_task(_go(engines, outage, watch, clock))
            await Driver(plan, 0, session, clock=clock, emit=records.append).run()
            moments = await going
            watching.cancel()
        await watch.look()
    return Observed(sorted(records, key=lambda record: record.sent), moments, watch.seen)


async def _go(engines: Engines, outage: Outage, watch: Watch, clock: Callable[[], float]) -> Moments:
    process = engines.processes[outage.engine]
    await asyncio.sleep(max(0.0, outage.gone - clock()))
    await watch.look()  # its counts are lost with it
    gone = clock()
    await asyncio.to_thread(process.kill if outage.fault is Fault.KILL else process.suspend)
    await asyncio.sleep(max(0.0, outage.let_back - clock()))
    let_back = clock()
    if outage.fault is Fault.HANG:
        process.resume()
        return Moments(gone, let_back, let_back, long_wait=outage.long_wait)
    await asyncio.to_thread(engines.start, outage.engine)
    await asyncio.to_thread(process.wait_ready)
    return Moments(gone, let_back, clock(), long_wait=outage.long_wait)


_WARMUPS = 8


@dataclass(frozen=True)
class OutageLoad:
    """How much, for how long. The engine is away for the middle third."""

    rate_per_second: float
    seconds: float
    max_tokens: int
    _: KW_ONLY
    prefix_tokens: int = 128
    tail_tokens: int = 32
    groups: int = 16

    @property
    def patience_seconds(self) -> float:
        """Shorter than the engine is away, as the clients of an engine that never comes back have to be."""
        return self.seconds / 6

    def outage(self, engine: int, fault: Fault) -> Outage:
        return Outage(
            engine, fault, self.seconds / 3, let_back=self.seconds * 2 / 3, long_wait=self.patience_seconds / 5
        )

    def plan(self, url: str, endpoint: Endpoint, model: str, seed: int) -> Plan:
        """As it is sent; the same requests at the same times for the same seed."""
        workload = WorkloadSpec(
            groups=self.groups,
            prefix_tokens=self.prefix_tokens,
            tail_tokens=self.tail_tokens,
            max_tokens=self.max_tokens,
            output_spread=0.5,
            seed=seed,
        )
        parts = [
            MixPart(name=name, share=1.0, endpoint=endpoint, stream=stream, model=model, workload=workload)
            for name, stream in (("streams", True), ("whole", False))
        ]
        return Plan(
            url=url,
            endpoint=endpoint,
            model=model,
            rate_per_second=self.rate_per_second,
            duration_seconds=self.seconds,
            timeout_seconds=self.patience_seconds,
            warmup_requests=_WARMUPS,
            workload=workload,
            mix=parts,
        )

    def description(self) -> str:
        return (
            f"{self.rate_per_second:g} requests/s for {self.seconds:g} s, Poisson, half of them streams, "
            f"{self.prefix_tokens} + {self.tail_tokens} prompt tokens, about {self.max_tokens} output tokens; "
            f"a client waits {self.patience_seconds:g} s for a whole answer"
        )


def usual(kind: Kind, seconds: float | None = None) -> OutageLoad:
    """One of two engines of that kind can carry it; real ones take long to start."""
    load = OutageLoad(10.0, 45.0, 256) if kind is Kind.SIM else OutageLoad(1.5, 180.0, 64)
    return load if seconds is None else replace(load, seconds=seconds)
