"""`make soak`: requests of every kind against the real gateway; what has grown, and what is left at the end."""

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
import uvloop

from tests.bench.gateway_process import GatewayProcess, serving, wait_until_ready
from tests.bench.mock_engine import MockEngine
from tests.bench.soak.figures import (
    ENOUGH_REQUESTS,
    MAX_SLOPE_MIB,
    MEBIBYTE,
    AtRest,
    Sample,
    busy_gauges,
    lag_share_above,
    slope_mib,
)
from tests.bench.soak.traffic import Traffic, kill_in_turn
from tests.recounted_gateway import MODULE

ENGINES = 3
WARM_UP_SHARE = 0.2
CALM_SHARE = 0.4  # the last part, without deaths
DEATHS = 240
SECTIONS: dict[str, Any] = {
    "server": {"max_json_containers": 50_000, "max_json_strings": 50_000},
    "admission": {"tenant_header": "x-tenant"},
    "health": {
        "probe_interval_seconds": 0.2,
        "probe_timeout_seconds": 1.0,
        "eject_base_seconds": 0.5,
        "slow_start_seconds": 0,
    },
    "upstream": {"retry_budget_fraction": 1.0},
}
PER_BACKEND = {"max_in_flight": 20}
_REST_SECONDS = 15.0
_SAMPLE_SECONDS = 1.0
_SPARE_FILES = 24
_SPARE_THREADS = 1
_SPARE_LARGE_MIB = 32
_LARGE_PARTS = 10


@dataclass
class Soak:
    """One run; `verdicts` holds what must not be."""

    gateway: GatewayProcess
    traffic: Traffic
    requests: int
    large: Traffic
    large_requests: int
    samples: list[Sample] = field(default_factory=list)
    deaths: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    before: AtRest = field(default_factory=AtRest)
    after: AtRest = field(default_factory=AtRest)
    large_rests: list[AtRest] = field(default_factory=list)  # one after each part of the large requests
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def warm(self) -> list[Sample]:
        """The samples after the warm-up while engines die."""
        begins, ends = WARM_UP_SHARE * self.requests, (1 - CALM_SHARE) * self.requests
        return [sample for sample in self.samples if begins <= sample.requests < ends]

    @property
    def calm(self) -> list[Sample]:
        """The samples of the last part."""
        return [sample for sample in self.samples if sample.requests >= (1 - CALM_SHARE) * self.requests]

    @property
    def verdicts(self) -> list[str]:
        """Why this run has failed; empty = all is well."""
        tally = self.traffic.tally + self.large.tally
        found = busy_gauges(self.metrics)
        found += [f"{tally[ending]} requests: {ending}" for ending in ("wrong", "no answer") if tally[ending]]
        found += [f"{count} requests: {ending}" for ending, count in tally.items() if ending.startswith("500")]
        if self.after.open_files > self.before.open_files + _SPARE_FILES:
            found.append(f"{self.after.open_files} descriptors at the end, {self.before.open_files} after the warm-up")
        if self.after.threads > self.before.threads + _SPARE_THREADS:
            found.append(f"{self.after.threads} threads at the end, {self.before.threads} after the warm-up")
        for name, samples in (("while engines die", self.warm), ("while none dies", self.calm)):
            if self.requests >= ENOUGH_REQUESTS and slope_mib(samples) > MAX_SLOPE_MIB:
                found.append(f"memory grows by {slope_mib(samples):.2f} MiB per 100,000 requests {name}")
        first, last = self.large_mib
        if last > first + _SPARE_LARGE_MIB:
            found.append(f"memory grows with large requests: {first:.1f} MiB, {last:.1f} MiB")
        return found

    @property
    def large_mib(self) -> tuple[float, float]:
        """The lowest RSS at rest in each half of the large requests: the allocator keeps now more, now less of what is
        free, as much as 50 MiB."""
        rests = [each.rss_bytes / MEBIBYTE for each in self.large_rests]
        half = len(rests) // 2
        return min(rests[:half]), min(rests[half:])


def soak(
    requests: Annotated[int, typer.Option(min=1000, help="How many.")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 1,
    large: Annotated[
        int, typer.Option(min=0, help="Requests of up to 4 MiB after these, each on a connection of its own.")
    ] = 10_000,
) -> None:
    """Send mixed requests, cancel some, cut engines off; then large ones. Fail if anything is left or grows."""
    run = uvloop.run(_run(requests, large, seed))
    typer.echo(report(run))
    if run.verdicts:
        wrong = run.traffic.wrong + run.large.wrong
        typer.echo("\n".join(["", "failed:", *run.verdicts, *map(str, wrong)]), err=True)
        raise typer.Exit(1)


async def _run(requests: int, large: int, seed: int) -> Soak:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(MockEngine()) for _ in range(ENGINES)]
        backends = [{"url": engine.url, **PER_BACKEND} for engine in engines]
        context = serving({**SECTIONS, "backends": backends}, module=MODULE)
        gateway = await asyncio.to_thread(context.__enter__)
        stack.push_async_callback(asyncio.to_thread, context.__exit__, None, None, None)
        await asyncio.to_thread(wait_until_ready, gateway)
        run = Soak(gateway, Traffic(gateway.port, seed), requests, Traffic(gateway.port, seed), large)
        await _soak(run, engines)
        for part in range(1, _LARGE_PARTS + 1):
            await run.large.drive_large(large * part // _LARGE_PARTS - run.large.sent)
            run.large_rests.append(await _rest(run))
        return run


async def _soak(run: Soak, engines: list[MockEngine]) -> None:
    began = time.monotonic()
    loop = asyncio.get_running_loop()
    sampling = loop.create_task(_sample(run, began))
    warm_up, calm = int(WARM_UP_SHARE * run.requests), int(CALM_SHARE * run.requests)
    try:
        await run.traffic.drive(warm_up)
        run.before = await _rest(run)
        apart = max(1, (run.requests - warm_up - calm) // DEATHS)

        def is_due() -> bool:
            return run.traffic.sent > warm_up + (run.deaths.total() + 1) * apart

        killing = loop.create_task(kill_in_turn(engines, is_due, run.deaths))
        await run.traffic.drive(run.requests - warm_up - calm)
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        for engine in engines:
            if not engine.is_listening:
                await engine.start()
        await run.traffic.drive(calm)
    finally:
        sampling.cancel()
    run.seconds = time.monotonic() - began
    run.after = await _rest(run)


async def _rest(run: Soak) -> AtRest:
    """Wait until the gauges are at rest, or for long enough to know that they will not be."""
    ends = time.monotonic() + _REST_SECONDS
    while True:
        run.metrics = await asyncio.to_thread(run.gateway.metrics)
        if not busy_gauges(run.metrics) or time.monotonic() > ends:
            return AtRest(run.gateway.open_files, run.gateway.threads, run.gateway.rss_bytes)
        await asyncio.sleep(0.2)


async def _sample(run: Soak, began: float) -> None:
    """Look at the memory every second, and show how far it is."""
    while True:
        await asyncio.sleep(_SAMPLE_SECONDS)
        sent = run.traffic.sent
        run.samples.append(Sample(sent, run.gateway.rss_bytes))
        rate = sent / (time.monotonic() - began)
        rss = run.samples[-1].rss_bytes / MEBIBYTE
        line = f"{sent:,} of {run.requests:,} requests, {rate:,.0f}/s, RSS {rss:.1f} MiB, {run.deaths.total()} deaths"
        typer.echo(f"\r{line} ", nl=False, err=True)


def _endings(traffic: Traffic) -> str:
    return ", ".join(f"{ending}: {count:,}" for ending, count in traffic.tally.most_common())


def report(run: Soak) -> str:
    first, last = (
        samples[at].rss_bytes / MEBIBYTE if samples else 0.0 for samples, at in ((run.warm, 0), (run.samples, -1))
    )
    rows = {
        "requests": f"{run.traffic.sent:,} in {run.seconds:,.0f} s ({run.traffic.sent / run.seconds:,.0f}/s)",
        "how they ended": _endings(run.traffic),
        "engines cut off": f"{run.deaths.total()} times",
        "RSS after the warm-up, at the end": f"{first:.1f} MiB, {last:.1f} MiB",
        "RSS slope while engines die": f"{slope_mib(run.warm):+.2f} MiB per 100,000 requests",
        "RSS slope while none dies": f"{slope_mib(run.calm):+.2f} MiB per 100,000 requests",
        "descriptors at rest, after the warm-up and at the end": f"{run.before.open_files}, {run.after.open_files}",
        "threads, after the warm-up and at the end": f"{run.before.threads}, {run.after.threads}",
        "large requests, each on a connection of its own": _endings(run.large) or "none",
        "lowest RSS at rest in each half of these": "{:.1f} MiB, {:.1f} MiB".format(*run.large_mib),
        "event loop later than 50 ms": f"{lag_share_above(run.metrics):.2%} of looks",
        "series of /metrics": str(len(run.metrics)),
        "not at rest": "; ".join(busy_gauges(run.metrics)) or "nothing",
    }
    return "\n".join(["", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
