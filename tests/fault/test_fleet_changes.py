"""Backends are added, drained and removed while requests run: none is lost, and nothing new goes where it must not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tests.clients import chat
from tests.fault.rig import BACKEND_KEY, UnderTest, holds, running
from tests.scripted import ScriptedBackend
from tests.scripts import hang, json_answer, stream

ADMIN = {"server": {"host": "127.0.0.1", "port": 0, "admin": {"port": 0}, "drain_delay_seconds": 0}}
STREAM = chat(stream=True)


class Operator:
    """Asks the admin port."""

    def __init__(self, under_test: UnderTest, session: aiohttp.ClientSession) -> None:
        self._base = f"http://127.0.0.1:{under_test.admin_port}/admin/backends"
        self._session = session

    async def asks(self, method: str, path: str = "", **options: Any) -> tuple[int, Any]:
        async with self._session.request(method, self._base + path, **options) as response:
            return response.status, await response.json()

    async def adds(self, engine: ScriptedBackend, name: str = "") -> None:
        settings = {"url": engine.url, "name": name, "api_key": BACKEND_KEY}
        status, answer = await self.asks("POST", json=settings)
        assert (status, answer["backend"]["from"]) == (201, "by hand")
        assert "api_key" not in str(answer)

    async def shown(self) -> dict[str, Any]:
        _, document = await self.asks("GET")
        return {each["name"]: each for each in document["backends"]}


@asynccontextmanager
async def operated(*engines: ScriptedBackend) -> AsyncIterator[tuple[UnderTest, Operator]]:
    async with running(*engines, sections=ADMIN) as under_test, aiohttp.ClientSession() as session:
        yield under_test, Operator(under_test, session)


def watches() -> int:
    """How many backends are probed."""
    return sum(task.get_name() == "backend_watch" for task in asyncio.all_tasks()) // 4  # one task, and three loops


def name_of(engine: ScriptedBackend) -> str:
    return engine.url.removeprefix("http://")


async def test_a_backend_that_is_added_gets_requests(backend: ScriptedBackend, other: ScriptedBackend) -> None:
    for each in (backend, other):
        each.plays(*json_answer())
    async with operated(backend) as (under_test, operator):
        await operator.adds(other, "new")
        await holds(lambda: under_test.state(other) == "up", "it is up")
        answers = await asyncio.gather(*(under_test.ask() for _ in range(10)))
        assert [answer.status for answer in answers] == [200] * 10
        assert min(len(backend.ledger), len(other.ledger)) > 0
        status, answer = await operator.asks("POST", json={"url": other.url})
        assert (status, answer["error"]["code"]) == (409, "backend_exists")


async def test_a_drain_waits_for_the_stream_that_runs(backend: ScriptedBackend, other: ScriptedBackend) -> None:
    backend.plays(hang())
    other.plays(*json_answer())
    async with operated(backend) as (under_test, operator):
        running_stream = asyncio.create_task(under_test.ask(STREAM))
        await holds(lambda: len(backend.ledger) == 1, "it runs")
        await operator.adds(other)
        await holds(lambda: under_test.state(other) == "up", "the other is up")
        status, answer = await operator.asks("POST", f"/{name_of(backend)}/drain?wait_seconds=0.1")
        assert (status, answer["drained"], answer["backend"]["in_flight"]) == (200, False, 1)
        assert answer["backend"]["state_reason"] == "drains, 1 sequences in flight (by hand)"
        answers = await asyncio.gather(*(under_test.ask() for _ in range(6)))
        assert [each.status for each in answers] == [200] * 6
        assert (len(backend.ledger), len(other.ledger)) == (1, 6)
        waiting = asyncio.create_task(operator.asks("POST", f"/{name_of(backend)}/drain?wait_seconds=20"))
        running_stream.cancel()
        await asyncio.gather(running_stream, return_exceptions=True)
        assert (await waiting)[1]["drained"]
        status, answer = await operator.asks("POST", f"/{name_of(backend)}/undrain")
        assert (status, answer["backend"]["draining"]) == (200, None)


async def test_a_removed_backend_ends_its_streams_and_is_forgotten(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    for each in (backend, other):
        each.plays(hang())
    async with operated(backend, other) as (under_test, operator):
        asked = [asyncio.create_task(under_test.ask(STREAM)) for _ in range(4)]
        await holds(lambda: len(backend.ledger) == len(other.ledger) == 2, "all run")
        backend.plays(*json_answer())
        status, answer = await operator.asks("DELETE", f"/{name_of(other)}")
        assert (status, answer["drained"]) == (200, False)
        assert (await operator.shown())[name_of(other)]["draining"] == "removed"
        answers = await asyncio.gather(*(under_test.ask() for _ in range(4)))
        assert [each.status for each in answers] == [200] * 4
        assert len(other.ledger) == 2
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await holds(lambda: not under_test.gateway.core.fleet.leaving, "it has left")
        assert list(await operator.shown()) == [name_of(backend)]
        await holds(lambda: watches() == 1, "it is not probed any more")
        status, answer = await operator.asks("DELETE", f"/{name_of(other)}")
        assert (status, answer["error"]["code"]) == (404, "backend_not_found")


async def test_requests_that_wait_for_the_only_backend_go_to_the_one_that_takes_its_place(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    other.plays(*json_answer())
    async with operated(backend) as (under_test, operator):
        await operator.asks("POST", f"/{name_of(backend)}/drain")
        asked = [asyncio.create_task(under_test.ask()) for _ in range(5)]
        await holds(lambda: under_test.gateway.core.lease_broker.waiting == 5, "all wait")
        await operator.adds(other)
        await operator.asks("DELETE", f"/{name_of(backend)}")
        assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 5
        assert len(other.ledger) == 5
        assert backend.ledger == []


async def test_backends_come_and_go_under_traffic_and_no_request_fails(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    for each in (backend, other):
        each.plays(*stream(3))
    async with operated(backend) as (under_test, operator):
        answers, stopped = list[int](), asyncio.Event()

        async def client() -> None:
            while not stopped.is_set():
                answers.append((await under_test.ask(STREAM)).status)

        clients = [asyncio.create_task(client()) for _ in range(8)]
        for _ in range(5):
            sent = len(other.ledger)
            await operator.adds(other)
            await holds(lambda sent=sent: len(other.ledger) > sent + 3, "it serves")
            await operator.asks("DELETE", f"/{name_of(other)}")
            await holds(lambda: not under_test.gateway.core.fleet.leaving, "it has left")
        stopped.set()
        await asyncio.gather(*clients)
        assert set(answers) == {200}
        assert len(under_test.gateway.core.relay._pools) == 1


async def test_what_is_wrong_with_a_change_is_said(backend: ScriptedBackend) -> None:
    cases: tuple[tuple[dict[str, Any], int, str], ...] = (
        ({"data": b"{"}, 400, "not valid JSON"),
        ({"json": {"url": "ftp://nonsense"}}, 400, "url: must look like http://host:port"),
        ({"json": {"url": "http://a:1", "colour": "red"}}, 400, "colour: unknown key"),
        ({"json": {"url": "http://a:1"}, "headers": {"origin": "http://evil.example"}}, 403, "web pages"),
    )
    async with operated(backend) as (_, operator):
        for options, status, text in cases:
            found, answer = await operator.asks("POST", **options)
            assert found == status
            assert text in answer["error"]["message"]
        found, answer = await operator.asks("POST", f"/{name_of(backend)}/drain?wait_seconds=soon")
        assert (found, "wait_seconds" in answer["error"]["message"]) == (400, True)
        assert list(await operator.shown()) == [name_of(backend)]
