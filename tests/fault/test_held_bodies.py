"""What clients send and the gateway still holds: bounded in bytes, in time, and in slots."""

import asyncio
import tracemalloc
from contextlib import AsyncExitStack

import pytest

from tests.clients import Answer, Client, chat, request
from tests.fault.rig import CLIENT_KEY, UnderTest, holds, running
from tests.scripted import ScriptedBackend
from tests.scripts import hang, json_answer, raw, until, whole

MEBIBYTE = 1048576
SECTIONS = {"server": {"body_grace_seconds": 1, "memory_budget_bytes": 8 * MEBIBYTE, "max_body_bytes": 16 * MEBIBYTE}}
KEYS = {"auth": {"keys": [{"name": "one", "key": CLIENT_KEY}]}}
FORM = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nscripted\r\n--b\r\n'
FILE = b'content-disposition: form-data; name="file"; filename="a"\r\n\r\n'
MULTIPART = b"content-type: multipart/form-data; boundary=b"
AUDIO = b"/v1/audio/transcriptions"


def upload(size_bytes: int) -> bytes:
    """An upload of this many bytes and a few more."""
    return request(FORM + FILE + b"x" * size_bytes + b"\r\n--b--\r\n", MULTIPART, target=AUDIO)


def held(under_test: UnderTest) -> int:
    return under_test.gateway.core.memory.used_bytes


async def refused(client: Client) -> Answer:
    """The answer that ends the connection, while the client may still be sending."""
    answer = await client.answer()
    await client.end()
    return answer


# Routes without a body.


@pytest.mark.parametrize("target", [b"/livez", b"/readyz", b"/health", b"/v1/models", b"/v1/models/scripted"])
@pytest.mark.parametrize(
    "body",
    [
        b"content-length: 33554432\r\n\r\n",
        b"content-length: 1\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n",
    ],
)
async def test_a_url_that_takes_no_body_refuses_one_before_it_arrives(
    backend: ScriptedBackend, target: bytes, body: bytes
) -> None:
    async with running(backend) as under_test, await under_test.client() as client:
        await client.send(b"GET %b HTTP/1.1\r\nhost: a\r\n%b" % (target, body))
        answer = await refused(client)
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        assert held(under_test) == 0


async def test_an_empty_body_is_accepted_where_none_is_needed(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test, await under_test.client() as client:
        for framing in (b"content-length: 0\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n"):
            await client.send(b"GET /livez HTTP/1.1\r\nhost: a\r\n" + framing)
            assert (await client.answer()).status == 200


# Pace.


async def test_who_has_sent_much_may_not_rest(backend: ScriptedBackend) -> None:
    async with running(backend, sections=SECTIONS) as under_test, await under_test.client() as client:
        await client.send(request(chat("y" * 4 * MEBIBYTE))[: 3 * MEBIBYTE])
        await holds(lambda: held(under_test) > 2 * MEBIBYTE, "what came is counted")
        assert (await refused(client)).status == 408
        assert held(under_test) == 0
        assert backend.ledger == []


async def test_a_body_behind_a_running_request_may_not_rest_either(backend: ScriptedBackend) -> None:
    release = asyncio.Event()
    backend.plays(until(release), *json_answer())
    async with running(backend, sections=SECTIONS) as under_test, await under_test.client() as client:
        await client.send(request(chat()))
        await holds(lambda: len(backend.ledger) == 1, "the first request runs")
        await client.send(request(chat("y" * 4 * MEBIBYTE))[: 3 * MEBIBYTE])
        await holds(lambda: held(under_test) > 2 * MEBIBYTE, "the second arrives")
        await holds(lambda: held(under_test) < MEBIBYTE, "it is given up")
        release.set()
        assert [(await client.answer()).status, (await client.answer()).status] == [200, 408]


async def test_a_body_must_have_arrived_after_a_time_whatever_its_pace(backend: ScriptedBackend) -> None:
    sections = {"server": {"body_timeout_seconds": 2, "body_min_bytes_per_second": 1}}
    async with running(backend, sections=sections) as under_test, await under_test.client() as client:

        async def trickle() -> None:
            await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9999\r\n\r\n")
            while True:
                await client.send(b"x" * 100)
                await asyncio.sleep(0.05)

        task = asyncio.create_task(trickle())
        answer = await client.answer()
        assert (answer.status, "2 s" in answer.error["message"]) == (408, True)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# The memory budget.


async def test_unfinished_bodies_together_stay_within_the_memory_budget(backend: ScriptedBackend) -> None:
    async with running(backend, sections=SECTIONS) as under_test, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(await under_test.client()) for _ in range(6)]
        part = request(chat("y" * 3 * MEBIBYTE))[: 2 * MEBIBYTE]
        part = part.replace(b"content-length: %d" % len(chat("y" * 3 * MEBIBYTE)), b"transfer-encoding: chunked")
        part = part.replace(b"\r\n\r\n", b"\r\n\r\n%x\r\n" % (3 * MEBIBYTE), 1)
        answers = await asyncio.gather(*(_send_and_read(client, part) for client in clients))
        codes = sorted(answer.status for answer in answers)
        assert set(codes) == {408, 503}
        assert codes.count(503) >= 2
        full = next(answer for answer in answers if answer.status == 503)
        assert full.error["code"] == "memory_budget_exceeded"
        assert full.header("retry-after")
        assert (await under_test.ask()).status == 200


async def _send_and_read(client: Client, data: bytes) -> Answer:
    sending = asyncio.create_task(client.send(data))
    answer = await client.answer()
    await asyncio.gather(sending, return_exceptions=True)
    return answer


async def test_a_body_for_which_there_is_no_room_is_refused_by_its_head(backend: ScriptedBackend) -> None:
    async with running(backend, sections=SECTIONS) as under_test, await under_test.client() as client:
        await client.send(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\n")
        await client.send(b"content-length: %d\r\n\r\n" % (9 * MEBIBYTE))
        assert (await client.read()).startswith(b"HTTP/1.1 503 ")
        assert held(under_test) == 0


async def test_a_request_counts_until_it_is_answered(backend: ScriptedBackend) -> None:
    release = asyncio.Event()
    backend.plays(until(release), *json_answer())
    body = chat("y" * 3 * MEBIBYTE)
    async with running(backend, sections=SECTIONS) as under_test, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(await under_test.client()) for _ in range(2)]
        for client in clients:
            await client.send(request(body))
        await holds(lambda: len(backend.ledger) == 2, "both run")
        assert held(under_test) == 2 * len(body)
        assert (await under_test.ask(body)).status == 503
        release.set()
        for client in clients:
            assert (await client.answer()).status == 200
        assert held(under_test) == 0


async def test_the_memory_of_clients_that_leave_is_free_again(backend: ScriptedBackend) -> None:
    backend.plays(hang())
    whole_request, part = request(chat("y" * MEBIBYTE)), request(chat("y" * MEBIBYTE))[:-1]
    async with running(backend, sections=SECTIONS, per_backend={"max_in_flight": 1}) as under_test:
        for data in (part, whole_request, whole_request + whole_request + part, upload(MEBIBYTE)[:-9]):
            async with await under_test.client() as client, await under_test.client() as other:
                await client.send(data)
                await other.send(data)
                await holds(lambda: held(under_test) > MEBIBYTE, "it is counted")
                client.reset()  # seen though nothing is read
                other.reset()
            await holds(lambda: held(under_test) == 0, "it is free again")


# Pipelining.


async def test_clients_without_a_key_that_pipeline_and_do_not_read_take_little(backend: ScriptedBackend) -> None:
    count, per_client = 30, 200 * 1024
    data = request(method=b"GET", target=b"/livez") * 20_000
    async with running(backend, sections=KEYS) as under_test, AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(await under_test.client(receive_buffer_bytes=4096)) for _ in range(count)
        ]
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        sending = [asyncio.create_task(client.send(data)) for client in clients]
        connections = under_test.gateway.server._connections
        await holds(lambda: all(each._stash and each.blocked for each in connections), "all are held back")
        each = (tracemalloc.get_traced_memory()[0] - before) / count
        tracemalloc.stop()
        assert each < per_client, each
        assert 0 < held(under_test) <= count * 65536
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
        for client in clients:
            client.reset()


# Chunks and trailers.


async def test_a_body_in_tiny_chunks_takes_no_more_memory_than_its_bytes(backend: ScriptedBackend) -> None:
    size = 2 * MEBIBYTE
    data = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" + b"5\r\nhello\r\n" * (
        size // 5
    )
    async with running(backend) as under_test, await under_test.client() as client:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        await client.send(data)
        await holds(lambda: held(under_test) == size // 5 * 5, "all has arrived")
        taken = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert taken < 1.5 * size, taken


async def test_trailers_are_counted_as_they_come_and_not_kept(backend: ScriptedBackend) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    body = head + b"%x\r\n%b\r\n0\r\n" % (4 * MEBIBYTE, b"x" * 4 * MEBIBYTE)
    async with running(backend) as under_test:
        for trailers in (b"a:b\r\n" * 400_000, b"a: " + b"y" * 2 * MEBIBYTE):
            async with await under_test.client() as client:
                await client.send(body)
                await holds(lambda: held(under_test) >= 4 * MEBIBYTE, "the body has arrived")
                sending = asyncio.create_task(client.send(trailers))
                assert (await client.answer()).status in (400, 431)
                assert held(under_test) == 0
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)


# Audio uploads.


def capped(slots: int) -> dict[str, int]:
    return {"max_in_flight": slots}


async def test_an_upload_that_rests_gives_its_slot_back(backend: ScriptedBackend) -> None:
    async with (
        running(backend, sections=SECTIONS, per_backend=capped(4)) as under_test,
        await under_test.client() as client,
    ):
        await client.send(upload(4 * MEBIBYTE)[: 2 * MEBIBYTE])
        await holds(lambda: under_test.in_flight == 1, "it has a slot")
        assert (await refused(client)).status == 408
        await holds(lambda: under_test.in_flight == 0, "the slot is free")


async def test_a_small_upload_takes_no_slot_while_it_arrives(backend: ScriptedBackend) -> None:
    async with (
        running(backend, sections=SECTIONS, per_backend=capped(4)) as under_test,
        await under_test.client() as client,
    ):
        data = upload(100_000)
        await client.send(data[:-10])
        await holds(lambda: held(under_test) > 90_000, "it arrives")
        assert (under_test.in_flight, backend.ledger) == (0, [])
        await client.send(data[-10:])
        assert (await client.answer()).status == 200
        assert backend.ledger[0].body.endswith(b"\r\n--b--\r\n")


async def test_uploads_that_still_arrive_never_take_all_slots(backend: ScriptedBackend) -> None:
    sections = {"server": {"body_grace_seconds": 20}}
    async with running(backend, sections=sections, per_backend=capped(8)) as under_test, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(await under_test.client()) for _ in range(12)]
        data = upload(2 * MEBIBYTE)
        parts = [asyncio.create_task(client.send(data[: -MEBIBYTE // 2])) for client in clients]
        await holds(lambda: len(backend.ledger) == 2, "a quarter of the slots are given to uploads")
        for _ in range(20):
            assert (await under_test.ask()).status == 200
        assert under_test.in_flight == 2
        for client, part in zip(clients, parts, strict=True):
            await part
            await client.send(data[-MEBIBYTE // 2 :])
        for client in clients:
            assert (await client.answer()).status == 200


async def test_uploads_that_wait_to_arrive_are_bounded_like_the_queue(backend: ScriptedBackend) -> None:
    sections = {"server": {"body_grace_seconds": 20}, "admission": {"max_queued_bytes": 4 * MEBIBYTE}}
    async with running(backend, sections=sections, per_backend=capped(4)) as under_test, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(await under_test.client()) for _ in range(6)]
        part = upload(4 * MEBIBYTE)[: 2 * MEBIBYTE]
        sending = [asyncio.create_task(client.send(part)) for client in clients]
        backlog = under_test.gateway.core.queue.backlog
        await holds(lambda: backlog.requests == 3, "one arrives, three wait, two are refused")
        assert 3 * MEBIBYTE <= backlog.size_bytes <= 4 * MEBIBYTE
        answers = [asyncio.create_task(client.answer()) for client in clients]
        await holds(lambda: sum(answer.done() for answer in answers) == 2, "two are refused")
        for answer in answers:
            if answer.done():
                refusal = answer.result()
                assert (refusal.status, refusal.error["code"]) == (429, "queue_full")
            answer.cancel()
        for task in sending:
            task.cancel()
        await asyncio.gather(*answers, *sending, return_exceptions=True)


async def test_an_endpoint_that_a_model_does_not_offer_is_remembered(backend: ScriptedBackend) -> None:
    backend.plays_once(raw(whole(404, b'{"detail":"Not Found"}')))
    async with running(backend) as under_test:
        for _ in range(3):
            async with await under_test.client() as client:
                await client.send(upload(1000))
                answer = await client.answer()
                assert (answer.status, answer.error["code"]) == (404, "endpoint_not_offered")
        assert len(backend.ledger) == 1


async def test_an_upload_that_is_refused_early_frees_its_slot_while_its_client_rests(backend: ScriptedBackend) -> None:
    told = asyncio.Event()
    backend.plays(until(told), raw(whole(404, b'{"detail":"Not Found"}')), reads_body=False)
    async with running(backend) as under_test, await under_test.client() as client:
        await client.send(upload(4 * MEBIBYTE)[: 2 * MEBIBYTE])
        await holds(lambda: sum(len(each.received) for each in backend.connections) >= 2 * MEBIBYTE, "all is sent on")
        told.set()
        assert (await client.answer(2.0)).status == 404
        await holds(lambda: under_test.in_flight == 0, "its slot is free")


async def test_uploads_in_line_count_what_they_hold(backend: ScriptedBackend) -> None:
    release = asyncio.Event()
    backend.plays(until(release), *json_answer())
    sections = {"admission": {"max_queued_bytes": 500_000}}
    async with running(backend, sections=sections, per_backend=capped(1)) as under_test, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(await under_test.client()) for _ in range(4)]
        await clients[0].send(upload(200_000))
        await holds(lambda: len(backend.ledger) == 1, "the first one runs")
        for client in clients[1:3]:
            await client.send(upload(200_000))
        await holds(lambda: len(under_test.gateway.core.queue) == 2, "two are in line")
        await clients[3].send(upload(200_000))
        assert (await clients[3].answer()).status == 429
        assert under_test.gateway.core.queue.size_bytes > 400_000
        release.set()
        for client in clients[:3]:
            assert (await client.answer()).status == 200
