"""Responses that go on after their answer cost what they used in the end, once, however they end."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.features.responses.feature import ResponsesFeature
from tests.clients import chat, request
from tests.fault.restartable import restartable
from tests.fault.rig import UnderTest, holds
from tests.fault.test_ledger import INPUTS, LIMITS, RESPONSE, USED, books, keeping_books, streaming
from tests.fault.test_rate_limits import AS_CLIENT, SECRET, limited
from tests.scripted import MODEL, Connection, ScriptedBackend
from tests.scripts import Step, answer, hang, until, whole

PATH = b"/v1/responses"
EXPECTED = 201  # tokens of a request with the prompt "x" and an answer of unknown length
QUEUED = {"id": "resp_1", "object": "response", "status": "queued", "usage": None}


def body(**fields: Any) -> bytes:
    return orjson.dumps({"model": MODEL, "input": "x", "background": True, **fields})


def ended(status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
    return {"id": "resp_1", "object": "response", "status": status, "usage": usage, "metadata": {"usage": "none"}}


async def begun(under_test: UnderTest, backend: ScriptedBackend, *, stream: bool) -> None:
    """A response has begun, and its client has left."""
    if not stream:
        backend.plays_once(answer(200, QUEUED))
        assert (await under_test.ask(body(), AS_CLIENT, target=PATH)).status == 200
        return
    backend.plays_once(streaming(RESPONSE[:1], hang()))
    async with await under_test.client() as client:
        await client.send(request(body(stream=True), AS_CLIENT, target=PATH))
        assert b"response.created" in await client.read()
        client.reset()
    await holds(lambda: len(under_test.gateway.feature(ResponsesFeature).background) == 1, "it goes on")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("last", "used"),
    [
        ((200, ended("completed", INPUTS)), USED),
        ((200, ended("incomplete", INPUTS)), USED),
        ((200, ended("cancelled", INPUTS)), USED),
        ((200, ended("failed", INPUTS)), USED),
        ((200, ended("failed", None)), EXPECTED),
        ((200, ended("cancelled", {"input_tokens": 0, "output_tokens": 0})), EXPECTED),
        ((404, {"error": {"message": "not found", "usage": INPUTS}}), EXPECTED),
    ],
)
async def test_it_costs_what_its_end_reports_or_else_what_was_expected(
    stream: bool, last: tuple[int, Any], used: int, backend: ScriptedBackend
) -> None:
    go_on = asyncio.Event()
    backend.plays(until(go_on), *answer(*last))
    async with keeping_books(backend) as under_test:
        await begun(under_test, backend, stream=stream)
        minute, day, month, usage, counters = books(under_test)
        assert (minute, day, month) == (EXPECTED, EXPECTED, EXPECTED)
        assert usage == counters == 0
        go_on.set()
        await holds(lambda: not len(under_test.gateway.core.ledger), "its entry is closed")
        assert books(under_test) == [used] * 5
        for _ in range(2):
            await under_test.ask(b"", AS_CLIENT, method=b"GET", target=PATH + b"/resp_1")
        assert books(under_test) == [used] * 5


@pytest.mark.parametrize("how", ["its backend is gone", "it takes too long", "the gateway stops"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_one_whose_end_is_not_seen_costs_what_was_expected(
    how: str, stream: bool, backend: ScriptedBackend
) -> None:
    backend.plays(*answer(200, QUEUED))
    sections = {"upstream": {"background_timeout_seconds": 1.2}} if how == "it takes too long" else {}
    async with keeping_books(backend, sections=sections) as under_test:
        await begun(under_test, backend, stream=stream)
        if how == "its backend is gone":
            await backend.stop()
        elif how == "the gateway stops":
            await under_test.gateway.feature(ResponsesFeature).background.stop()
        await holds(lambda: not len(under_test.gateway.core.ledger), "its entry is closed")
        assert books(under_test) == [EXPECTED] * 5


async def test_a_stream_that_its_client_reads_to_the_end_costs_its_usage_once(backend: ScriptedBackend) -> None:
    backend.plays(*streaming(RESPONSE, hang()))
    async with keeping_books(backend) as under_test:
        async with await under_test.client() as client:
            await client.send(request(body(stream=True), AS_CLIENT, target=PATH))
            await client.read()
            client.reset()
        backend.plays(*answer(200, ended("completed", INPUTS)))
        await holds(lambda: not len(under_test.gateway.core.ledger), "its entry is closed")
        assert books(under_test) == [USED] * 5


async def test_one_that_is_answered_whole_is_not_asked_about(backend: ScriptedBackend) -> None:
    backend.plays(*answer(200, ended("completed", INPUTS)))
    async with keeping_books(backend) as under_test:
        assert (await under_test.ask(body(), AS_CLIENT, target=PATH)).status == 200
        assert books(under_test) == [USED] * 5
        assert len(backend.ledger) == 1


@pytest.mark.parametrize("tokens", [10**12, -5, "many"])
async def test_an_absurd_usage_costs_what_the_model_can_have_used_at_most(
    tokens: Any, backend: ScriptedBackend
) -> None:
    backend.plays(*answer(200, ended("completed", {"input_tokens": 7, "output_tokens": tokens})))
    async with keeping_books(backend) as under_test:
        await begun(under_test, backend, stream=False)
        await holds(lambda: not len(under_test.gateway.core.ledger), "its entry is closed")
        found = books(under_test)
        assert found == [found[0]] * 5
        assert 7 <= found[0] <= 7 + 8192


class Engine:
    """A step that queues each response under an id of its own, and has generated this much when it is asked for it."""

    def __init__(self, output_tokens: int) -> None:
        self._usage = {"input_tokens": 10, "output_tokens": output_tokens}
        self._begun = 0

    async def __call__(self, connection: Connection) -> None:
        assert connection.seen is not None
        document = {**ended("completed", self._usage), "id": connection.seen.target.rpartition(b"/")[2].decode()}
        if connection.seen.method == b"POST":
            self._begun += 1
            document = {**QUEUED, "id": f"resp_{self._begun}"}
        connection.send(whole(200, orjson.dumps(document)))


async def test_a_budget_ends_with_the_tokens_that_responses_used(backend: ScriptedBackend) -> None:
    step: Step = Engine(output_tokens=5000)
    backend.plays(step)
    sections = limited(**LIMITS | {"tokens_per_day": 21_000})
    async with keeping_books(backend, sections=sections) as under_test:
        statuses = []
        for _ in range(6):
            statuses.append((await under_test.ask(body(), AS_CLIENT, target=PATH)).status)
            await holds(lambda: not len(under_test.gateway.core.ledger), "its entry is closed")
        assert statuses == [200] * 5 + [429]
        assert books(under_test) == [5010 * statuses.count(200)] * 5
        refused = await under_test.ask(body(), AS_CLIENT, target=PATH)
        assert refused.error["code"] == "insufficient_quota"


@pytest.mark.parametrize(
    ("restarts", "ends", "used"),
    [(True, True, USED), (True, False, EXPECTED), (False, False, EXPECTED)],
    ids=["ends in the old process", "outlasts the old process", "outlasts a stop"],
)
async def test_the_next_process_knows_what_it_cost(
    restarts: bool, ends: bool, used: int, tmp_path: Path, backend: ScriptedBackend
) -> None:
    end = asyncio.Event()
    backend.plays_once(*answer(200, QUEUED))
    backend.plays(until(end), *answer(200, ended("completed", INPUTS)))
    sections = {
        "auth": {"keys": [{"name": "limited", "key": SECRET, "tokens_per_day": 411}]},
        "state": {"path": str(tmp_path / "state")},
        "server": {"drain_timeout_seconds": 30.0 if ends else 0.5},
    }
    async with restartable(tmp_path, backend, **sections) as gateway:
        assert (await gateway.ask(body(), AS_CLIENT, target=PATH)).status == 200
        await holds(lambda: len(backend.ledger) == 2, "the gateway has asked for its status")
        old = gateway.processes[0]
        if restarts:
            await gateway.restart()
            if ends:
                end.set()
        else:
            old.terminate()
        assert await asyncio.to_thread(old.wait, 20) == 0
        if not restarts:
            gateway.start()
            await gateway.ready()
        refused = await gateway.ask(chat(n=2), AS_CLIENT)
        assert refused.error["code"] == "insufficient_quota"
        assert f"{411 - used} remain" in refused.error["message"]
        shown = (await gateway.asks_admin("/admin/usage", b"GET")).json["total"]
        assert (shown["requests"], shown["prompt_tokens"] + shown["completion_tokens"]) == (2, used)
