"""What an open dashboard costs: CPU of a gateway without one and with one, in turns, at a steady load."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import median
from urllib.request import urlopen

import aiohttp

from loadtest.console import markdown_table
from loadtest.servers.processes import cpu_seconds_between, cpu_times
from tests.bench.gateway_process import GatewayProcess, engine_process, serving, wait_until_ready

_CHAT = {"model": "fine", "max_tokens": 2, "messages": [{"role": "user", "content": "What is a gateway?"}]}
_MOST_OPEN = 64
_SETTLE_SECONDS = 3.0


@dataclass(frozen=True)
class Watched:
    """Shares of one core, in turns: without a page, and with one. `look_ms`: of the last message to it."""

    engines: int
    without: list[float]
    with_page: list[float]
    look_ms: float

    @property
    def added(self) -> float:
        """What the page adds, as the median over the pairs."""
        return median(more - less for less, more in zip(self.without, self.with_page, strict=True))


def watched(engines: int, rate: float, seconds: float, repetitions: int) -> Watched:
    """Measure one size of fleet. `rate`: requests a second, in both arms."""
    without: list[float] = []
    with_page: list[float] = []
    look_ms = 0.0
    with engine_process("--everywhere") as port:
        backends = [{"url": f"http://127.0.0.{number}:{port}", "max_in_flight": 64} for number in range(1, engines + 1)]
        with serving({"backends": backends}) as gateway:
            wait_until_ready(gateway)
            with _asking(gateway.port, rate):
                for _ in range(repetitions):
                    without.append(_share(gateway, seconds))
                    with _page(gateway.admin_port) as stream:
                        with_page.append(_share(gateway, seconds))
                    look_ms = stream.look_ms
    return Watched(engines, without, with_page, look_ms)


def table(found: list[Watched]) -> str:
    rows = [
        (
            str(each.engines),
            f"{median(each.without):.2%}",
            f"{median(each.with_page):.2%}",
            f"{each.added:.2%}",
            f"{each.look_ms:.2f}",
        )
        for each in found
    ]
    return markdown_table(("engines", "CPU without a page", "with one", "added", "ms a message"), rows)


def _share(gateway: GatewayProcess, seconds: float) -> float:
    """CPU time of the gateway as a share of the time, after a pause: the first message has everything."""
    time.sleep(_SETTLE_SECONDS)
    began, before = time.monotonic(), cpu_times(gateway.pid)
    time.sleep(seconds)
    return cpu_seconds_between(before, cpu_times(gateway.pid)) / (time.monotonic() - began)


class _Stream:
    """Reads the dashboard's stream as a page does."""

    def __init__(self, admin_port: int) -> None:
        self.look_ms = 0.0
        self._ended = threading.Event()
        self._answer = urlopen(f"http://127.0.0.1:{admin_port}/admin/dashboard/stream")
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with suppress(OSError, ValueError, AttributeError):  # the other thread closes it
            for line in self._answer:
                name = b'"look_ms":'
                if not self._ended.is_set() and name in line:
                    self.look_ms = float(line.partition(name)[2].partition(b",")[0].rstrip(b"}"))

    def end(self) -> None:
        self._ended.set()
        self._answer.close()


@contextmanager
def _page(admin_port: int) -> Iterator[_Stream]:
    stream = _Stream(admin_port)
    try:
        yield stream
    finally:
        stream.end()


@contextmanager
def _asking(port: int, rate: float) -> Iterator[None]:
    """Short chats at this rate while the block runs."""
    ended = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_ask(port, rate, ended)), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


async def _ask(port: int, rate: float, ended: threading.Event) -> None:
    url, slots = f"http://127.0.0.1:{port}/v1/chat/completions", asyncio.Semaphore(_MOST_OPEN)
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:

        async def ask() -> None:
            with suppress(aiohttp.ClientError):
                async with session.post(url, json=_CHAT) as answer:
                    await answer.read()
            slots.release()

        next_seconds = time.monotonic()
        while rate and not ended.is_set():
            await slots.acquire()
            tasks.create_task(ask())
            next_seconds = max(next_seconds + 1 / rate, time.monotonic() - 1)
            await asyncio.sleep(max(0.0, next_seconds - time.monotonic()))
