"""Streams that die on the way: a client is never shown a truncated answer as a whole one."""

import asyncio
from collections.abc import Callable

import pytest

from tests.clients import chat, request
from tests.fault.rig import holds, running
from tests.scripted import ScriptedBackend
from tests.scripts import (
    DONE_EVENT,
    Step,
    chunk,
    echo,
    event,
    fin,
    hang,
    head,
    json_answer,
    last_chunk,
    pause,
    raw,
    reset,
    stream,
    tokens,
    whole,
)

STREAM = chat(stream=True)
DEATHS = pytest.mark.parametrize("death", [fin, reset])
INTERRUPTED = b'"code":"stream_interrupted"'


@DEATHS
@pytest.mark.parametrize("count", [1, 2, 50])
async def test_a_stream_that_dies_at_a_token_ends_with_an_error_event_and_uncleanly(
    backend: ScriptedBackend, other: ScriptedBackend, count: int, death: Callable[[], Step]
) -> None:
    for each in (backend, other):
        each.plays(*tokens(count), death())
    async with running(backend, other) as under_test:
        answer = await under_test.ask(STREAM)
        assert answer.status == 200
        assert not answer.complete
        assert len(answer.events) in ((count + 1,) if death is fin else range(1, count + 2))  # a reset may lose bytes
        assert INTERRUPTED in answer.events[-1]
        assert b"[DONE]" not in answer.body
        assert len(backend.ledger) + len(other.ledger) == 1
        await under_test.comes_to_rest()
        assert under_test.outcomes == {"interrupted": 1}


@DEATHS
@pytest.mark.parametrize("beginning", [(), (head(200),), (raw(b"HTTP/1.1 200 OK\r\ncontent-ty"),)])
async def test_an_answer_that_dies_before_its_first_token_is_had_from_another_backend(
    backend: ScriptedBackend, other: ScriptedBackend, beginning: tuple[Step, ...], death: Callable[[], Step]
) -> None:
    for each in (backend, other):
        each.plays(*stream())
        each.plays_once(*beginning, death())
    async with running(backend, other) as under_test:
        other.plays_once(*stream())  # after the death that is planned above, if it ever comes
        backend_first = await under_test.ask(STREAM)
        both = len(backend.ledger), len(other.ledger)
        if backend_first.status == 200:
            assert backend_first.is_done
        else:  # the second one died of it too: no third is tried
            assert backend_first.status == 502
        assert both == (1, 1)


@DEATHS
async def test_one_dying_backend_costs_no_request(
    backend: ScriptedBackend, other: ScriptedBackend, death: Callable[[], Step]
) -> None:
    backend.plays(death())
    other.plays(*stream())
    async with running(
        backend, other, sections={"health": {"eject_failures": 3, "eject_base_seconds": 60}}
    ) as under_test:
        answers = [await under_test.ask(STREAM) for _ in range(20)]
        assert all(answer.is_done for answer in answers)
        assert under_test.outcomes == {"completed": 20}
        assert 1 <= len(backend.ledger) <= 4
        assert len(other.ledger) == 20


@DEATHS
async def test_a_stream_that_dies_after_its_last_token_but_before_done_is_interrupted(
    backend: ScriptedBackend, death: Callable[[], Step]
) -> None:
    backend.plays(*tokens(2), chunk(event("", "stop")), death())
    async with running(backend) as under_test:
        answer = await under_test.ask(STREAM)
        assert not answer.complete
        assert INTERRUPTED in answer.events[-1]
        assert under_test.outcomes == {"interrupted": 1}


@DEATHS
async def test_a_stream_is_whole_once_done_has_come_though_the_framing_is_missing(
    backend: ScriptedBackend, death: Callable[[], Step]
) -> None:
    backend.plays(*tokens(2), chunk(DONE_EVENT), hang() if death is reset else fin())
    if death is reset:
        backend.plays(*tokens(2), chunk(DONE_EVENT), fin())
    async with running(backend) as under_test:
        assert (await under_test.ask(STREAM)).is_done
        assert under_test.outcomes == {"completed": 1}


async def test_a_stream_that_ends_in_good_order_but_without_done_is_interrupted(backend: ScriptedBackend) -> None:
    backend.plays(*tokens(3), last_chunk())
    async with running(backend) as under_test:
        answer = await under_test.ask(STREAM)
        assert not answer.complete
        assert INTERRUPTED in answer.events[-1]
        assert under_test.outcomes == {"interrupted": 1}


@pytest.mark.parametrize("framing", [b"connection: close", b"content-length: 4000"])
async def test_a_stream_framed_by_its_end_or_by_a_length_that_is_not_reached_never_ends_cleanly(
    backend: ScriptedBackend, framing: bytes
) -> None:
    backend.plays(head(200, framing, chunked=False), raw(event("a") + event("b")), fin())
    async with running(backend) as under_test:
        answer = await under_test.ask(STREAM)
        assert not answer.complete
        assert INTERRUPTED in answer.events[-1]
        assert under_test.outcomes == {"interrupted": 1}


async def test_a_stream_framed_by_its_end_is_whole_if_done_has_come(backend: ScriptedBackend) -> None:
    backend.plays(head(200, b"connection: close", chunked=False), raw(event("a") + DONE_EVENT), fin())
    async with running(backend) as under_test:
        assert (await under_test.ask(STREAM)).is_done


@pytest.mark.parametrize("text", ["data: [DONE]", "\n\ndata: [DONE]\n\n", "message_stop", "event: message_stop"])
async def test_a_token_that_spells_the_end_marker_is_not_the_end(backend: ScriptedBackend, text: str) -> None:
    backend.plays(*tokens(1), chunk(event(text)), fin())
    async with running(backend) as under_test:
        answer = await under_test.ask(STREAM)
        assert not answer.complete
        assert INTERRUPTED in answer.events[-1]
        messages = await under_test.ask(STREAM, target=b"/v1/messages")
        assert not messages.complete
        assert under_test.outcomes == {"interrupted": 2}


async def test_a_token_that_spells_an_error_event_does_not_end_a_stream(backend: ScriptedBackend) -> None:
    backend.plays(*tokens(1), chunk(event('data: {"error": 1}')), chunk(DONE_EVENT), last_chunk())
    async with running(backend) as under_test:
        assert (await under_test.ask(STREAM)).is_done
        assert under_test.outcomes == {"completed": 1}


async def test_an_error_event_of_the_backend_is_no_success_though_done_follows(backend: ScriptedBackend) -> None:
    error = b'data: {"error": {"message": "EngineCore", "type": "InternalServerError", "param": null, "code": 500}}\n\n'
    backend.plays(*tokens(2), chunk(error), chunk(DONE_EVENT), last_chunk())
    async with running(backend) as under_test:
        answer = await under_test.ask(STREAM)
        assert not answer.complete
        assert len(answer.events) == 3
        assert b"EngineCore" in answer.events[-1]
        assert INTERRUPTED in answer.events[-1]
        assert under_test.outcomes == {"interrupted": 1}


@DEATHS
async def test_a_plain_answer_shorter_than_its_content_length_is_a_502(
    backend: ScriptedBackend, other: ScriptedBackend, death: Callable[[], Step]
) -> None:
    for each in (backend, other):
        each.plays(raw(whole(200, b'{"choices": []}')[:-4]), death())
    async with running(backend, other) as under_test:
        answer = await under_test.ask()
        assert answer.status == 502
        assert answer.complete
        assert answer.error["type"] == "upstream_error"


async def test_a_plain_answer_framed_by_its_end_is_a_502(backend: ScriptedBackend) -> None:
    backend.plays(head(200, b"connection: close", kind=b"application/json", chunked=False), raw(b'{"a": 1}'), fin())
    async with running(backend) as under_test:
        answer = await under_test.ask()
        assert (answer.status, answer.complete) == (502, True)


async def test_a_long_plain_answer_that_dies_after_it_has_begun_ends_uncleanly(backend: ScriptedBackend) -> None:
    body = b'{"data": "' + b"x" * 3_000_000
    backend.plays(raw(whole(200, body + b'"}')[:-2]), fin())
    async with running(backend) as under_test:
        answer = await under_test.ask()
        assert answer.status == 200
        assert not answer.complete
        assert under_test.outcomes == {"interrupted": 1}


async def test_a_stream_that_stalls_is_cut_and_its_slot_freed(backend: ScriptedBackend) -> None:
    backend.plays(*tokens(2), hang())
    async with running(backend, sections={"upstream": {"idle_stream_timeout_seconds": 1}}) as under_test:
        started = asyncio.get_running_loop().time()
        answer = await under_test.ask(STREAM)
        assert asyncio.get_running_loop().time() - started > 0.9
        assert not answer.complete
        assert b'"code":"stream_stalled"' in answer.events[-1]
        await under_test.comes_to_rest()
        await holds(lambda: backend.ledger[0].peer_left_at is not None, "the backend is told")
        assert under_test.outcomes == {"interrupted": 1}


async def test_a_plain_answer_that_stalls_is_cut(backend: ScriptedBackend) -> None:
    backend.plays(raw(whole(200, b'{"choices": []}')[:-4]), hang())
    async with running(backend, sections={"upstream": {"idle_stream_timeout_seconds": 1}}) as under_test:
        answer = await under_test.ask()
        assert answer.status in (502, 504)
        assert answer.error["code"] == "stream_stalled"


async def test_a_backend_that_never_answers_is_cut_where_a_time_is_set_for_its_first_byte(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    for each in (backend, other):
        each.plays(hang())
    async with running(backend, other, sections={"upstream": {"first_byte_timeout_seconds": 1}}) as under_test:
        answer = await under_test.ask()
        assert answer.status == 504
        assert len(backend.ledger) + len(other.ledger) == 1  # it may have been executed: not repeated


async def test_a_stream_of_slow_tokens_is_not_taken_for_a_stalled_one(backend: ScriptedBackend) -> None:
    backend.plays(*stream(12, seconds_apart=0.25))
    async with running(backend, sections={"upstream": {"idle_stream_timeout_seconds": 1}}) as under_test:
        assert (await under_test.ask(STREAM)).is_done


async def test_the_answers_of_many_concurrent_requests_are_never_mixed_up(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    for each in (backend, other):
        each.plays(*echo())
    async with running(backend, other) as under_test:

        async def one(number: int) -> None:
            nonce = f"nonce-{number}-" + "x" * (number % 7)
            answer = await under_test.ask(chat(nonce), b"x-request-id: the-same")
            assert answer.json["choices"][0]["message"]["content"] == nonce
            assert answer.header("x-request-id") == "the-same"

        await asyncio.gather(*(one(number) for number in range(200)))
        await under_test.comes_to_rest()
        assert under_test.outcomes == {"completed": 200}


async def test_a_refused_answer_passes_through_as_the_backend_gave_it(backend: ScriptedBackend) -> None:
    backend.plays(raw(whole(400, b'{"error":{"message":"too long"}}')))
    async with running(backend) as under_test:
        answer = await under_test.ask()
        assert (answer.status, answer.body) == (400, b'{"error":{"message":"too long"}}')
        backend.plays(*json_answer())
        assert (await under_test.ask()).status == 200


@pytest.mark.parametrize("seconds", [0.0, 0.003])
async def test_what_comes_after_the_end_marker_reaches_nobody(backend: ScriptedBackend, seconds: float) -> None:
    late = (chunk(event("LATE")), chunk(DONE_EVENT), chunk(event("LATE")))
    async with running(backend) as under_test, await under_test.client() as client:
        for number in range(30):
            between = (pause(seconds),) if seconds else ()
            backend.plays_once(*tokens(2), chunk(DONE_EVENT), *between, *late, *between, *late, last_chunk())
            await client.send(request(STREAM))
            answer = await client.answer()
            assert answer.complete
            assert answer.is_done or not seconds  # what came together is passed on together
            backend.plays_once(*json_answer(f"next {number}"))
            await client.send(request(chat()))
            assert (await client.answer()).json["choices"][0]["message"]["content"] == f"next {number}"


async def test_one_dying_backend_costs_no_request_of_a_gateway_that_has_just_started(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    backend.plays(fin())
    other.plays(*stream())
    async with running(backend, other) as under_test:
        statuses = [(await under_test.ask(STREAM)).status for _ in range(20)]
        assert set(statuses) == {200}
