"""Clients that send mixed requests one after the other, check each answer, and now and then leave; engines that die."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import cast

from tests.bench.mock_engine import MockEngine
from tests.bench.soak.large import LargeRequests
from tests.bench.soak.requests import Planned, Requests

AT_ONCE = 48
LARGE_AT_ONCE = 8
LEAVE = 0.12
DEAD_SECONDS = 0.3
_ANSWER_SECONDS = 60.0
_SHOWN_BYTES = 300
_LENGTH = b"\r\ncontent-length: "


class Caller(asyncio.Protocol):
    """One connection; `ask` gives an answer as it came, or as much of it as came before the end."""

    def __init__(self) -> None:
        self.transport = cast(asyncio.Transport, None)
        self.is_open = True
        self._received = bytearray()
        self._ends_at = 0  # 0 = not known, -1 = at the last chunk
        self._answered: asyncio.Future[bytes] | None = None

    async def ask(self, data: bytes, within_seconds: float = _ANSWER_SECONDS) -> bytes:
        """Send one request and wait for its answer, empty where the connection has ended. Raises TimeoutError."""
        if not self.is_open:
            return b""
        self._received.clear()
        self._ends_at = 0
        self._answered = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        async with asyncio.timeout(within_seconds):
            return await self._answered

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        """The gateway closed the connection, or this client did."""
        self.is_open = False
        self._finish()

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        if not self._ends_at:
            head = received.find(b"\r\n\r\n")
            if head < 0:
                return
            at = received.find(_LENGTH, 0, head + 2)
            length = -1 if at < 0 else int(received[at + len(_LENGTH) : received.find(b"\r\n", at + 2)])
            self._ends_at = -1 if at < 0 else head + 4 + length
        if len(received) >= self._ends_at > 0 or (self._ends_at < 0 and received.endswith(b"\r\n0\r\n\r\n")):
            self._finish()

    def eof_received(self) -> None:
        """The gateway will send no more: as good as closed."""
        self.is_open = False

    def _finish(self) -> None:
        if b"\r\nconnection: close\r\n" in self._received:
            self.is_open = False
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(bytes(self._received))


class Traffic:
    """Counts how requests ended. `tally` by ending, `wrong` holds the first answers that were not as they must be."""

    def __init__(self, port: int, seed: int) -> None:
        self.sent = 0
        self.tally: Counter[str] = Counter()
        self.wrong: list[tuple[str, bytes, bytes]] = []
        self._port, self._seed = port, seed

    async def drive(self, count: int, at_once: int = AT_ONCE) -> None:
        """Send this many requests over a number of connections."""
        ends = self.sent + count
        async with asyncio.TaskGroup() as group:
            for number in range(at_once):
                group.create_task(self._client(self._seed + number, ends))

    async def drive_large(self, count: int) -> None:
        """Send this many large requests, each on a connection of its own."""
        ends = self.sent + count
        async with asyncio.TaskGroup() as group:
            for number in range(LARGE_AT_ONCE):
                group.create_task(self._newcomers(self._seed + number, ends))

    async def _newcomers(self, seed: int, ends: int) -> None:
        random = Random(seed * 1_000_003 + self.sent)
        requests = LargeRequests(random)
        while self.sent < ends:
            self.sent += 1
            planned = requests.make(self.sent)
            _, caller = await asyncio.get_running_loop().create_connection(Caller, "127.0.0.1", self._port)
            if planned.status:
                await self._ask(caller, planned)
            else:
                await self._leave(caller, planned.data, random)
            caller.transport.abort()

    async def _client(self, seed: int, ends: int) -> None:
        random = Random(seed * 1_000_003 + self.sent)
        requests = Requests(random)
        loop = asyncio.get_running_loop()
        caller: Caller | None = None
        while self.sent < ends:
            self.sent += 1
            planned = requests.make(self.sent)
            if caller is not None and not caller.is_open:
                caller.transport.abort()
            if caller is None or not caller.is_open:
                _, caller = await loop.create_connection(Caller, "127.0.0.1", self._port)
            if random.random() < LEAVE:
                whole = random.random() < 0.8
                data = planned.data if whole else planned.data[: random.randrange(1, len(planned.data))]
                await self._leave(caller, data, random)
                continue
            await self._ask(caller, planned)
        if caller is not None:
            caller.transport.abort()

    async def _ask(self, caller: Caller, planned: Planned) -> None:
        try:
            self._judge(planned, await caller.ask(planned.data))
        except TimeoutError:
            self.tally["no answer"] += 1
            caller.transport.abort()

    async def _leave(self, caller: Caller, data: bytes, random: Random) -> None:
        """Send all or a part of a request, and leave before, during or after its answer."""
        caller.transport.write(data)
        if random.random() < 0.8:
            await asyncio.sleep(random.random() ** 2 * 0.02)
        caller.transport.abort()
        caller.is_open = False
        self.tally["left"] += 1

    def _judge(self, planned: Planned, answer: bytes) -> None:
        status = answer[9:12]
        if not answer:
            ending = "no answer"
        elif status == planned.status:
            right = status != b"200" or planned.holds(answer)
            cut = not right and b'"error":' in answer and planned.kind in ("stream", "new stream")
            ending = f"{status.decode()}" if right else "stream interrupted" if cut else "wrong"
        else:
            ending = f"{status.decode()} instead of {planned.status.decode()}"
        self.tally[ending] += 1
        if ending in ("wrong", "no answer") and len(self.wrong) < 10:
            self.wrong.append((planned.kind, planned.data[-_SHOWN_BYTES:], answer[:_SHOWN_BYTES]))


async def kill_in_turn(
    engines: Sequence[MockEngine], is_due: Callable[[], bool], deaths: Counter[str], poll_seconds: float = 0.02
) -> None:
    """Whenever it is due, cut one engine off and bring it back a little later; without end."""
    for number in range(1 << 62):
        while not is_due():
            await asyncio.sleep(poll_seconds)
        engine = engines[number % len(engines)]
        await engine.die()
        await asyncio.sleep(DEAD_SECONDS)
        await engine.start()
        deaths[engine.url] += 1
