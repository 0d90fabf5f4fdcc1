"""What engines and the gateway say about themselves in /metrics."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

DEADLINE_SECONDS = 30.0
POLL_SECONDS = 0.02


async def page(url: str) -> str:
    """The text of a /metrics page."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        answer.raise_for_status()
        return await answer.text()


async def samples(url: str) -> list[Sample]:
    """Every sample of a /metrics page."""
    return parse(await page(url))


def parse(text: str) -> list[Sample]:
    """The samples in a text."""
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def total(found: list[Sample], name: str, **labels: str) -> float:
    """The sum of a metric's samples that carry these labels; 0 when there is none."""
    return sum(
        sample.value
        for sample in found
        if sample.name == name and all(sample.labels.get(key) == value for key, value in labels.items())
    )


async def read(url: str, *names: str, **labels: str) -> float:
    """These metrics of one /metrics page, each summed over its other labels, added up."""
    # Parsing the whole page would take longer than the things that are watched here.
    lines = [line for line in (await page(url)).splitlines() if line.startswith(names)]
    found = parse("\n".join(lines) + "\n")
    return sum(total(found, name, **labels) for name in names)


async def running(url: str) -> float:
    """How many sequences an engine runs, by its own account."""
    return await read(url, "vllm:num_requests_running")


async def held(url: str) -> float:
    """How many sequences an engine runs or lets wait, by its own account."""
    return await read(url, "vllm:num_requests_running", "vllm:num_requests_waiting")


async def eventually(
    holds: Callable[[], Awaitable[bool]], what: str, deadline_seconds: float = DEADLINE_SECONDS
) -> float:
    """Poll until it holds and return after how many seconds it did; fail at the deadline."""
    started = time.monotonic()
    while not await holds():
        elapsed = time.monotonic() - started
        assert elapsed < deadline_seconds, f"not within {deadline_seconds} s: {what}"
        await asyncio.sleep(POLL_SECONDS)
    return time.monotonic() - started


async def engines_become_idle(urls: tuple[str, ...], deadline_seconds: float = DEADLINE_SECONDS) -> float:
    """Wait until no engine runs or holds a request."""

    async def idle() -> bool:
        return not any([await held(url) for url in urls])

    return await eventually(idle, f"{urls} become idle", deadline_seconds)


HELD_BY_THE_GATEWAY = ("gateway_backend_in_flight", "gateway_queued_requests", "gateway_backend_kv_tokens_reserved")


async def gateway_holds_nothing(admin_url: str) -> None:
    """Wait until the gateway's books are empty."""

    async def empty() -> bool:
        return await read(admin_url, *HELD_BY_THE_GATEWAY) == 0

    await eventually(empty, "nothing in flight, queued or reserved")


async def queued_requests_become(admin_url: str, count: int) -> None:
    """Wait until this many requests wait in the gateway."""

    async def reached() -> bool:
        return await read(admin_url, "gateway_queued_requests") == count

    await eventually(reached, f"{count} queued")


async def comes_to_rest(admin_url: str) -> None:
    """Wait until the gateway has nothing in flight."""

    async def at_rest() -> bool:
        return await read(admin_url, "gateway_backend_in_flight") == 0

    await eventually(at_rest, "nothing is in flight")
