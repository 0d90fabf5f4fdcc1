"""The two sides of an answer, in memory."""

import asyncio
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import cast

from gateway.config import HealthConfig
from gateway.core.backends.backend import Backend
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.settings import BackendConfig
from gateway.core.errors import BackendError
from gateway.core.relay.connection import BackendConnection


@dataclass
class FakeTransport:
    """Keeps what is written, and what was done to it."""

    sent: bytes = b""
    reading: bool = True
    closing: bool = False
    aborted: bool = False
    unsent_bytes: int = 0
    protocol: asyncio.BaseProtocol = field(default_factory=asyncio.Protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def write(self, data: bytes) -> None:
        self.sent += data

    def writelines(self, pieces: Iterable[bytes]) -> None:
        self.sent += b"".join(pieces)

    def abort(self) -> None:
        self.aborted = self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True


@dataclass
class FakeReceiver:
    """Records what a connection passes on; an event of `said` for each thing that is new at a call."""

    connection: BackendConnection
    said: list[str] = field(default_factory=list)
    data: bytes = b""
    error: BackendError | None = None

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return self.connection.headers

    def received(self) -> None:
        connection = self.connection
        head = f"head {connection.status}"
        if connection.status and head not in self.said:
            self.said.append(head)
        if connection.parts:
            self.said.append("body")
            self.data += b"".join(connection.parts)
            connection.parts.clear()
        if connection.ended:
            self.said.append("end")
        self.said.append("received")

    def failed(self, error: BackendError) -> None:
        self.said.append(f"failed {type(error).__name__}")
        self.error = error


@dataclass
class FakeSink:
    """A client that takes everything, or nothing."""

    begun: bool = False
    blocked: bool = False
    chunked: bool = False
    complete: bool = False
    status: int = 0
    content_type: bytes = b""
    extra: bytes = b""
    body: bytes = b""
    framed: int = 0  # writes of chunks
    on_writable: Callable[[], None] | None = None
    comments: int = 0
    blank_lines: int = 0

    def comment(self, blank_line: bool = True) -> None:
        self.comments += 1
        self.blank_lines += blank_line

    def send(self, status: int, content_type: bytes, extra: bytes, body: bytes) -> None:
        assert not self.begun
        self.begun = self.complete = True
        self.status, self.content_type, self.extra, self.body = status, content_type, extra, body

    def begin(self, status: int, content_type: bytes, extra: bytes) -> None:
        assert not self.begun
        self.begun = True
        self.status, self.content_type, self.extra = status, content_type, extra

    def write(self, data: bytes, framed: bool = False) -> bool:
        assert framed <= self.chunked
        assert self.begun
        assert not self.complete
        assert data
        self.framed += framed
        self.body += b"".join(re.findall(rb"(?s)[0-9a-f]+\r\n(.*?\n\n)\r\n", data)) if framed else data
        return self.blocked

    def when_writable(self, resume: Callable[[], None] | None) -> None:
        self.on_writable = resume

    def end(self) -> None:
        assert self.begun
        assert not self.complete
        self.complete = True


def connected(made_at: float = 0.0) -> tuple[BackendConnection, FakeTransport]:
    """An open connection to nowhere."""
    connection, transport = BackendConnection(made_at), FakeTransport()
    connection.connection_made(cast(asyncio.BaseTransport, transport))
    return connection, transport


def backend(url: str = "http://10.0.0.1:8000", api_key: str = "") -> Backend:
    return Backend(0, BackendConfig(url=url, name="a", api_key=api_key), health=HealthConfig(), random=Random(1))


def a_fleet() -> Fleet:
    return Fleet([BackendConfig(url="http://10.0.0.1:8000")], HealthConfig(), clock=lambda: 0.0, random=Random(1))
