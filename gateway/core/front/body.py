"""The body of a request while it is received: size, framing and pace; collected, or an upload that is passed on."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import httptools

from gateway.config import ServerConfig
from gateway.core.errors import BodyTooLarge, GatewayError, InvalidRequest, RequestTimeout
from gateway.core.resources import Holding


def has_body(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a body follows a head with these fields."""
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip(b"0") != b""


def body_parser(receiver: Any, headers: Mapping[bytes, bytes]) -> httptools.HttpRequestParser:
    """A parser that has read such a head and continues with the body. The connection ends with the request."""
    callbacks = SimpleNamespace(on_body=receiver.on_body, on_message_complete=receiver.on_message_complete)
    parser = httptools.HttpRequestParser(callbacks)
    name = b"transfer-encoding" if b"transfer-encoding" in headers else b"content-length"
    parser.feed_data(b"POST / HTTP/1.1\r\nconnection: close\r\n%b: %b\r\n\r\n" % (name, headers[name]))
    return parser


_MAX_FRAMING_BYTES = 131072  # besides as many bytes as the body has itself
_MAX_DRY_BYTES = 131072  # of framing or trailers in a row
_MANY_PIECES = 16


class Body:
    """The body of the request being received; one object per connection, restarted for each request.

    Its bytes are reserved in the connection's `holding` as they arrive, and stay reserved after `take` until the
    request has ended. `left_bytes`: the missing bytes of a body of known length.
    """

    def __init__(self, holding: Holding) -> None:
        self._holding = holding
        self._pieces: list[bytes] = []
        self._joined = bytearray()  # earlier ones than the pieces: an object for each would take 10 times the memory
        self.start(0, 0, 0.0)

    def start(self, limit_bytes: int, length: int, now: float, upload: "Upload | None" = None) -> None:
        """A head is complete. `length`: its Content-Length; 0 = none. `upload` gets the body, if there is one."""
        self.size_bytes = 0
        self.left_bytes = length
        self._limit_bytes = limit_bytes
        self._upload = upload
        self._wire_bytes = self._dry_bytes = self._seen_bytes = 0
        self._began_seconds = self._looked_seconds = self._window_seconds = now
        self._window_bytes = 0

    def receive(self, data: bytes) -> None:
        """Keep bytes of the body, or pass them on. Raises BodyTooLarge or MemoryFull."""
        size_bytes = len(data)
        self.size_bytes += size_bytes
        self.left_bytes -= size_bytes
        if self.size_bytes > self._limit_bytes:
            raise too_large(self._limit_bytes)
        if self._upload is not None:
            self._upload.feed(data)
            return
        self._holding.add(size_bytes)
        self._pieces.append(data)
        if len(self._pieces) > _MANY_PIECES:
            self._joined += b"".join(self._pieces)
            self._pieces.clear()

    def framed(self, wire_bytes: int) -> None:
        """Count the received bytes of the body with its framing. Raises InvalidRequest if these are mostly framing."""
        self._wire_bytes += wire_bytes
        self._dry_bytes = self._dry_bytes + wire_bytes if self._seen_bytes == self.size_bytes else 0
        self._seen_bytes = self.size_bytes
        if self._wire_bytes > _MAX_FRAMING_BYTES + 2 * self.size_bytes or self._dry_bytes > _MAX_DRY_BYTES:
            raise InvalidRequest(
                "Too much chunked-encoding overhead in the request body: send larger chunks without extensions."
            )

    def take(self) -> bytes:
        body = b"".join((self._joined, *self._pieces)) if self._joined else b"".join(self._pieces)
        self._pieces.clear()
        self._joined.clear()
        return body

    def drop(self) -> None:
        """Discard the kept bytes, and pass nothing on: the request is refused, or its client has disconnected."""
        self._upload = None
        self._holding.shrink(len(self._joined) + sum(map(len, self._pieces)))
        self._pieces.clear()
        self._joined.clear()

    def look(self, now: float, config: ServerConfig, *, held_back: bool) -> None:
        """Judge the client's pace. Called about once a second; `held_back`: nothing was read since the last time.

        Raises RequestTimeout.
        """
        if held_back:
            passed = now - self._looked_seconds
            self._began_seconds += passed
            self._window_seconds += passed
        self._looked_seconds = now
        if now - self._began_seconds > config.body_timeout_seconds:
            raise RequestTimeout(f"Timeout: the request body took over {config.body_timeout_seconds:g} s to arrive.")
        window = now - self._window_seconds
        if window > config.body_grace_seconds:
            if self.size_bytes - self._window_bytes < window * config.body_min_bytes_per_second:
                raise RequestTimeout(
                    f"The request body was too slow: under {config.body_min_bytes_per_second:g} bytes/s for"
                    f" {window:.0f} s."
                )
            self._window_seconds, self._window_bytes = now, self.size_bytes


def too_large(limit_bytes: int) -> BodyTooLarge:
    """The error for a body over the limit of its route; 0 = the route accepts none."""
    if not limit_bytes:
        return BodyTooLarge("This URL accepts no request body: send the request without one.")
    return BodyTooLarge(f"The request body exceeds the limit of {limit_bytes} bytes.")


_HELD_UPLOAD_BYTES = 1048576
_PIECE_BYTES = 65536


class Upload:
    """A body that is passed on while it arrives; buffered bytes are reserved in `holding`, and so is each piece until
    the next one is read.

    `read_more(False)` is called when the buffer is full, `read_more(True)` when it has space again.
    """

    def __init__(self, read_more: Callable[[bool], None], holding: Holding) -> None:
        self.ended = False  # nothing more will arrive
        self.came_bytes = 0  # in all
        self._on_end: Callable[[], None] | None = None
        self._read_more = read_more
        self._holding = holding
        self._buffer = bytearray()
        self._piece_bytes = 0  # passed on last
        self._closed = False
        self._error: GatewayError | None = None
        self._arrival = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        if self._closed:
            return
        self._holding.add(len(data))
        self.came_bytes += len(data)
        self._buffer += data
        self._arrival.set()
        if len(self._buffer) >= _HELD_UPLOAD_BYTES:
            self._read_more(False)

    def end(self, error: GatewayError | None = None) -> None:
        """The body is complete, or will never be."""
        self.ended = True
        self._error = error
        self._arrival.set()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    def when_ended(self, on_end: Callable[[], None] | None) -> bool:
        """Call this once when nothing more will arrive. Returns whether a former callback was pending."""
        was_set = self._on_end is not None
        self._on_end = on_end
        return was_set

    def close(self) -> None:
        """Discard buffered and later bytes. Idempotent."""
        self._closed = True
        self._holding.shrink(len(self._buffer) + self._piece_bytes)
        self._piece_bytes = 0
        self._buffer.clear()
        self._arrival.set()

    async def peek(self, start: int, limit_bytes: int) -> bytes:
        """Some of the buffered bytes from `start` on, which stay; empty = no more bytes, or the buffer is full."""
        while start >= len(self._buffer) < limit_bytes and not (self.ended or self._closed):
            self._read_more(True)
            self._arrival.clear()
            await self._arrival.wait()
        if self._error is not None:
            raise self._error.again()
        return bytes(self._buffer[start : start + _PIECE_BYTES])

    async def collected(self) -> None:
        """Wait until the body is complete or the buffer is full."""
        while not (self.ended or self._closed) and len(self._buffer) < _HELD_UPLOAD_BYTES:
            self._arrival.clear()
            await self._arrival.wait()
        if self._error is not None:
            raise self._error.again()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        self._holding.shrink(self._piece_bytes)
        self._piece_bytes = 0
        while not self._buffer:
            if self._error is not None and not self._closed:
                raise self._error.again()
            if self._closed or self.ended:
                raise StopAsyncIteration
            self._arrival.clear()
            await self._arrival.wait()
        piece = bytes(self._buffer[:_PIECE_BYTES])
        del self._buffer[:_PIECE_BYTES]
        self._piece_bytes = len(piece)
        if len(self._buffer) < _HELD_UPLOAD_BYTES:
            self._read_more(True)
        return piece
