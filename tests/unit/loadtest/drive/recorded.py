"""A server that answers with recorded streams in virtual time, and a worker's run against it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from loadtest.drive.client import open_session
from loadtest.drive.driver import Driver
from loadtest.drive.plan import Plan
from loadtest.drive.record import Harvest, Record, WorkerHealth
from loadtest.drive.worker import watch_health
from loadtest.report.schema import Bounds, Environment, Results
from loadtest.report.summarise import summarise

GATEWAY = "x-gateway-backend: gpu-a\r\nx-gateway-prefix-tokens: 48\r\nx-gateway-queue-ms: 2.5\r\n"
ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None}
WORD = {"choices": [{"delta": {"content": "word "}}], "usage": None}


@dataclass(frozen=True, slots=True)
class Recording:
    """The reads of one answer as (seconds after its request, bytes), and whether the connection ends with the last."""

    reads: Sequence[tuple[float, bytes]]
    breaks: bool = False

    def later(self, seconds: float) -> Recording:
        return Recording([(at + seconds, data) for at, data in self.reads], self.breaks)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, and when its last byte came, in seconds of the server."""

    at: float
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


Answer = Callable[[Asked], Recording | None]


class _Side(asyncio.Protocol):
    """The server's side of one connection."""

    def __init__(self, server: RecordedServer) -> None:
        self._server = server
        self._received = b""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, ended, body = self._received.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        if ended and len(body) == int(headers["content-length"]):
            self._received = b""
            answer = self._server.on_request(first.split()[1], headers, body)
            if answer is not None:
                self._play(answer, 0, self._loop.time())

    def _play(self, answer: Recording, number: int, began: float) -> None:
        """Sends what is due, and waits for the next of it."""
        for at, data in answer.reads[number:]:
            if began + at > self._loop.time():
                self._timer = self._loop.call_at(began + at, self._play, answer, number, began)
                return
            self._transport.write(data)
            number += 1
        if answer.breaks:
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()


@dataclass(slots=True)
class RecordedServer:
    """`answer` has the recording for each request; None is never answered."""

    answer: Answer
    asked: list[Asked] = field(default_factory=list)
    url: str = ""
    _origin: float = 0.0

    def on_request(self, path: str, headers: dict[str, str], body: bytes) -> Recording | None:
        self.asked.append(Asked(asyncio.get_running_loop().time() - self._origin, path, headers, body))
        return self.answer(self.asked[-1])

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [asked.fields for asked in self.asked]

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._origin = loop.time()
        listener = await loop.create_server(lambda: _Side(self), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is held: connections end with their clients."""


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chunk(*events: bytes) -> bytes:
    data = b"".join(events)
    return b"%x\r\n%s\r\n" % (len(data), data)


def usage(completion_tokens: int) -> dict[str, Any]:
    counted = {"prompt_tokens": 100, "completion_tokens": completion_tokens}
    return {"choices": [], "usage": counted | {"prompt_tokens_details": {"cached_tokens": 64}}}


HEAD = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n{GATEWAY}\r\n".encode()
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


def stream(*words_at: float, tokens: int | None = None) -> Recording:
    """A chat: the role at once, a word at each of the moments, and the usage with the last one."""
    reads = [(0.0, HEAD + chunk(event(ROLE))), *((at, chunk(event(WORD))) for at in words_at[:-1])]
    last = chunk(event(WORD), event(usage(len(words_at) if tokens is None else tokens)), DONE) + END
    return Recording([*reads, (words_at[-1], last)])


def whole(value: Any, at: float = 0.0, status: int = 200) -> Recording:
    """JSON in one piece, or a text."""
    body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
    kind = "text/html" if isinstance(value, str) else "application/json"
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    return Recording([(at, head + body)])


REFUSED = whole({"error": {"message": "queue full"}}, status=429)


def seconds_from_now() -> Callable[[], float]:
    """A clock of the running loop's time."""
    now = asyncio.get_running_loop().time
    origin = now()
    return lambda: now() - origin


async def drive(
    plan: Plan, *alongside: Coroutine[Any, Any, None], worker: int = 0, ends_after: float | None = None
) -> Harvest:
    """One worker's run as a process makes it, in order of index and turn; `alongside` ends with it."""
    clock, health, records = seconds_from_now(), WorkerHealth(worker), list[Record]()
    async with open_session(plan, clock) as session, asyncio.TaskGroup() as group:
        driver = Driver(plan, worker, session, clock=clock, emit=records.append)
        beside = [group.create_task(one) for one in (watch_health(health, clock, lambda: 0.0), *alongside)]
        with suppress(TimeoutError):
            async with asyncio.timeout(ends_after):
                await driver.run()
        for task in beside:
            task.cancel()
    assert driver.in_flight == 0
    records.sort(key=lambda record: (record.index, record.turn))
    return Harvest(records, Counter(driver.itl_ticks), [health])


def summarised(plan: Plan, harvest: Harvest, bounds: Bounds | None = None) -> Results:
    """What is reported of a run."""
    environment = Environment(versions={}, command=[], started_at="", host={}, server={})
    return summarise(plan, harvest, bounds or Bounds(), environment, {})
