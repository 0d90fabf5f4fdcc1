"""Connections that are used again: no race with the backend's closing them, no bytes of one answer in another."""

import asyncio

import orjson
import pytest

from tests.clients import Answer, chat, request
from tests.fault.rig import holds, running
from tests.scripted import ScriptedBackend
from tests.scripts import (
    after,
    completion,
    deaf,
    drained,
    echo,
    fin,
    head,
    json_answer,
    pause,
    raw,
    reset,
    stream,
    tokens,
    whole,
)

EVIL = whole(200, b'{"choices":[{"message":{"content":"EVIL"}}]}')


def content(answer: Answer) -> str:
    return str(answer.json["choices"][0]["message"]["content"])


@pytest.mark.parametrize("idle_seconds", [0.0, 0.002, 0.004, 0.02])
async def test_backends_that_close_idle_connections_cost_no_request(
    backend: ScriptedBackend, idle_seconds: float
) -> None:
    backend.plays(*json_answer(), after(idle_seconds, fin()))
    async with running(backend) as under_test:
        gap = idle_seconds

        async def one_client(number: int) -> None:
            async with await under_test.client() as client:
                for turn in range(60):
                    await client.send(request(chat()))
                    assert (await client.answer()).status == 200
                    await asyncio.sleep(gap * (0.8 + 0.05 * ((turn + number) % 9)))

        await asyncio.gather(*(one_client(number) for number in range(16)))
        await under_test.comes_to_rest()
        assert under_test.outcomes == {"completed": 960}
        assert len(backend.ledger) == 960  # nothing was executed twice


async def test_resets_of_idle_connections_cost_no_request(backend: ScriptedBackend) -> None:
    backend.plays(*json_answer(), after(0.001, reset()))
    async with running(backend) as under_test, await under_test.client() as client:
        for _ in range(300):
            await client.send(request(chat()))
            assert (await client.answer()).status == 200
            await asyncio.sleep(0.001)


async def test_a_connection_that_dies_when_it_is_used_again_is_replaced_unseen(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        for _ in range(50):
            backend.plays_once(*json_answer("first"))
            assert content(await under_test.ask()) == "first"
            backend.plays_once(fin())
            backend.plays_once(*json_answer("second"))
            assert content(await under_test.ask()) == "second"
        assert under_test.state(backend) == "up"
        assert under_test.outcomes == {"completed": 100}


@pytest.mark.parametrize("late", [0.0, 0.01])
@pytest.mark.parametrize("stray", [EVIL, EVIL[:30], EVIL[:-3], b"H", b"\r\n", b"\0", b"junk" * 1000])
async def test_bytes_after_an_answer_never_reach_the_next_request(
    backend: ScriptedBackend, stray: bytes, late: float
) -> None:
    good = whole(200, b'{"choices":[{"message":{"content":"good"}}]}')
    async with running(backend) as under_test:
        for _ in range(5):
            backend.plays_once(raw(good), after(late, raw(stray))) if late else backend.plays_once(raw(good + stray))
            assert content(await under_test.ask()) == "good"
            if late:
                await asyncio.sleep(2 * late)
            backend.plays_once(raw(good))
            assert content(await under_test.ask()) == "good"
            if late or stray != b"\r\n":  # an empty line at the end of an answer is allowed
                assert backend.ledger[-1].connection != backend.ledger[-2].connection
        assert under_test.outcomes == {"completed": 10}


async def test_bytes_after_a_stream_never_reach_the_next_request(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        for stray in (EVIL, EVIL[:20], b"5\r\nhello\r\n0\r\n\r\n"):
            backend.plays_once(*stream()[:-1], raw(b"0\r\n\r\n" + stray))
            assert (await under_test.ask(chat(stream=True))).is_done
            backend.plays_once(*json_answer("good"))
            assert content(await under_test.ask()) == "good"


async def test_a_connection_whose_client_left_in_the_middle_is_not_used_again(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        for _ in range(10):
            backend.plays_once(*tokens(2), pause(0.05), *stream()[1:])
            async with await under_test.client() as client:
                await client.send(request(chat(stream=True)))
                await client.read()
            backend.plays_once(*json_answer("good"))
            assert content(await under_test.ask()) == "good"


async def test_an_upload_that_is_answered_early_leaves_no_half_request_behind(backend: ScriptedBackend) -> None:
    form = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nscripted\r\n--b\r\n'
    file = b'content-disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 4_000_000
    headers = (b"content-type: multipart/form-data; boundary=b",)
    async with running(backend) as under_test:
        backend.plays_once(raw(whole(413, b'{"error":{"message":"too large"}}')), reads_body=False)
        bytes_of_it = request(form + file, *headers, target=b"/v1/audio/transcriptions")
        async with await under_test.client() as client:
            await client.send(bytes_of_it[:2_000_000])
            assert (await client.answer()).status == 413
            backend.plays(*json_answer("good"))
            await client.send(bytes_of_it[2_000_000:2_100_000])
            for _ in range(3):
                assert content(await under_test.ask()) == "good"


@pytest.mark.parametrize("size_bytes", [100_000, 7_000_000])
async def test_a_connection_whose_backend_answered_without_reading_is_not_used_again(
    backend: ScriptedBackend, size_bytes: int
) -> None:
    async with running(backend) as under_test:
        backend.plays_once(deaf(), raw(whole(413, b'{"error":{"message":"too large"}}')), reads_body=False)
        assert (await under_test.ask(chat("x" * size_bytes))).status == 413
        backend.plays(*json_answer("good"))
        assert content(await under_test.ask()) == "good"
        assert backend.ledger[0].connection != backend.ledger[1].connection


async def test_a_connection_that_has_grown_old_is_closed_after_its_answer(backend: ScriptedBackend) -> None:
    backend.plays(*stream(4, seconds_apart=0.1))
    async with running(backend, sections={"upstream": {"max_connection_age_seconds": 0.3}}) as under_test:
        for _ in range(3):
            assert (await under_test.ask(chat(stream=True))).is_done
        await under_test.comes_to_rest()
        assert under_test.outcomes == {"completed": 3}
        assert len({seen.connection for seen in backend.ledger}) == 3


async def test_an_idle_connection_is_not_used_after_its_time(backend: ScriptedBackend) -> None:
    async with running(backend, sections={"upstream": {"keep_alive_seconds": 0.1}}) as under_test:
        await under_test.ask()
        await under_test.ask()
        await asyncio.sleep(0.15)
        await under_test.ask()
        first, second, third = (seen.connection for seen in backend.ledger)
        assert first == second != third


async def test_a_backend_that_asks_to_close_is_not_sent_a_second_request(backend: ScriptedBackend) -> None:
    backend.plays(raw(whole(200, orjson.dumps(completion("a")), b"connection: close")))
    async with running(backend) as under_test:
        for _ in range(3):
            assert (await under_test.ask()).status == 200
        assert len({seen.connection for seen in backend.ledger}) == 3


async def test_a_connection_paused_for_a_slow_client_works_again_afterwards(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        backend.plays_once(
            head(200, b"content-length: 8000000", kind=b"application/json", chunked=False), drained(b"x" * 100_000, 80)
        )
        async with await under_test.client(receive_buffer_bytes=8192) as client:
            await client.send(request(chat()))
            await holds(lambda: any(c.blocked for c in under_test.gateway.server._connections), "the client is blocked")
            assert len((await client.answer()).body) == 8_000_000
        backend.plays(*echo())
        assert content(await under_test.ask(chat("hi"))) == "hi"


async def test_many_clients_share_few_connections_in_turn(backend: ScriptedBackend) -> None:
    backend.plays(*echo())
    async with running(backend) as under_test:
        before = backend.accepted
        async with await under_test.client() as client:
            for number in range(200):
                await client.send(request(chat(str(number))))
                assert content(await client.answer()) == str(number)
        assert len({seen.connection for seen in backend.ledger}) == 1
        assert backend.accepted >= before
