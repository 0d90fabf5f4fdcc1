"""The listening side, over loopback."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, cast

from gateway.config import ServerConfig
from gateway.core.front.connection import ClientConnection
from gateway.core.front.http_request import KNOWN_HEADERS, HttpRequest
from gateway.core.front.reply import ClientResponse
from gateway.core.front.server import Server
from gateway.core.resources import MemoryBudget
from tests.routes import ALL_ROUTES

GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


class FakeHandler:
    """Answers when the test releases it."""

    def __init__(self) -> None:
        self.draining = False
        self.known_headers = KNOWN_HEADERS
        self.check_key = None
        self.routes = ALL_ROUTES
        self.release = asyncio.Event()
        self.release.set()
        self.serving = asyncio.Event()
        self.text = b"data: done\n\n"
        self.began: Callable[[], object] = lambda: None

    def start_draining(self) -> None:
        self.draining = True

    async def serve(self, incoming: HttpRequest, connection: ClientConnection) -> None:
        self.began()
        reply = ClientResponse(connection, "id", incoming, incoming.keep_alive and not self.draining)
        connection.attach(reply)
        reply.begin(200, b"text/event-stream", b"")
        self.serving.set()
        await self.release.wait()
        reply.write(self.text)
        reply.end()


@asynccontextmanager
async def serving(**config: Any) -> AsyncIterator[tuple[Server, FakeHandler]]:
    handler = FakeHandler()
    settings = ServerConfig.model_validate({"host": "127.0.0.1", "port": 0, "drain_delay_seconds": 0} | config)
    server = Server(settings, handler, asyncio.get_running_loop().time, memory=MemoryBudget(100_000))
    async with asyncio.timeout(10), server.listening():
        yield server, handler


@asynccontextmanager
async def client(server: Server) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def test_clients_are_answered_and_counted() -> None:
    async with serving() as (server, handler):
        handler.release.clear()
        async with client(server) as (reader, writer):
            writer.write(GET)
            await handler.serving.wait()
            assert repr(server) == "<Server 1 clients, 1 answers under way>"
            handler.release.set()
            assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
            assert server.answering == 0


async def test_more_clients_than_allowed_are_turned_away() -> None:
    async with serving(max_connections=1) as (server, _), client(server) as (reader, writer):
        writer.write(GET)
        await reader.readuntil(b"0\r\n\r\n")
        async with client(server) as (second, _):
            with suppress(ConnectionResetError):
                assert await second.read() == b""


async def test_draining_finishes_requests_and_accepts_no_new_connection() -> None:
    async with serving() as (server, handler):
        handler.release.clear()
        async with client(server) as (reader, writer):
            writer.write(GET)
            await handler.serving.wait()
            port = server.port
            draining = asyncio.create_task(server.drain())
            await asyncio.sleep(0)
            assert handler.draining
            while True:
                try:
                    _, other = await asyncio.open_connection("127.0.0.1", port)
                except ConnectionError:
                    break
                other.close()
            assert not draining.done()
            handler.release.set()
            assert (await reader.read()).endswith(b"data: done\n\n\r\n0\r\n\r\n")
            await draining


async def test_draining_closes_clients_that_ask_for_nothing() -> None:
    async with serving() as (server, handler):
        handler.release.clear()
        async with client(server) as (idle, _), client(server) as (_, writer):
            writer.write(GET)
            await handler.serving.wait()
            draining = asyncio.create_task(server.drain())
            assert await idle.read() == b""
            handler.release.set()
            await draining


async def test_what_does_not_end_in_time_is_cut_with_an_error() -> None:
    async with serving(drain_timeout_seconds=0.05) as (server, handler):
        handler.release.clear()
        async with client(server) as (reader, writer):
            writer.write(GET)
            await handler.serving.wait()
            await server.drain()
            await server._cut()
            answer = await reader.read()
            assert b'"code":"shutting_down"' in answer
            assert not answer.endswith(b"0\r\n\r\n")


async def test_draining_waits_for_clients_that_have_not_taken_their_answers_yet() -> None:
    size = 8_000_000
    async with serving(drain_timeout_seconds=10) as (server, handler):
        handler.text = b"a" * size
        async with client(server) as (reader, writer):
            writer.write(GET)
            while server.answering or not handler.serving.is_set():
                await asyncio.sleep(0)
            draining = asyncio.create_task(server.drain())
            await asyncio.sleep(0.2)
            assert not draining.done()
            assert len(await reader.read()) > size
            await draining


async def test_of_many_requests_that_come_at_once_some_begin_in_each_turn_of_the_loop() -> None:
    loop, count, began, turn = asyncio.get_running_loop(), 300, Counter[int](), 0
    async with serving() as (server, handler), AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client(server)) for _ in range(count)]
        handler.began = lambda: began.update([turn])

        def count_turns() -> None:
            nonlocal turn
            turn += 1
            if began.total() < count:
                loop.call_soon(count_turns)

        for _, writer in clients:
            writer.write(GET)
        count_turns()
        for reader, _ in clients:
            assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
        assert began.total() == count
        assert max(began.values()) <= 64


class Turns:
    """A connection that always has another request to begin."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.begun = 0

    def proceed(self) -> None:
        self.begun += self.server.beginnings.may_begin(cast(ClientConnection, self))


async def test_a_request_that_is_put_off_is_not_overtaken_by_clients_that_go_on_at_once() -> None:
    async with serving() as (server, _):
        busy, late = Turns(server), Turns(server)
        while server.beginnings.may_begin(cast(ClientConnection, busy)):
            pass
        late.proceed()
        assert late.begun == 0
        for _turn in range(3):
            server.beginnings.begun()  # and is answered at once
            busy.proceed()
        assert late.begun == 1


async def test_slow_clients_are_looked_after() -> None:
    async with serving(keep_alive_seconds=0.05) as (server, _), client(server) as (reader, _):
        assert await reader.read() == b""
