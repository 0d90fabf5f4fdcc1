"""The recording proxy: what passes through it unchanged, what it keeps, and that it can be sent again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from loadtest.__main__ import app
from loadtest.access import Access
from loadtest.engine import EngineConfig, SimulatedEngine
from loadtest.recorder import Recorder, RecordingProxy, Sessions, record_requests
from loadtest.workloads.bodies import BodyFile

ONE, TWO = {"role": "user", "content": "one"}, {"role": "user", "content": "two"}
SAID = {"role": "assistant", "content": "said"}


def chat(*messages: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": list(messages), "max_tokens": 3} | more


@asynccontextmanager
async def recording(url: str) -> AsyncIterator[tuple[str, Recorder, BytesIO]]:
    """A proxy before the URL; its clock counts the times it is asked, in seconds."""
    sink, ticks = BytesIO(), count()
    recorder = Recorder(sink, lambda: float(next(ticks)))
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        TestServer(RecordingProxy(url, recorder, session).app()) as server,
    ):
        yield str(server.make_url("")).rstrip("/"), recorder, sink


@pytest.fixture
async def engine() -> AsyncIterator[SimulatedEngine]:
    """An engine that takes no time."""
    async with SimulatedEngine(EngineConfig(time_scale=0), seed=1) as running:
        yield running


async def test_streams_pass_and_bodies_are_kept_without_any_header(engine: SimulatedEngine) -> None:
    async with recording(engine.url) as (url, recorder, sink), aiohttp.ClientSession() as client:
        secret = {"authorization": "Bearer s3cret"}
        body = chat(ONE, stream=True)
        async with client.post(f"{url}/v1/chat/completions?a=b", json=body, headers=secret) as answer:
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        async with client.get(f"{url}/v1/models") as answer:
            assert (await answer.json())["data"][0]["id"] == "sim"
        (line,) = map(json.loads, sink.getvalue().splitlines())
        assert line == {"timestamp": 1000, "url": "/v1/chat/completions", "body": body, "session_id": 1}
        assert (recorder.recorded, recorder.left_out) == (1, {})


async def test_turns_of_a_conversation_are_found_with_their_think_times(
    engine: SimulatedEngine, tmp_path: Path
) -> None:
    async with recording(engine.url) as (url, _, sink), aiohttp.ClientSession() as client:
        for body in (chat(ONE), chat(TWO), chat(ONE, SAID, TWO)):
            async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200
    path = tmp_path / "requests.jsonl"
    path.write_bytes(sink.getvalue())
    file = BodyFile(path, check=True)
    assert len(file) == 2
    first, second = file.lines(0)
    assert (first.think_seconds, second.think_seconds) == (None, 4.0)


async def test_what_cannot_be_sent_again_passes_and_is_counted(engine: SimulatedEngine) -> None:
    async with recording(engine.url) as (url, recorder, sink), aiohttp.ClientSession() as client:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/v1/chat/completions", chat(ONE, model="other"))):
            async with client.post(url + path, json=body) as answer:
                assert answer.status in (200, 404)
        assert sink.getvalue() == b""
        assert recorder.left_out == {"of another form or endpoint": 1, "answered with 404": 1}


async def test_a_server_that_cannot_be_reached_is_an_error_of_openais_shape() -> None:
    async with recording("http://127.0.0.1:9") as (url, recorder, _), aiohttp.ClientSession() as client:
        async with client.post(f"{url}/v1/chat/completions", json=chat(ONE)) as answer:
            assert (answer.status, "cannot reach" in (await answer.json())["error"]["message"]) == (502, True)
        assert recorder.left_out == {"answered with 502": 1}


async def test_a_stream_that_breaks_breaks_for_the_client_too() -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"data: half")
        assert request.transport is not None
        request.transport.abort()
        return answer

    server = web.Application()
    server.router.add_post("/{path:.*}", breaks)
    async with TestServer(server) as served, recording(str(served.make_url("")).rstrip("/")) as (url, _, sink):
        async with aiohttp.ClientSession() as client, client.post(f"{url}/v1/chat/completions", json=chat(ONE)) as got:
            with pytest.raises(aiohttp.ClientPayloadError):
                await got.read()
        assert len(sink.getvalue().splitlines()) == 1


def test_conversations_that_were_silent_for_longest_are_forgotten() -> None:
    sessions = Sessions()
    for number in range(10_001):
        session, _, key = sessions.turn([{"role": "user", "content": number}], 0.0)
        sessions.answered(key, session, 0.0)
    known = [sessions.turn([{"role": "user", "content": number}, SAID, TWO], 1.0)[1] for number in (0, 10_000)]
    assert known == [None, 1.0]


async def test_it_listens_until_it_is_stopped(engine: SimulatedEngine) -> None:
    started = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(record_requests(engine.url, Access(), "127.0.0.1", 0, BytesIO(), started.set_result))
    async with asyncio.timeout(10):
        async with aiohttp.ClientSession() as client, client.get(f"{await started}/health") as answer:
            assert answer.status == 200
        running.cancel()
        await asyncio.wait({running})


@pytest.mark.parametrize("arguments", [[], ["log", "--from", "http://host"]])
def test_one_source_is_named(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["record", *arguments, "--out", "x"])
    assert (result.exit_code, "--from" in result.stderr) == (2, True)
