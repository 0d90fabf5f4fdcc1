"""A backend that does exactly what a test says: a raw socket server with scripts, and a ledger of what reached it.

Questions of the control plane (/health, /v1/models, /metrics) are answered as a healthy vLLM would, unless `control`
says otherwise. Everything else is an inference request: it is noted in `ledger` and played the next script.
"""

import asyncio
import socket
import ssl
import struct
from collections import deque
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import orjson

from tests.scripts import Step, json_answer, whole

MODEL = "scripted"
CONTROL_TARGETS = (
    b"/health",
    b"/v1/models",
    b"/version",
    b"/metrics",
    b"/kv_event_sources",
    b"/server_info?config_format=json",
)


@dataclass(frozen=True)
class Script:
    """What happens to one request. Without `reads_body` only its head is read."""

    steps: tuple[Step, ...]
    reads_body: bool = True


@dataclass(eq=False)
class Seen:
    """One inference request as it arrived."""

    connection: int
    at_seconds: float
    head: bytes
    method: bytes = b""
    target: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    whole: bool = False  # its body arrived completely
    peer_left_at: float | None = None  # the gateway closed the connection before the answer was complete
    played: bool = False  # its script ran to its end

    def header(self, name: bytes) -> bytes | None:
        """The value of a header, if it is there once."""
        values = [value for known, value in self.headers if known == name]
        assert len(values) < 2, f"{name!r} was sent {len(values)} times"
        return values[0] if values else None

    @property
    def request_id(self) -> str:
        """What the gateway calls it."""
        return (self.header(b"x-request-id") or b"").decode()


class Connection(asyncio.Protocol):
    """One connection: reads requests strictly, plays scripts one at a time."""

    def __init__(self, backend: "ScriptedBackend", number: int) -> None:
        self.backend = backend
        self.number = number
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        self.seen: Seen | None = None
        self.closed = asyncio.Event()
        self.received = bytearray()  # everything, ever
        self._arrived = asyncio.Event()
        self._buffer = bytearray()
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The gateway connected."""
        self.transport = cast(asyncio.Transport, transport)
        self.backend.connections.add(self)
        self._start(self._run())

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        self.received += data
        self._buffer += data
        self._arrived.set()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone, whoever closed it."""
        self.closed.set()
        self._arrived.set()
        self.backend.connections.discard(self)
        if self.seen is not None and not self.seen.played and self.seen.peer_left_at is None:
            self.seen.peer_left_at = asyncio.get_running_loop().time()
        for task in self._tasks:
            task.cancel()

    def _start(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def later(self, seconds: float, then: Step) -> None:
        """Take a step after a while, if no request runs here by then."""

        async def take() -> None:
            await asyncio.sleep(seconds)
            if self.seen is None or self.seen.played:
                await then(self)

        self._start(take())

    def mark_played(self) -> None:
        """The script closes the connection itself."""
        if self.seen is not None:
            self.seen.played = True

    def reset(self) -> None:
        """Close without a word."""
        peer = self.transport.get_extra_info("socket")
        if peer is not None and not self.transport.is_closing():
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def send(self, data: bytes) -> None:
        """Write bytes."""
        if not self.transport.is_closing():
            self.transport.write(data)

    async def _more(self) -> None:
        self._arrived.clear()
        if self.closed.is_set():
            raise ConnectionResetError
        await self._arrived.wait()

    async def _until(self, mark: bytes) -> bytes:
        while (end := self._buffer.find(mark)) < 0:
            await self._more()
        return self._take(end + len(mark))

    async def _exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            await self._more()
        return self._take(count)

    def _take(self, count: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    async def _run(self) -> None:
        try:
            while not self.transport.is_closing():
                await self._one()
        except (ConnectionResetError, asyncio.CancelledError):
            pass
        except Malformed as error:
            self.backend.malformed.append(f"{error}: {bytes(self.received[-300:])!r}")
            self.transport.abort()

    async def _one(self) -> None:
        head = await self._until(b"\r\n\r\n")
        if self.transport.is_closing():
            raise ConnectionResetError  # it came while the connection was being closed: nobody serves it
        seen = read_head(head, self.number, asyncio.get_running_loop().time())
        if seen.target in CONTROL_TARGETS and seen.method == b"GET":
            await self.backend.control.get(seen.target, self.backend.answer_control)(self)
            return
        backend = self.backend
        backend.ledger.append(seen)
        self.seen = seen
        backend.running += 1
        backend.most_running = max(backend.most_running, backend.running)
        backend.touched.set()
        try:
            script = backend.next_script()
            if script.reads_body:
                seen.body = await self._body(seen)
                seen.whole = True
            for step in script.steps:
                await step(self)
            seen.played = True
        finally:
            backend.running -= 1
        if not script.reads_body:
            await self.closed.wait()  # what comes now is the rest of a body: no request can follow it

    async def _body(self, seen: Seen) -> bytes:
        length, transfer = seen.header(b"content-length"), seen.header(b"transfer-encoding")
        if length is not None and transfer is not None:
            raise Malformed("both framings")
        if length is not None:
            if not length.isdigit():
                raise Malformed("bad content-length")
            return await self._exactly(int(length))
        if transfer is None:
            return b""
        if transfer != b"chunked":
            raise Malformed("bad transfer-encoding")
        parts = []
        while size := int(await self._until(b"\r\n"), 16):
            parts.append(await self._exactly(size))
            seen.body += parts[-1]
            if await self._exactly(2) != b"\r\n":
                raise Malformed("a chunk does not end")
        if await self._exactly(2) != b"\r\n":
            raise Malformed("trailers")
        return b"".join(parts)


class Malformed(Exception):
    """What arrived is not the HTTP that a gateway may send."""


def read_head(head: bytes, connection: int, now: float) -> Seen:
    """Parse a request head by the letter: anything unusual is an error."""
    line, *fields = head[:-4].split(b"\r\n")
    words = line.split(b" ")
    if len(words) != 3 or words[2] != b"HTTP/1.1" or not words[0].isalpha() or not words[1].startswith(b"/"):
        raise Malformed(f"request line {line!r}")
    seen = Seen(connection, now, head, words[0], words[1])
    for each in fields:
        name, colon, value = each.partition(b": ")
        if not colon or not name.replace(b"-", b"").isalnum():
            raise Malformed(f"header {each!r}")
        if b"\r" in value or b"\n" in value or b"\0" in value:
            raise Malformed(f"header value {each!r}")
        seen.headers.append((name.lower(), value))
    return seen


class ScriptedBackend:
    """`async with ScriptedBackend() as backend:` listens at `backend.url`; with TLS if it has a certificate."""

    def __init__(self, model: str = MODEL, *, port: int = 0, certificate: Path | None = None) -> None:
        self.model = model
        self.cards: tuple[dict[str, str], ...] = ({"id": model},)  # of the models that it lists
        self.tls: ssl.SSLContext | None = None
        if certificate is not None:
            self.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self.tls.load_cert_chain(certificate)
        self.port = port
        self.ledger: list[Seen] = []
        self.malformed: list[str] = []
        self.connections: set[Connection] = set()
        self.accepted = 0
        self.running = 0
        self.most_running = 0
        self.touched = asyncio.Event()  # a request's head has arrived
        self.control: dict[bytes, Step] = {}
        self._script = Script(json_answer())
        self._once: deque[Script] = deque()
        self._server: asyncio.Server | None = None
        self._hole: list[socket.socket] = []

    @property
    def url(self) -> str:
        """The base URL."""
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def plays(self, *steps: Step | Iterable[Step], reads_body: bool = True) -> None:
        """From now on every inference request gets these steps."""
        self._script = Script(_flat(steps), reads_body)

    def plays_once(self, *steps: Step | Iterable[Step], reads_body: bool = True) -> None:
        """The next inference request for which nothing is planned yet gets these steps."""
        self._once.append(Script(_flat(steps), reads_body))

    def next_script(self) -> Script:
        """What the request that just arrived gets."""
        return self._once.popleft() if self._once else self._script

    async def answer_control(self, connection: Connection) -> None:
        """As a healthy server does."""
        target = bytes(connection.received).split(b" ", 2)[1]
        if target == b"/v1/models":
            more = {"object": "model", "max_model_len": 8192, "owned_by": "vllm"}
            cards = [{**card, **more} for card in self.cards]
            answer = whole(200, orjson.dumps({"object": "list", "data": cards}))
        elif target == b"/health":
            answer = whole(200, b"")
        else:
            answer = whole(404, b'{"detail":"Not Found"}')
        connection.send(answer)

    async def start(self) -> None:
        """Listen, at the same port as before."""
        self._close_hole()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connect, "127.0.0.1", self.port, backlog=1024, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    def _close_hole(self) -> None:
        while self._hole:
            self._hole.pop().close()

    def _connect(self) -> Connection:
        self.accepted += 1
        return Connection(self, self.accepted)

    async def stop(self) -> None:
        """Stop at once: refuse connections, reset those that are open."""
        self._close_hole()
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self.connections):
            connection.reset()
        while self.connections:
            await asyncio.sleep(0)

    def forget(self) -> None:
        """Drop all requests that have arrived."""
        self.ledger.clear()
        for connection in self.connections:
            if connection.seen is not None:  # else it reads what it is asked there
                connection.seen.body = b""
                connection.received.clear()

    async def vanish(self) -> None:
        """Take no more connections, and refuse none either: packets are lost, as behind a broken firewall."""
        await self.stop()
        hole = socket.socket()
        hole.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        hole.bind(("127.0.0.1", self.port))
        hole.listen(0)
        self._hole = [hole]
        for _ in range(4):  # its backlog holds one
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", self.port))
            self._hole.append(filler)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        self.forget()
        self._script, self._once = Script(json_answer()), deque()


def _flat(steps: Iterable[Step | Iterable[Step]]) -> tuple[Step, ...]:
    flat: list[Step] = []
    for step in steps:
        if callable(step):
            flat.append(step)
        else:
            flat.extend(step)
    return tuple(flat)
