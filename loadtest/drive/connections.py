"""Connections to servers: a request out, an answer in, with the moment of every read.

While an answer arrives, a read costs its HTTP framing and a timestamp; the sender of the request parses the bytes
afterwards. So one process can follow thousands of streams without delaying their clocks.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Self, cast
from urllib.parse import unquote, urlsplit

import httptools

# Below the 5 s after which vLLM's server closes an idle connection, so that we do not send into a closing one.
_KEEPALIVE_SECONDS = 3.0
# So many bytes are kept unread before whoever waits for the answer is woken to read them.
_READ_AHEAD_BYTES = 2**18
_INTERIM = range(100, 200)
_JSON = "application/json"


class NoConnection(OSError):
    """The server could not be reached."""


class ServerDisconnected(ConnectionError):
    """The connection broke before the whole answer was there."""


class BadAnswer(ConnectionError):
    """The received bytes are not HTTP."""


class Received:
    """The received part of one answer. `reads` holds (moment, body bytes) of each read not taken yet."""

    __slots__ = ("_clock", "_waiter", "broken", "ended_at", "headers", "kept_bytes", "reads", "status")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiter: asyncio.Future[None] | None = None
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.reads: list[tuple[float, bytes]] = []
        self.kept_bytes = 0
        self.ended_at: float | None = None
        self.broken: Exception | None = None

    @property
    def is_over(self) -> bool:
        return self.ended_at is not None or self.broken is not None

    def begin(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers

    def add(self, data: bytes) -> None:
        """Note the body bytes of one read, with its moment."""
        self.reads.append((self._clock(), data))
        self.kept_bytes += len(data)
        if self.kept_bytes >= _READ_AHEAD_BYTES:
            self._wake()

    def end(self) -> None:
        if not self.is_over:
            self.ended_at = self._clock()
            self._wake()

    def fail(self, error: Exception) -> None:
        if not self.is_over:
            self.broken = error
            self._wake()

    def take(self) -> list[tuple[float, bytes]]:
        taken, self.reads, self.kept_bytes = self.reads, [], 0
        return taken

    async def more(self) -> None:
        """Waits for the end, or until the unread limit is reached. Raises the error that broke the answer off."""
        if not self.is_over and self.kept_bytes < _READ_AHEAD_BYTES:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.broken is not None:
            raise self.broken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ServerConnection(asyncio.Protocol):
    """One request at a time; answers are framed by llhttp."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._received: Received | None = None
        self._transport: asyncio.Transport | None = None
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []
        self.on_body = self._parts.append
        self._framed = False
        self.idle_since = 0.0
        self.is_open = False
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self.is_open = True

    def send(self, request: bytes, received: Received) -> None:
        self._received = received
        assert self._transport is not None
        self._transport.write(request)

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        received = self._received
        if received is None:
            self.close()  # no request was sent
            return
        try:
            self._parser.feed_data(data)
        except Exception as error:
            if self._parts:
                self._flush(received)
            received.fail(BadAnswer(str(error) or type(error).__name__))
            self.close()
            return
        if self._parts:
            self._flush(received)
        if received is not self._received:
            received.end()

    def _flush(self, received: Received) -> None:
        received.add(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts))
        self._parts.clear()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        received, self._received = self._received, None
        if received is None:
            return
        if error is None and received.status is not None and not self._framed:
            received.end()  # the end of the connection is the end of such an answer
        else:
            received.fail(error or ServerDisconnected("the server closed the connection"))

    def on_message_begin(self) -> None:
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower().decode("latin-1")] = value.decode("utf-8", "surrogateescape")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._received is not None and status not in _INTERIM:
            self._framed = "content-length" in self._headers or "transfer-encoding" in self._headers
            self._received.begin(status, self._headers)

    def on_message_complete(self) -> None:
        if self._received is None or self._received.status is None:
            return  # an interim answer
        self._received = None
        self.idle_since = self._clock()
        if not self._parser.should_keep_alive():
            self.close()


class Connections:
    """All connections to any number of servers, without a limit of their own; closed at the end of the block."""

    def __init__(
        self,
        headers: Mapping[str, str],
        clock: Callable[[], float],
        tls: Callable[[], ssl.SSLContext] = ssl.create_default_context,
    ) -> None:
        self._headers = headers
        self._clock = clock
        self._tls = tls
        self._servers: dict[str, ServerConnections] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers.values():
            server.close()

    def post(
        self, url: str, path: str, body: bytes, clock: Callable[[], float], content_type: str = _JSON
    ) -> AbstractAsyncContextManager[Received]:
        """Sends it to the server of the URL; `clock` gives the moments of reads."""
        server = self._servers.get(url)
        if server is None:
            server = self._servers[url] = ServerConnections(url, self._headers, self._clock, tls=self._tls)
        return server.post(path, body, clock, content_type)


class ServerConnections:
    """The connections to one server. Its addresses are looked up once, and used in turns."""

    def __init__(
        self, url: str, headers: Mapping[str, str], clock: Callable[[], float], *, tls: Callable[[], ssl.SSLContext]
    ) -> None:
        parts = urlsplit(url)
        self._clock = clock
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._base_path = parts.path
        self._tls = tls() if parts.scheme == "https" else None
        self._head = _head_of(parts.netloc.rpartition("@")[2], _basic(parts.username, parts.password) | dict(headers))
        self._addresses: list[str] = []
        self._turn = itertools.count()
        self._looking_up = asyncio.Lock()
        self._idle: deque[ServerConnection] = deque()
        self._open: set[ServerConnection] = set()

    def close(self) -> None:
        for connection in self._open:
            connection.close()

    @asynccontextmanager
    async def post(
        self, path: str, body: bytes, clock: Callable[[], float], content_type: str
    ) -> AsyncIterator[Received]:
        """Sends it; `clock` gives the moments of reads. An answer that is left before its end ends its connection."""
        connection = self._idle_one() or await self._connect()
        received = Received(clock)
        try:
            head = f"POST {self._base_path}{path} HTTP/1.1\r\n{self._head}content-type: {content_type}\r\n"
            connection.send(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body, received)
            yield received
        finally:
            if received.ended_at is not None and connection.is_open:
                self._idle.append(connection)
            else:
                connection.close()
                self._open.discard(connection)

    def _idle_one(self) -> ServerConnection | None:
        """The last used connection, if it is still fresh."""
        now = self._clock()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now - connection.idle_since < _KEEPALIVE_SECONDS:
                return connection
            connection.close()
            self._open.discard(connection)
        return None

    async def _connect(self) -> ServerConnection:
        loop = asyncio.get_running_loop()
        async with self._looking_up:
            if not self._addresses:
                self._addresses = await self._look_up(loop)
        failure: OSError | None = None
        for _ in self._addresses:
            try:
                _, connection = await loop.create_connection(
                    lambda: ServerConnection(self._clock),
                    self._addresses[next(self._turn) % len(self._addresses)],
                    self._port,
                    ssl=self._tls,
                    server_hostname=self._host if self._tls else None,
                )
            except OSError as error:
                failure = error
            else:
                self._open.add(connection)
                return connection
        assert failure is not None
        raise NoConnection(failure.errno or 0, f"{self._host}:{self._port}: {failure.strerror or failure}")

    async def _look_up(self, loop: asyncio.AbstractEventLoop) -> list[str]:
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise NoConnection(error.errno or 0, f"{self._host}: {error.strerror or error}") from None
        return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _head_of(host: str, headers: Mapping[str, str]) -> str:
    lines = [f"{name}: {value}\r\n" for name, value in {"host": host, **headers}.items()]
    return "".join(lines)


def _basic(user: str | None, password: str | None) -> dict[str, str]:
    """The header of a user in the URL."""
    if user is None:
        return {}
    secret = f"{unquote(user)}:{unquote(password or '')}".encode()
    return {"authorization": f"Basic {base64.b64encode(secret).decode()}"}
