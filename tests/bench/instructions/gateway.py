"""The whole gateway between fake transports: no socket, no kernel, no other process.

Everything is on that a fleet has on: prefix routing, caps, retries, metrics, access log, prefix report.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import uvloop

from gateway.app import Gateway
from gateway.config.file import parse
from gateway.core.backends.facts import Facts, ModelCard
from gateway.core.backends.health import ProbeResult
from gateway.core.front.connection import ClientConnection
from gateway.core.relay.connection import BackendConnection

MODEL = "mock"
_BACKENDS = 2
_FACTS = Facts(
    version="0.25.0",
    models=(ModelCard(MODEL, max_model_len=131_072),),
    block_size_tokens=16,
    kv_cache_tokens=430_000,
    prefix_caching=True,
    max_num_seqs=4096,
    process_start_seconds=1.0,
)
_PROBES = 3  # that find a backend up
_BETWEEN_SECONDS = 0.002  # requests


class _Transport(asyncio.Transport):
    """An end of a connection that is open and takes everything at once."""

    closed = False

    def is_closing(self) -> bool:
        return self.closed

    def is_reading(self) -> bool:
        return True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 4711) if name == "peername" else default

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


class Loop(uvloop.Loop):
    """An event loop whose outgoing connections end in an engine in this process.

    `answered`: the chunks of the answer to a request; each arrives in a turn of the loop of its own.
    """

    def __init__(self, answered: Callable[[bytes], list[bytes]]) -> None:
        super().__init__()
        self.answered = answered
        self._passed_seconds = 0.0
        self._began_seconds = super().time()

    def time(self) -> float:
        """The clock of loop and gateway goes on with the requests: what depends on time does not on the machine."""
        return self._began_seconds + self._passed_seconds

    def pass_time(self, seconds: float = _BETWEEN_SECONDS) -> None:
        """A request comes, or so much time passes."""
        self._passed_seconds += seconds

    def begin(self, backend: "Backend", chunks: Iterator[bytes]) -> None:
        """Begin an answer: its next chunk arrives in the next turn."""
        self.call_soon(self._send, backend, chunks)

    def _send(self, backend: "Backend", chunks: Iterator[bytes]) -> None:
        chunk = next(chunks, None)
        if chunk is not None:
            backend.data_received(chunk)
            self.call_soon(self._send, backend, chunks)

    async def create_connection(self, factory: Any, *_: Any, **__: Any) -> tuple[asyncio.Transport, Any]:  # type: ignore[override]
        protocol = factory()
        engine = _Engine(self, protocol)
        protocol.connection_made(engine)
        return engine, protocol


class _Engine(_Transport):
    """A backend's end of a connection."""

    def __init__(self, loop: Loop, connection: "Backend") -> None:
        super().__init__()
        self._loop = loop
        self._connection = connection

    def write(self, data: Any) -> None:
        self._loop.begin(self._connection, iter(self._loop.answered(data)))


class _Wire(asyncio.BufferedProtocol):
    """A client connected to an engine: what the fake ends cost without a gateway between them."""

    def __init__(self, loop: Loop) -> None:
        self._buffer = bytearray(1 << 16)
        self._engine = _Engine(loop, self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, Client)
        self._client = transport

    def get_buffer(self, _: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._engine.write(bytes(self._buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        self._client.write(data)


Backend = BackendConnection | _Wire


class Client(_Transport):
    """A client's end of a connection; `gateway`: None = to an engine. `end`: the last bytes of every answer."""

    def __init__(self, gateway: Gateway | None, end: bytes) -> None:
        super().__init__()
        self._end = end
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        self._loop = loop
        self._connection = ClientConnection(gateway.server, loop) if gateway else _Wire(loop)
        self._connection.connection_made(self)
        self._answered: asyncio.Future[Any] = self._loop.create_future()

    def write(self, data: Any) -> None:
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200 "):
            self._answered.set_exception(RuntimeError(f"not answered: {bytes(data)!r}"))
        elif data.endswith(self._end):
            self._answered.set_result(data)

    async def ask(self, request: bytes) -> bytes:
        """Send a request as a socket would hand it over, and take its whole answer. Returns the last of its bytes."""
        self._answered = self._loop.create_future()
        self._loop.pass_time()
        size = len(buffer := self._connection.get_buffer(len(request)))
        while request:
            piece, request = request[:size], request[size:]
            buffer[: len(piece)] = piece
            self._connection.buffer_updated(len(piece))
        answered = await self._answered
        await asyncio.sleep(0)
        return bytes(answered)

    def leave(self) -> None:
        """Close the connection."""
        self._connection.connection_lost(None)


@contextmanager
def clients(
    count: int, end: bytes, slots: int = 4096, **sections: dict[str, Any]
) -> Iterator[tuple[Gateway, list[Client]]]:
    """So many clients of a gateway whose backends are up; inside a `Loop`. `sections`: more of its configuration."""
    urls = [{"url": f"http://10.0.0.{number}:8000", "max_in_flight": slots} for number in range(_BACKENDS)]
    config = parse({"backends": urls, "prefix_report": {"enabled": True}, **sections})
    with Path("/dev/null").open("wb") as out:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        gateway = Gateway(config, out, loop.time, random=Random(1))
        assert gateway.core.access_log is not None
        for backend in gateway.core.fleet.backends:
            gateway.core.fleet.learned(backend, _FACTS)
            for _ in range(_PROBES):
                gateway.core.fleet.probed(backend, ProbeResult.OK)
        with gateway.core.access_log:
            connected = [Client(gateway, end) for _ in range(count)]
            yield gateway, connected
            for client in connected:
                client.leave()


@contextmanager
def unrouted(count: int, end: bytes) -> Iterator[tuple[None, list[Client]]]:
    """Clients of an engine, without a gateway; inside a `Loop`."""
    yield None, [Client(None, end) for _ in range(count)]
