"""What a client that asks once a second waits for while another floods the gateway: real sockets, simulated engines.

Three arms, in turn: nobody else is there; the other floods with a key of its own; the other floods with the same key,
so that both are one tenant in one line, ordered as without tenants.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from loadtest.report.statistics import percentile
from tests.integration.fleet import simulated_engine
from tests.integration.gateway_process import Gateway, running_gateway

ENGINES = 2
SLOTS = 32  # of each, for the gateway
FLOOD_AT_ONCE = 400
OUTPUT_TOKENS = 64
_MODEL = "sim"
_PAUSE_SECONDS = 5.0  # until the flood is there
_WORDS = 200


@dataclass
class Arm:
    """What one arm saw. Waits are those that the gateway tells in `x-gateway-queue-ms`."""

    name: str
    waits_ms: list[float] = field(default_factory=list)
    flood_answers: int = 0
    seconds: float = 0.0

    def row(self) -> str:
        p50, p99 = (percentile(sorted(self.waits_ms), share) for share in (50, 99))
        rate = self.flood_answers / self.seconds
        return f"| {self.name} | {len(self.waits_ms)} | {p50:.0f} | {p99:.0f} | {max(self.waits_ms):.0f} | {rate:.0f} |"


HEAD = (
    "| arm | requests | wait p50, ms | p99, ms | most, ms | flood, answers/s |\n| --- | --: | --: | --: | --: | --: |"
)


def measure(seconds: float) -> Iterator[Arm]:
    """Each arm for so many seconds, with a gateway and engines of its own."""
    arms = (
        (Arm("alone"), "seldom", None),
        (Arm("beside a flood, each with a key"), "seldom", "flood"),
        (Arm("beside a flood with the same key"), "flood", "flood"),
    )
    for arm, key, flood_key in arms:
        with TemporaryDirectory() as folder, _running(Path(folder)) as gateway:
            yield asyncio.run(_arm(gateway, arm, key, flood_key, seconds))


@contextmanager
def _running(folder: Path) -> Iterator[Gateway]:
    with ExitStack() as stack:
        flags = ("--max-num-seqs", str(2 * SLOTS))  # the gateway alone decides
        urls = [stack.enter_context(simulated_engine(folder, *flags)).url for _ in range(ENGINES)]
        config = {
            "backends": [{"url": url, "max_in_flight": SLOTS} for url in urls],
            "auth": {"keys": [{"name": name, "key": name} for name in ("seldom", "flood")]},
            "server": {"access_log": False},
        }
        yield stack.enter_context(running_gateway(folder, config))


async def _arm(gateway: Gateway, arm: Arm, key: str, flood_key: str | None, seconds: float) -> Arm:
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        _known(session, gateway.url, key),
        _flood(session, gateway.url, flood_key, arm),
        asyncio.TaskGroup() as group,
    ):
        if flood_key:
            await asyncio.sleep(_PAUSE_SECONDS)
        began, before = asyncio.get_running_loop().time(), arm.flood_answers
        for number in range(int(seconds)):
            group.create_task(_one(session, gateway.url, key, number, arm.waits_ms))
            await asyncio.sleep(1.0)
        arm.seconds = asyncio.get_running_loop().time() - began
        arm.flood_answers -= before
    return arm


@asynccontextmanager
async def _known(session: aiohttp.ClientSession, url: str, key: str) -> AsyncIterator[None]:
    """It has asked before: slots are kept for those who were there lately."""
    await _one(session, url, key, -1, [])
    yield


@asynccontextmanager
async def _flood(session: aiohttp.ClientSession, url: str, key: str | None, arm: Arm) -> AsyncIterator[None]:
    async def client(number: int) -> None:
        random = Random(number)
        while True:
            await _one(session, url, str(key), random.randrange(1 << 30), [])
            arm.flood_answers += 1

    tasks = [asyncio.create_task(client(number)) for number in range(FLOOD_AT_ONCE if key else 0)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)


async def _one(session: aiohttp.ClientSession, url: str, key: str, number: int, waits_ms: list[float]) -> None:
    words = " ".join(f"{number}-{word}" for word in range(_WORDS))
    body: dict[str, Any] = {
        "model": _MODEL,
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": words}],
    }
    headers = {"authorization": f"Bearer {key}"}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        answer = await response.read()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {answer[:200]!r}")
        waits_ms.append(float(response.headers["x-gateway-queue-ms"]))
