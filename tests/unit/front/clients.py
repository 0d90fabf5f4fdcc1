"""A client of the front, in memory, and the host that it talks to."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from gateway.config import ServerConfig
from gateway.core.errors import GatewayError
from gateway.core.front.connection import AT_ONCE, Beginnings, ClientConnection
from gateway.core.front.http_request import KNOWN_HEADERS, HttpRequest
from gateway.core.front.reply import JSON, ClientResponse
from gateway.core.resources import MemoryBudget
from tests.routes import ALL_ROUTES
from tests.unit.scheduling.virtual_time import run, turns

GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
)
UPLOAD = b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n"
Story = Callable[[HttpRequest, ClientResponse], Awaitable[None]]


async def echo(incoming: HttpRequest, reply: ClientResponse) -> None:
    """The answer is the request's body."""
    reply.send(200, JSON, b"", incoming.body or incoming.path)


class FakeTransport:
    """The client's side: what it got, and whether it is still there."""

    def __init__(self) -> None:
        self.sent = b""
        self.unsent_bytes = 0
        self.reading = True
        self.closed = self.aborted = self.half_closed = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def set_write_buffer_limits(self, high: int) -> None:
        assert high > 0

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def is_reading(self) -> bool:
        return self.reading

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.half_closed = True

    def get_extra_info(self, name: str) -> None:
        assert name == "socket"


class Scene:
    """One client, and a host whose answers are a story."""

    def __init__(self, story: Story = echo, *, accepts: bool = True, **server: Any) -> None:
        self.config = ServerConfig.model_validate(server)
        self.known_headers = KNOWN_HEADERS
        self.handler = self
        self.check_key = self.refuse
        self.routes = ALL_ROUTES
        self.memory = MemoryBudget(self.config.memory_budget_bytes)
        self.read_buffer = memoryview(bytearray(65536))
        self.story = story
        self.accepts = accepts
        self.here: list[ClientConnection] = []
        self.served: list[HttpRequest] = []
        self.bodies: list[bytes] = []  # of these
        self.held: list[int] = []
        self.ended: list[str] = []
        self.refusal: GatewayError | None = None
        self.beginnings = Beginnings()
        self.loop = asyncio.get_running_loop()
        self.client = ClientConnection(self, self.loop)
        self.wire = FakeTransport()
        self.client.connection_made(cast(asyncio.BaseTransport, self.wire))

    # The host.

    def connected(self, connection: ClientConnection) -> bool:
        self.here.append(connection)
        return self.accepts

    def disconnected(self, connection: ClientConnection) -> None:
        self.here.remove(connection)

    def refuse(self, headers: Mapping[bytes, bytes]) -> None:
        if self.refusal is not None:
            raise self.refusal

    @contextmanager
    def busy(self) -> Iterator[None]:
        """No answer may begin, because others do."""
        assert all(self.beginnings.may_begin(self.client) for _ in range(AT_ONCE))
        yield
        for _ in range(AT_ONCE):
            self.beginnings.begun()

    def start_draining(self) -> None: ...

    async def serve(self, incoming: HttpRequest, connection: ClientConnection) -> None:
        self.served.append(incoming)
        self.bodies.append(incoming.body)
        self.held.append(incoming.held_bytes)
        reply = ClientResponse(connection, "id", incoming, incoming.keep_alive)
        connection.attach(reply)
        try:
            if incoming.error is not None:
                reply.fail(incoming.error)
            else:
                await self.story(incoming, reply)
            self.ended.append("answered")
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        except GatewayError as error:
            reply.fail(error)
            self.ended.append("refused")

    # The test's side.

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.client.data_received(piece)
            await turns(3)

    def leave(self) -> None:
        self.client.connection_lost(None)

    @property
    def statuses(self) -> list[int]:
        return [int(part.split(b" ", 1)[0]) for part in self.wire.sent.split(b"HTTP/1.1 ")[1:]]


def play(scenario: Callable[[Scene], Awaitable[None]], story: Story = echo, **options: Any) -> Scene:
    """Run a scenario in virtual time."""

    async def main() -> Scene:
        scene = Scene(story, **options)
        await scenario(scene)
        return scene

    return run(main())


def wait_for(event: asyncio.Event) -> Story:
    async def story(incoming: HttpRequest, reply: ClientResponse) -> None:
        await event.wait()
        await echo(incoming, reply)

    return story


async def hang(incoming: HttpRequest, reply: ClientResponse) -> None:
    """Never answers."""
    await asyncio.Event().wait()
