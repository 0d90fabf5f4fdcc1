"""Each scripted fault does what it says, and no more."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from loadtest.engine import SimulatedEngine
from tests.unit.loadtest.engine.support import eventually, idle


class Asker:
    """Sends chats with a script."""

    def __init__(self, http: aiohttp.ClientSession, engine: SimulatedEngine) -> None:
        self._http = http
        self._engine = engine

    async def chat(self, script: dict[str, Any] | None = None, stream: bool = True) -> tuple[int, bytes, bool]:
        """Status, what was received, and whether the body ended properly."""
        body = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 10, "ignore_eos": True}
        headers = {"x-sim-script": json.dumps(script)} if script is not None else {}
        received = b""
        async with self._http.post(
            f"{self._engine.url}/v1/chat/completions", json={**body, "stream": stream}, headers=headers
        ) as answer:
            try:
                async for chunk in answer.content.iter_any():
                    received += chunk
            except aiohttp.ClientError:
                return answer.status, received, False
            return answer.status, received, True

    async def faults(self, **fields: Any) -> None:
        async with self._http.post(f"{self._engine.url}/sim/faults", json=fields) as answer:
            assert answer.status == 200, await answer.text()


@pytest.fixture
def asker(http: aiohttp.ClientSession, engine: SimulatedEngine) -> Asker:
    return Asker(http, engine)


@asynccontextmanager
async def leaving(asking: Coroutine[Any, Any, Any]) -> AsyncIterator[asyncio.Task[Any]]:
    """A request whose client leaves at the end of the block."""
    task = asyncio.create_task(asking)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


def tokens(received: bytes) -> int:
    """Tokens of text in what was received: each is four characters."""
    chunks = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b'data: {"id"')]
    return sum(len(choice["delta"].get("content", "")) for chunk in chunks for choice in chunk["choices"]) // 4


@pytest.mark.parametrize("by", ["fin", "rst"])
@pytest.mark.parametrize("token", [0, 1, 5, 9])
async def test_a_stream_dies_at_the_token(asker: Asker, engine: SimulatedEngine, token: int, by: str) -> None:
    status, received, whole = await asker.chat({"die_at_token": token, "die_by": by})
    assert (status, whole, tokens(received)) == (200, False, token)
    assert b"[DONE]" not in received
    await eventually(lambda: idle(engine))
    assert engine.service.ledger.endings["failed"] == 1


async def test_a_stream_dies_after_its_finish_reason(asker: Asker) -> None:
    _, received, whole = await asker.chat({"die_after_finish": True})
    assert not whole
    assert b'"finish_reason":"length"' in received
    assert b"[DONE]" not in received


async def test_a_stream_ends_properly_without_done(asker: Asker) -> None:
    _, received, whole = await asker.chat({"no_done": True})
    assert whole
    assert tokens(received) == 10
    assert b"[DONE]" not in received


async def test_an_engine_failure_is_an_event(asker: Asker) -> None:
    _, received, whole = await asker.chat({"error_at_token": 3})
    assert whole
    assert tokens(received) == 3
    last = received.split(b"\n\n")[-3:]
    assert json.loads(last[0][6:])["error"]["code"] == 500
    assert last[1] == b"data: [DONE]"


async def test_garbage_is_sent_once_and_the_stream_goes_on(asker: Asker) -> None:
    _, received, whole = await asker.chat({"garbage_at_token": 4})
    assert whole
    assert received.count(b"this is not JSON") == 1
    before, _, after = received.partition(b"data: {this is not JSON\n\n")
    assert (tokens(before), tokens(after)) == (4, 6)


async def test_a_stalled_stream_stays_open_until_the_client_leaves(asker: Asker, engine: SimulatedEngine) -> None:
    async with leaving(asker.chat({"stall_at_token": 2})) as asking:
        await eventually(lambda: engine.service.engine.ranks[0].scheduler.counters.generation_tokens >= 2)
        assert not asking.done()
    await eventually(lambda: idle(engine))
    assert engine.service.ledger.endings["aborted"] == 1


async def test_a_hanging_request_is_never_answered(asker: Asker, engine: SimulatedEngine) -> None:
    async with leaving(asker.chat({"hang": True}, stream=False)) as asking:
        await eventually(lambda: engine.service.ledger.in_flight == 1)
        assert not asking.done()
    await eventually(lambda: idle(engine))


async def test_tokens_come_at_the_scripted_pace(asker: Asker) -> None:
    begun = time.monotonic()
    _, received, whole = await asker.chat({"tokens_per_second": 50})
    assert whole
    assert tokens(received) == 10
    assert time.monotonic() - begun >= 0.16


async def test_headers_are_delayed(asker: Asker) -> None:
    begun = time.monotonic()
    status, _, _ = await asker.chat({"headers_delay_seconds": 0.2})
    assert status == 200
    assert time.monotonic() - begun >= 0.2


@pytest.mark.parametrize("by", ["fin", "rst"])
async def test_a_connection_dies_before_its_headers(asker: Asker, by: str) -> None:
    with pytest.raises(aiohttp.ClientError):
        await asker.chat({"die_before_headers": by})


async def test_a_status_is_answered_with_retry_after(engine: SimulatedEngine, http: aiohttp.ClientSession) -> None:
    script = json.dumps({"status": 503, "retry_after": "7", "message": "go away"})
    async with http.post(
        f"{engine.url}/v1/chat/completions", json={"model": "sim"}, headers={"x-sim-script": script}
    ) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "7")
        assert (await answer.json())["error"]["message"] == "go away"


async def test_the_scripted_length_and_model_are_answered(asker: Asker) -> None:
    _, received, _ = await asker.chat({"output_tokens": 3, "model": "impostor"}, stream=False)
    answer = json.loads(received)
    assert answer["model"] == "impostor"


@pytest.mark.parametrize("script", [{"die_at_token": 3}, {"die_at_token": 0, "die_by": "rst"}])
async def test_a_whole_answer_dies_before_its_headers(asker: Asker, script: dict[str, Any]) -> None:
    with pytest.raises(aiohttp.ClientError):
        await asker.chat(script, stream=False)


async def test_a_whole_answer_may_be_an_error_or_garbage(asker: Asker) -> None:
    assert (await asker.chat({"error_at_token": 3}, stream=False))[0] == 500
    with pytest.raises(ValueError, match="Expecting"):
        json.loads((await asker.chat({"garbage_at_token": 0}, stream=False))[1])


async def test_a_malformed_script_is_refused(asker: Asker) -> None:
    status, received, _ = await asker.chat({"die_at_tokn": 3})
    assert status == 400
    assert b"die_at_tokn" in received


async def test_a_server_script_applies_to_the_next_requests_only(asker: Asker) -> None:
    await asker.faults(script={"status": 500}, script_requests=2)
    assert [(await asker.chat())[0] for _ in range(3)] == [500, 500, 200]


async def test_a_dead_engine_fails_generation_while_health_is_fine(
    asker: Asker, engine: SimulatedEngine, http: aiohttp.ClientSession
) -> None:
    await asker.faults(engine_dead=True)
    status, received, _ = await asker.chat()
    assert (status, json.loads(received)["error"]["type"]) == (500, "InternalServerError")
    async with http.get(f"{engine.url}/health") as answer:
        assert answer.status == 200
    await asker.faults()
    assert (await asker.chat())[0] == 200


async def test_streams_under_way_end_with_an_error_when_the_engine_dies(
    slow_engine: SimulatedEngine, http: aiohttp.ClientSession
) -> None:
    asker = Asker(http, slow_engine)
    streams = [asyncio.ensure_future(asker.chat(stream=stream)) for stream in (True, False)]  # noqa: TID251
    await eventually(lambda: slow_engine.service.engine.ranks[0].scheduler.counters.generation_tokens > 2)
    await asker.faults(engine_dead=True)
    (_, stream, whole), (status, _, _) = await asyncio.gather(*streams)
    assert whole
    assert b'data: {"error": {"message": "EngineCore' in stream
    assert status == 500


async def test_a_paused_engine_is_healthy_and_answers_when_resumed(asker: Asker, engine: SimulatedEngine) -> None:
    await asker.faults(engine_paused=True)
    async with asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(asker.chat())
        await eventually(lambda: engine.service.engine.ranks[0].scheduler.num_waiting == 1)
        await asker.faults()
    assert answer.result()[0] == 200


@pytest.mark.parametrize(
    ("fault", "path", "status"),
    [
        ({"health_status": 503}, "/health", 503),
        ({"metrics_status": 500}, "/metrics", 500),
        ({"models_status": 500}, "/v1/models", 500),
    ],
)
async def test_a_probe_gets_the_scripted_status(
    asker: Asker, engine: SimulatedEngine, http: aiohttp.ClientSession, fault: dict[str, int], path: str, status: int
) -> None:
    await asker.faults(**fault)
    async with http.get(engine.url + path) as answer:
        assert answer.status == status


async def test_metrics_are_garbage_or_huge_if_scripted(
    asker: Asker, engine: SimulatedEngine, http: aiohttp.ClientSession
) -> None:
    await asker.faults(metrics_garbage=True)
    async with http.get(f"{engine.url}/metrics") as answer:
        assert b"not a number" in await answer.read()
    await asker.faults(metrics_bytes=2_000_000)
    async with http.get(f"{engine.url}/metrics") as answer:
        assert len(await answer.read()) >= 2_000_000


async def test_another_model_is_served_if_scripted(
    asker: Asker, engine: SimulatedEngine, http: aiohttp.ClientSession
) -> None:
    await asker.faults(model="other")
    assert (await asker.chat())[0] == 404
    async with http.get(f"{engine.url}/v1/models") as answer:
        assert [card["id"] for card in (await answer.json())["data"]] == ["other"]


async def test_the_ledger_has_each_request_and_how_it_ended(
    engine: SimulatedEngine, http: aiohttp.ClientSession
) -> None:
    body = {"model": "sim", "messages": [{"role": "user", "content": "nonce:n7"}], "max_tokens": 3}
    headers = {"X-Request-Id": "r7", "Authorization": "Bearer key"}
    async with http.post(f"{engine.url}/v1/chat/completions", json=body, headers=headers) as answer:
        assert answer.status == 200
    async with http.post(f"{engine.url}/sleep"):
        pass
    async with http.get(f"{engine.url}/sim/ledger") as answer:
        ledger = await answer.json()
    chat, sleep = ledger["entries"]
    assert (chat["request_id"], chat["nonces"], chat["ending"], chat["output_tokens"]) == ("r7", ["n7"], "finished", 3)
    assert chat["headers"]["authorization"] == "Bearer key"
    assert sleep["path"] == "/sleep"
    assert (ledger["total"], ledger["in_flight"], ledger["max_in_flight"], ledger["peak_running"]) == (2, 0, 1, 1)
    async with http.get(f"{engine.url}/nowhere/%2e%2e/x"):
        pass
    async with http.get(f"{engine.url}/sim/ledger") as answer:
        lost = (await answer.json())["entries"][-1]
    assert (lost["status"], lost["ending"]) == (404, "refused")
    async with http.delete(f"{engine.url}/sim/ledger") as answer:
        assert (await answer.json())["entries"] == []
