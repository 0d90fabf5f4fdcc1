"""Clients that are slow, on purpose or not: each is bounded in time and memory, and nobody else notices."""

import asyncio
import tracemalloc

import pytest

from tests.clients import Client, chat, request
from tests.fault.rig import LoopLag, UnderTest, holds, running
from tests.scripted import ScriptedBackend
from tests.scripts import drained, hang, head, json_answer, last_chunk, raw, stream, whole

STREAM = request(chat(stream=True))
PIECE = b"8000\r\n" + b"x" * 0x7FFE + b"\n\n\r\n"
MEBIBYTE = 1048576


def now() -> float:
    return asyncio.get_running_loop().time()


def blocked(under_test: UnderTest) -> int:
    """How many clients take nothing at the moment."""
    return sum(connection.blocked for connection in under_test.gateway.server._connections)


async def test_a_client_that_does_not_read_is_cut_after_the_time_set_and_its_backend_freed(
    backend: ScriptedBackend,
) -> None:
    backend.plays(head(200), drained(PIECE, 4000), hang())
    async with running(backend, sections={"server": {"write_stall_seconds": 1}}) as under_test:
        client = await under_test.client(receive_buffer_bytes=4096)
        since = now()
        await client.send(STREAM)
        await holds(lambda: blocked(under_test) == 1, "the client is blocked")
        await holds(lambda: under_test.in_flight == 0, "its slot is freed")
        assert now() - since > 0.9
        await holds(lambda: backend.ledger[0].peer_left_at is not None, "the backend is told")
        client.close()
        await under_test.comes_to_rest()
        assert under_test.outcomes == {"client_gone": 1}


async def test_clients_that_do_not_read_take_little_memory_each(backend: ScriptedBackend) -> None:
    backend.plays(head(200), drained(PIECE, 2000), hang())
    count = 40
    async with running(backend) as under_test:
        clients = [await under_test.client(receive_buffer_bytes=4096) for _ in range(count)]
        for client in clients:
            await client.send(STREAM)
        await holds(lambda: blocked(under_test) == count, "all clients are blocked")
        buffers = [c._transport.get_write_buffer_size() for c in under_test.gateway.server._connections]  # type: ignore[union-attr]
        pools = under_test.gateway.core.relay._under_way
        await holds(lambda: all(each._connection._intake.is_held for each in pools), "backends are read no more")
        assert max(buffers) <= MEBIBYTE // 4
        async with await under_test.client() as other:  # somebody else is served meanwhile
            backend.plays_once(*stream(3))
            await other.send(STREAM)
            assert (await other.answer()).is_done
        for client in clients:
            client.close()


async def test_a_client_that_reads_slowly_but_steadily_gets_everything(backend: ScriptedBackend) -> None:
    pieces = 25
    backend.plays(head(200), drained(PIECE, pieces), raw(b"e\r\ndata: [DONE]\n\n\r\n"), last_chunk())
    async with (
        running(backend, sections={"server": {"write_stall_seconds": 3}}) as under_test,
        await under_test.client(receive_buffer_bytes=4096) as client,
    ):
        since = now()
        await client.send(STREAM)
        received, tail = 0, b""
        while not tail.endswith(b"0\r\n\r\n"):
            data = await client.read(16384)
            received, tail = received + len(data), (tail + data)[-16:]
            await asyncio.sleep(0.08)
        assert received > pieces * 0x8000
        assert now() - since > 3


async def test_answers_that_a_pipelining_client_does_not_read_do_not_pile_up(backend: ScriptedBackend) -> None:
    backend.plays(raw(whole(200, b"x" * 500_000)))
    async with running(backend) as under_test, await under_test.client(receive_buffer_bytes=4096) as client:
        sending = asyncio.create_task(client.send(request(chat()) * 2000))
        await holds(lambda: blocked(under_test) == 1, "the client is blocked")
        await asyncio.sleep(0.3)
        (connection,) = under_test.gateway.server._connections
        assert connection._transport is not None
        assert connection._transport.get_write_buffer_size() < 2 * MEBIBYTE
        assert len(backend.ledger) < 20
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_thousands_of_pipelined_requests_are_answered_in_order(backend: ScriptedBackend) -> None:
    count = 2000
    async with running(backend) as under_test, await under_test.client() as client:
        everything = b"".join(
            request(b"", b"x-request-id: n%d" % number, method=b"GET", target=b"/v1/models") for number in range(count)
        )
        piece = 1500
        sending = asyncio.create_task(
            client.send(*[everything[start : start + piece] for start in range(0, len(everything), piece)])
        )
        for number in range(count):
            answer = await client.answer()
            assert (answer.status, answer.header("x-request-id")) == (200, f"n{number}")
        await sending


async def test_pipelined_requests_that_wait_are_bounded(backend: ScriptedBackend) -> None:
    backend.plays(hang())
    async with running(backend) as under_test, await under_test.client() as client:
        await client.send(STREAM)
        await holds(lambda: len(backend.ledger) == 1, "the first one runs")
        sending = asyncio.create_task(client.send(*[request(chat("y" * 1000))] * 20_000))
        await asyncio.sleep(0.5)
        (connection,) = under_test.gateway.server._connections
        assert len(connection._pipelined) <= 4
        assert len(connection._stash) <= 65536
        assert not sending.done()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        client.reset()  # seen though nothing is read; a FIN would stand in line behind what was not sent yet


async def test_pipelined_bodies_that_wait_are_bounded(backend: ScriptedBackend) -> None:
    backend.plays(hang())
    async with running(backend) as under_test, await under_test.client() as client:
        await client.send(STREAM)
        await holds(lambda: len(backend.ledger) == 1, "the first one runs")
        sending = asyncio.create_task(client.send(*[request(chat("y" * 2_000_000))] * 15))
        await asyncio.sleep(0.5)
        (connection,) = under_test.gateway.server._connections
        assert sum(len(each.body) for each in connection._pipelined) < 4 * MEBIBYTE
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        client.reset()


QUICK = {"server": {"header_timeout_seconds": 1, "body_grace_seconds": 1, "keep_alive_seconds": 1}}


async def test_a_head_that_trickles_is_cut_with_408(backend: ScriptedBackend) -> None:
    async with running(backend, sections=QUICK) as under_test:

        async def trickle(client: Client) -> None:
            for byte in STREAM[:50] + b"x" * 200:
                await client.send(bytes([byte]))
                await asyncio.sleep(0.1)

        since = now()
        async with await under_test.client() as client:
            task = asyncio.create_task(trickle(client))
            assert (await client.answer()).status == 408
            assert now() - since > 0.9
            await client.end()
            await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("target", [b"/v1/chat/completions", b"/v1/audio/transcriptions"])
async def test_a_body_that_trickles_is_cut_with_408(backend: ScriptedBackend, target: bytes) -> None:
    form = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nscripted\r\n'
    form += b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    data = request(form + b" " * 900, b"content-type: multipart/form-data; boundary=b", target=target)
    async with running(backend, sections=QUICK) as under_test:

        async def trickle(client: Client) -> None:
            await client.send(data[:-800])
            for byte in data[-800:-1]:
                await client.send(bytes([byte]))
                await asyncio.sleep(0.1)

        since = now()
        async with await under_test.client() as client:
            task = asyncio.create_task(trickle(client))
            assert (await client.answer()).status == 408
            assert now() - since > 0.9
            await client.end()
            await asyncio.gather(task, return_exceptions=True)
        await under_test.comes_to_rest()


async def test_a_body_that_stops_is_cut_with_408(backend: ScriptedBackend) -> None:
    async with running(backend, sections=QUICK) as under_test, await under_test.client() as client:
        await client.send(STREAM[:-1])
        assert (await client.answer()).status == 408
        assert not (await client.end()).reset


async def test_idle_connections_are_closed_in_good_order(backend: ScriptedBackend) -> None:
    async with running(backend, sections=QUICK) as under_test:
        for first in (b"", request(chat())):
            since = now()
            async with await under_test.client() as client:
                if first:
                    await client.send(first)
                    await client.answer()
                assert not (await client.end()).reset
                assert now() - since > 0.9


async def test_hundreds_of_slow_clients_delay_nobody(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        slow = [await under_test.client() for _ in range(300)]
        for number, client in enumerate(slow):
            await client.send(STREAM[: 20 + number % 150])
        async with LoopLag() as lag:
            for _ in range(50):
                assert (await under_test.ask()).status == 200
        assert lag.longest_seconds < 0.25
        for client in slow:
            client.close()


async def test_connections_over_the_limit_are_closed_and_the_others_served(backend: ScriptedBackend) -> None:
    async with running(backend, sections={"server": {"max_connections": 3}}) as under_test:
        clients = [await under_test.client() for _ in range(3)]
        await holds(lambda: len(under_test.gateway.server._connections) == 3, "three are connected")
        async with await under_test.client() as one_more:
            await one_more.end(1.0)
        for client in clients:
            await client.send(request(chat()))
            assert (await client.answer()).status == 200
            client.close()
        await under_test.comes_to_rest()
        assert (await under_test.ask()).status == 200


async def test_a_client_that_waits_for_100_continue_gets_it_and_its_answer(backend: ScriptedBackend) -> None:
    backend.plays(*json_answer())
    data = request(chat(), b"expect: 100-continue")
    cut = data.index(b"\r\n\r\n") + 4
    async with running(backend) as under_test, await under_test.client() as client:
        await client.send(data[:cut])
        assert await client.read() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(data[cut:])
        assert (await client.answer()).status == 200


async def test_a_client_that_waits_for_100_continue_is_refused_before_it_sends(backend: ScriptedBackend) -> None:
    head_only = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 99999999\r\n\r\n"
    )
    async with running(backend) as under_test, await under_test.client() as client:
        await client.send(head_only)
        data = await client.read()
        assert data.startswith(b"HTTP/1.1 413 ")


async def test_idle_connections_take_little_memory_and_no_time(backend: ScriptedBackend) -> None:
    count = 1000
    async with running(backend) as under_test:
        clients = [await under_test.client() for _ in range(50)]
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        clients += [await under_test.client() for _ in range(count)]
        await holds(lambda: len(under_test.gateway.server._connections) == count + 50, "all are connected")
        each = (tracemalloc.get_traced_memory()[0] - before) / count
        tracemalloc.stop()
        assert each < 16 * 1024, each
        async with LoopLag() as lag:
            for _ in range(30):
                assert (await under_test.ask()).status == 200
        assert lag.longest_seconds < 0.25
        for client in clients:
            client.close()


async def test_a_client_that_does_not_read_does_not_hold_up_the_end_of_the_gateway(backend: ScriptedBackend) -> None:
    backend.plays(head(200), drained(PIECE, 4000), hang())
    async with running(backend) as under_test:
        client = await under_test.client(receive_buffer_bytes=4096)
        await client.send(STREAM)
        await holds(lambda: blocked(under_test) == 1, "the client is blocked")
        server = under_test.gateway.server
        await server._cut()
        assert not server._connections
        await under_test.comes_to_rest()
        assert under_test.outcomes == {"cut_by_shutdown": 1}
        client.close()
