"""A network in memory under an event loop in virtual time: what is measured over it is exact on every machine.

A read is what one write sent. It arrives in the turn of the loop after it, at the same time.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, Self, cast

from tests.unit.scheduling.virtual_time import VirtualLoop

_HOST = "127.0.0.1"
_FIRST_PORT = 20_000
_HIGH_WATER_BYTES = 65_536


class End(asyncio.Transport):
    """One side of a connection. What it does not read yet stays in it, and beyond 64 KiB pauses the other side."""

    def __init__(self, loop: VirtualNetwork, protocol: asyncio.Protocol) -> None:
        super().__init__({"peername": (_HOST, 0), "sockname": (_HOST, 0)})
        self._loop = loop
        self._protocol = protocol
        self._other = self
        self._arrived: deque[bytes] = deque()
        self._reads = True
        self._other_waits = self._other_left = self._closing = False

    def connect(self, other: End) -> None:
        self._other = other
        self._protocol.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if data and not self._closing:
            self._other.arrive(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def arrive(self, data: bytes) -> None:
        self._arrived.append(data)
        if not (self._reads or self._other_waits) and self.unread_bytes > _HIGH_WATER_BYTES:
            self._other_waits = True
            self._other.get_protocol().pause_writing()
        self._loop.call_soon(self._deliver)

    def leave(self) -> None:
        """The other side is gone, once what it sent has been read."""
        self._other_left = True
        self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        while self._arrived and self._reads and not self._closing:
            self._protocol.data_received(self._arrived.popleft())
        if self._other_waits and not self._arrived:
            self._other_waits = False
            self._other.get_protocol().resume_writing()
        if self._other_left and not self._arrived and not self._closing:
            self._protocol.eof_received()
            self.close()

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._arrived.clear()
            self._other.leave()
            self._loop.call_soon(self._protocol.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        self._reads = True
        self._loop.call_soon(self._deliver)

    def is_reading(self) -> bool:
        return self._reads

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self._other.unread_bytes

    @property
    def unread_bytes(self) -> int:
        return sum(map(len, self._arrived))

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast(asyncio.Protocol, protocol)

    def get_protocol(self) -> asyncio.Protocol:
        return self._protocol


class Listener(asyncio.AbstractServer):
    """What `create_server` returns: it listens until it is closed."""

    def __init__(self, listening: dict[int, Callable[[], asyncio.Protocol]], port: int) -> None:
        self._listening = listening
        self._port = port
        self.sockets = [SimpleNamespace(getsockname=lambda: (_HOST, port))]

    def close(self) -> None:
        self._listening.pop(self._port, None)

    async def wait_closed(self) -> None:
        """Connections that are open stay open, as they would."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class VirtualNetwork(VirtualLoop):
    """The loop; `asyncio.start_server`, `asyncio.open_connection` and aiohttp's servers work over it."""

    def __init__(self) -> None:
        super().__init__()
        self._listening: dict[int, Callable[[], asyncio.Protocol]] = {}
        self._ports = itertools.count(_FIRST_PORT)

    async def create_server(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], host: str | None = None, port: int = 0, **_: Any
    ) -> Listener:
        port = port or next(self._ports)
        self._listening[port] = protocol_factory
        return Listener(self._listening, port)

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], host: str | None = None, port: int = 0, **_: Any
    ) -> tuple[End, asyncio.Protocol]:
        if port not in self._listening:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        client, server = End(self, protocol_factory()), End(self, self._listening[port]())
        server.connect(client)
        client.connect(server)
        return client, client.get_protocol()

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> list[Any]:
        return [(0, 0, 0, "", (_HOST, port))]
