"""Answers as a server can frame them, cut anywhere, over real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.drive.connections import BadAnswer, Connections, NoConnection, Received, ServerConnection

_OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"
_CHUNKED = _OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
_COUNTED = _OK + b"content-length: 11\r\n\r\nhello world"

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def _server(talk: Talk) -> AsyncIterator[str]:
    talking: set[asyncio.Task[None]] = set()

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        talking.add(task)
        with suppress(OSError, asyncio.IncompleteReadError):  # the client is gone
            await talk(reader, writer)
        writer.close()

    async with await asyncio.start_server(served, "127.0.0.1", 0) as server, asyncio.timeout(10):
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"
        await asyncio.gather(*talking)


def _saying(*answers: bytes, closes: bool = False) -> Talk:
    """One of the answers to each request of a connection, in turn."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
        if not closes:
            await reader.read()

    return talk


async def _ask(connections: Connections, url: str, body: bytes = b"") -> Received:
    async with asyncio.timeout(10), connections.post(url, "/x", body, time.monotonic) as received:
        while not received.is_over:
            await received.more()
    return received


def _text(received: Received) -> bytes:
    return b"".join(data for _, data in received.take())


class _Wire(asyncio.Transport):
    """A transport that sends into nothing, and remembers whether it was closed."""

    closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Forgets it, as nobody listens."""

    def abort(self) -> None:
        self.closed = True


@settings(deadline=None)
@given(
    answer=st.sampled_from([_CHUNKED, _COUNTED, b"HTTP/1.1 100 Continue\r\n\r\n" + _COUNTED]),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_where_the_network_cuts_an_answer_changes_nothing_of_it(answer: bytes, cuts: list[int]) -> None:
    moments = iter(range(1000))
    received = Received(lambda: next(moments))
    connection, wire = ServerConnection(lambda: 0.0), _Wire()
    connection.connection_made(wire)
    connection.send(b"request", received)
    edges = sorted({0, len(answer), *(cut for cut in cuts if cut < len(answer))})
    for start, end in pairwise(edges):
        assert not received.is_over
        connection.data_received(answer[start:end])
    assert received.ended_at is not None
    assert (received.status, received.headers["content-type"]) == (200, "text/plain")
    times = [at for at, _ in received.reads]
    assert times == sorted(times)
    assert _text(received) == b"hello world"
    assert not wire.closed


async def test_a_connection_is_used_again_after_a_whole_answer_and_not_after_half_of_one() -> None:
    made = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal made
        made += 1
        await _saying(_CHUNKED, _COUNTED, _CHUNKED[:-10])(reader, writer)

    async with _server(talk) as url, Connections({}, time.monotonic) as connections:
        assert [_text(await _ask(connections, url)) for _ in range(2)] == [b"hello world"] * 2
        assert made == 1
        async with asyncio.timeout(10), connections.post(url, "/x", b"", time.monotonic) as received:
            while not received.reads:
                await asyncio.sleep(0)
        assert _text(await _ask(connections, url)) == b"hello world"
        assert made == 2


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async with _server(_saying(_OK + b"\r\nhello", closes=True)) as url, Connections({}, time.monotonic) as ones:
        received = await _ask(ones, url)
    assert received.ended_at is not None
    assert _text(received) == b"hello"


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.2\r\n\r\n", _CHUNKED[:-10] + b"zz\r\nmore"])
async def test_what_is_not_http_breaks_the_answer_off(answer: bytes) -> None:
    async with _server(_saying(answer)) as url, Connections({}, time.monotonic) as connections:
        with pytest.raises(BadAnswer):
            await _ask(connections, url)


async def test_an_answer_that_is_read_late_wakes_its_reader_before_its_end() -> None:
    part = b"x" * 65536
    length = 16 * len(part)

    async with (
        _server(_saying(_OK + b"content-length: %d\r\n\r\n" % length + 16 * part)) as url,
        Connections({}, time.monotonic) as connections,
        asyncio.timeout(10),
        connections.post(url, "/x", b"", time.monotonic) as received,
    ):
        await received.more()
        first = len(_text(received))
        assert first > 0
        while not received.is_over:
            await received.more()
            first += len(_text(received))
        assert first + len(_text(received)) == length


async def test_a_user_in_the_url_is_sent_as_such_and_other_headers_as_they_are() -> None:
    heads: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(_COUNTED)

    async with _server(talk) as url:
        with_user = url.replace("http://", "http://me:a%40b@") + "/base"
        async with Connections({"x-one": "1"}, time.monotonic) as connections:
            await _ask(connections, with_user, b"body")
    (head,) = heads
    assert head.startswith(b"POST /base/x HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"authorization: Basic bWU6YUBi\r\n" in head
    assert b"x-one: 1\r\n" in head
    assert b"content-length: 4\r\n" in head


async def test_a_host_without_an_address_is_no_connection() -> None:
    async with Connections({}, time.monotonic) as connections:
        with pytest.raises(NoConnection, match=r"no-such-host\.invalid"):
            await _ask(connections, "http://no-such-host.invalid:80")


async def test_each_server_gets_the_requests_of_its_own_url() -> None:
    first, other = (_OK + b"content-length: 1\r\n\r\n" + name for name in (b"a", b"b"))
    async with (
        _server(_saying(first, first)) as one,
        _server(_saying(other)) as two,
        Connections({}, time.monotonic) as connections,
    ):
        said = [_text(await _ask(connections, url)) for url in (one, two, one)]
    assert said == [b"a", b"b", b"a"]
