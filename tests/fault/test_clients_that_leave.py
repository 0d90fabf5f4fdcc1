"""Clients that leave: in whatever phase of a request, the backend's work stops at once and everything is given back."""

import asyncio
import random
from collections.abc import Callable

import pytest

from tests.clients import Client, chat, request
from tests.fault.rig import UnderTest, holds, running
from tests.scripted import ScriptedBackend
from tests.scripts import deaf, drained, hang, head, json_answer, pause, raw, stream, tokens, whole

LEAVING = pytest.mark.parametrize("leave", [Client.close, Client.reset, Client.half_close])
STREAM = request(chat(stream=True))


async def aborted(backend: ScriptedBackend, number: int = -1) -> None:
    """The backend is told within 100 ms that nobody wants the answer any more."""
    await holds(lambda: backend.ledger[number].peer_left_at is not None, "the backend is told")


async def sent(under_test: UnderTest, backend: ScriptedBackend, data: bytes) -> Client:
    """A client whose request has reached the backend."""
    before = len(backend.ledger)
    client = await under_test.client()
    await client.send(data)
    await holds(lambda: len(backend.ledger) > before, "the request arrives")
    return client


@LEAVING
@pytest.mark.parametrize("data", [STREAM, request(chat())])
async def test_leaving_while_waiting_for_headers(
    backend: ScriptedBackend, data: bytes, leave: Callable[[Client], None]
) -> None:
    backend.plays(hang())
    async with running(backend) as under_test:
        client = await sent(under_test, backend, data)
        leave(client)
        await aborted(backend)
        await under_test.comes_to_rest()
        assert under_test.outcomes == {"client_gone": 1}
        client.close()


@LEAVING
async def test_leaving_in_the_middle_of_a_stream(backend: ScriptedBackend, leave: Callable[[Client], None]) -> None:
    backend.plays(*tokens(3), hang())
    async with running(backend) as under_test:
        client = await sent(under_test, backend, STREAM)
        while b"t2" not in await client.read():
            pass
        leave(client)
        await aborted(backend)
        await under_test.comes_to_rest()
        assert under_test.outcomes == {"client_gone": 1}
        client.close()


@LEAVING
async def test_leaving_in_the_middle_of_a_plain_answer(
    backend: ScriptedBackend, leave: Callable[[Client], None]
) -> None:
    backend.plays(raw(whole(200, b"x" * 1000)[:-100]), hang())
    async with running(backend) as under_test:
        client = await sent(under_test, backend, request(chat()))
        await asyncio.sleep(0.01)
        leave(client)
        await aborted(backend)
        client.close()


@LEAVING
async def test_leaving_while_waiting_in_line(backend: ScriptedBackend, leave: Callable[[Client], None]) -> None:
    backend.plays(hang())
    async with running(backend, per_backend={"max_in_flight": 1}) as under_test:
        first = await sent(under_test, backend, STREAM)
        second = await under_test.client()
        await second.send(STREAM)
        await holds(lambda: under_test.gateway.core.lease_broker.waiting == 1, "one waits")
        leave(second)
        await holds(lambda: under_test.gateway.core.lease_broker.waiting == 0, "it left the line")
        first.close()
        await under_test.comes_to_rest()
        assert len(backend.ledger) == 1  # the one in line was never sent
        assert under_test.outcomes == {"client_gone": 2}
        second.close()


@LEAVING
async def test_leaving_while_the_gateway_connects(backend: ScriptedBackend, leave: Callable[[Client], None]) -> None:
    async with running(backend, sections={"upstream": {"connect_timeout_seconds": 30}}) as under_test:
        await backend.vanish()
        client = await under_test.client()
        await client.send(STREAM)
        await holds(lambda: under_test.in_flight == 1, "the request is placed")
        await asyncio.sleep(0.05)
        leave(client)
        await under_test.comes_to_rest()
        assert under_test.outcomes == {"client_gone": 1}
        client.close()


@LEAVING
async def test_leaving_before_the_body_is_complete(backend: ScriptedBackend, leave: Callable[[Client], None]) -> None:
    async with running(backend) as under_test:
        for cut in (10, 60, len(STREAM) - 1):
            client = await under_test.client()
            await client.send(STREAM[:cut])
            await asyncio.sleep(0.01)
            leave(client)
            client.close()
        await under_test.comes_to_rest()
        assert backend.ledger == []
        assert under_test.counted.accepted == 0


FORM = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nscripted\r\n'
FORM += b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
UPLOAD = request(
    FORM + b"x" * 3_000_000, b"content-type: multipart/form-data; boundary=b", target=b"/v1/audio/transcriptions"
)


@LEAVING
async def test_leaving_in_the_middle_of_an_upload(backend: ScriptedBackend, leave: Callable[[Client], None]) -> None:
    async with running(backend) as under_test:
        client = await sent(under_test, backend, UPLOAD[:2_000_000])
        leave(client)
        await aborted(backend)
        await under_test.comes_to_rest()
        client.close()


@pytest.mark.parametrize("leave", [Client.close, Client.reset])
async def test_leaving_an_upload_that_the_backend_does_not_take(
    backend: ScriptedBackend, leave: Callable[[Client], None]
) -> None:
    backend.plays(deaf(), hang(), reads_body=False)
    async with running(backend, sections={"upstream": {"idle_stream_timeout_seconds": 1}}) as under_test:
        client = await sent(under_test, backend, UPLOAD.replace(b"content-length: 3", b"content-length: 30"))
        sending = asyncio.create_task(client.send(b"x" * 20_000_000))
        await asyncio.sleep(0.3)
        assert not sending.done()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        leave(client)
        await under_test.comes_to_rest()
        client.close()


async def test_leaving_between_two_requests_of_a_pipeline_runs_none_of_the_rest(backend: ScriptedBackend) -> None:
    backend.plays(hang())
    async with running(backend) as under_test:
        client = await sent(under_test, backend, STREAM * 5)
        client.reset()
        await aborted(backend, 0)
        await under_test.comes_to_rest()
        assert len(backend.ledger) == 1


async def test_leaving_at_the_moment_of_the_answer_serves_nothing_to_nobody(backend: ScriptedBackend) -> None:
    backend.plays(*json_answer())
    async with running(backend) as under_test:
        for delay in range(60):
            client = await under_test.client()
            await client.send(request(chat()) * 3)
            await asyncio.sleep(delay * 0.00005)
            client.reset()
        await under_test.comes_to_rest()
        backend.plays(hang())
        client = await sent(under_test, backend, STREAM * 3)
        client.close()
        await under_test.comes_to_rest()


async def test_leaving_a_slow_stream_frees_its_slot_for_the_next_in_line(backend: ScriptedBackend) -> None:
    backend.plays_once(*stream(1000, seconds_apart=0.05))
    backend.plays(*stream(2))
    async with running(backend, per_backend={"max_in_flight": 1}) as under_test:
        first = await sent(under_test, backend, STREAM)
        second = await under_test.client()
        await second.send(STREAM)
        await holds(lambda: under_test.gateway.core.lease_broker.waiting == 1, "one waits")
        first.close()
        assert (await second.answer(1.0)).is_done
        second.close()
        assert backend.most_running == 1


async def test_leaving_while_blocked_on_a_full_buffer(backend: ScriptedBackend) -> None:
    backend.plays(head(200), drained(b"8000\r\n" + b"x" * 0x8000 + b"\r\n", 2000), hang())
    async with running(backend) as under_test:
        client = await under_test.client(receive_buffer_bytes=4096)
        await client.send(STREAM)
        await holds(lambda: any(c.blocked for c in under_test.gateway.server._connections), "the client is blocked")
        client.reset()
        await aborted(backend)
        await under_test.comes_to_rest()


async def test_leaving_in_random_phases_leaves_nothing_behind(backend: ScriptedBackend, other: ScriptedBackend) -> None:
    chance = random.Random(5)
    for each in (backend, other):
        each.plays(pause(0.005), *stream(5, seconds_apart=0.004), pause(0.001))
    async with running(backend, other, per_backend={"max_in_flight": 8}) as under_test:

        async def one() -> None:
            async with await under_test.client() as client:
                data = STREAM if chance.random() < 0.7 else request(chat())
                cut = len(data) if chance.random() < 0.8 else chance.randrange(len(data))
                await client.send(data[:cut])
                if cut == len(data):
                    await asyncio.sleep(chance.random() * 0.06)
                chance.choice([client.close, client.reset])()

        for _ in range(20):
            async with asyncio.TaskGroup() as group:
                for _ in range(50):
                    group.create_task(one())
        await under_test.comes_to_rest()
        assert backend.most_running <= 9  # one more may still be noticing that its client left
