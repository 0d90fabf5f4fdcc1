"""Pods that come, end and are replaced while requests run: none is lost, and nothing new goes where it must not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.check import examine
from gateway.config.file import parse
from tests.clients import Answer, chat
from tests.fault.rig import BACKEND_KEY, UnderTest, holds, running
from tests.kubernetes_api import ApiServer, Document, endpoint_slice, pod
from tests.scripted import Connection, ScriptedBackend
from tests.scripts import Step, chunk, event, hang, json_answer, stream, until

STREAM = chat(stream=True)


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    """An API server that knows no slices yet."""
    async with ApiServer() as server:
        yield server


def pods(engine: ScriptedBackend, *endpoints: Document) -> Document:
    """The slice of the pods at an engine's port: pods with another port are in another slice."""
    return endpoint_slice(f"vllm-{engine.port}", *endpoints, ports=[("http", engine.port)])


def sections(server: ApiServer, folder: Path, **backend: Any) -> dict[str, Any]:
    found = {"service": "vllm", "kubeconfig": str(server.kubeconfig(folder))}
    return {"discovery": {"kubernetes": [found], "backend": {"api_key": BACKEND_KEY, **backend}}}


@asynccontextmanager
async def discovering(server: ApiServer, folder: Path, *names: str, **backend: Any) -> AsyncIterator[UnderTest]:
    """A gateway that has found these backends, and watches for changes."""
    async with running(sections=sections(server, folder, **backend)) as under_test:
        await lists(under_test, *names)
        await holds(lambda: server.watching == 1, "it watches")
        await holds(
            lambda: all(each.health.state == "up" for each in under_test.gateway.core.fleet.backends), "all are up"
        )
        yield under_test


async def lists(under_test: UnderTest, *names: str) -> None:
    by_name = under_test.gateway.core.fleet
    await holds(lambda: sorted(by_name.by_name) == sorted(names), lambda: f"{sorted(by_name.by_name)} become {names}")


def failures(under_test: UnderTest) -> list[str]:
    return [each["reason"] for each in under_test.events if each["event"] == "discovery_failed"]


def stream_until(release: asyncio.Event) -> tuple[Step, ...]:
    """A stream that has begun, and goes on when the test says so."""
    begun, ending = stream(1)[:2], stream(1)[2:]
    return (*begun, until(release), chunk(event("late ")), *ending)


def many(under_test: UnderTest, count: int, body: bytes | None = None) -> list[asyncio.Task[Answer]]:
    loop = asyncio.get_running_loop()
    return [loop.create_task(under_test.ask(body)) for _ in range(count)]


async def test_a_pod_that_appears_serves_after_its_first_probe(
    api: ApiServer, backend: ScriptedBackend, tmp_path: Path
) -> None:
    probes = 0

    async def probed(connection: Connection) -> None:
        nonlocal probes
        probes += 1
        await backend.answer_control(connection)

    backend.control[b"/health"] = probed
    backend.plays(*json_answer())
    api.put(endpoint_slice("vllm-1"))
    async with discovering(api, tmp_path) as under_test:
        [held] = many(under_test, 1)
        await holds(lambda: under_test.gateway.core.lease_broker.waiting == 1, "it waits for a backend")
        api.put(pods(backend, pod("a", zone="zone-b")))
        answer = await held
        assert (answer.status, answer.header("x-gateway-backend"), probes <= 2) == (200, "a", True)
        [shown] = under_test.gateway.operators.overview.backends()
        assert (shown["zone"], shown["from"].partition(" ")[0]) == ("zone-b", "kubernetes")


async def test_a_pod_that_terminates_ends_its_streams_and_gets_nothing_new(
    api: ApiServer, backend: ScriptedBackend, other: ScriptedBackend, tmp_path: Path
) -> None:
    release = asyncio.Event()
    backend.plays(*stream_until(release))
    other.plays(*json_answer())
    api.put(pods(backend, pod("a")))
    async with discovering(api, tmp_path, "a") as under_test:
        asked = many(under_test, 3, STREAM)
        await holds(lambda: len(backend.ledger) == 3, "they run")
        api.put(pods(other, pod("b")))
        api.put(pods(backend, pod("a", ready=False, terminating=True)))
        await lists(under_test, "b")
        answers = await asyncio.gather(*many(under_test, 6))
        assert {(each.status, each.header("x-gateway-backend")) for each in answers} == {(200, "b")}
        assert [each.name for each in under_test.gateway.core.fleet.leaving] == ["a"]
        api.delete(f"vllm-{backend.port}")  # the pod is gone from the API before its streams have ended
        release.set()
        streams = await asyncio.gather(*asked)
        assert [(each.status, each.is_done, b"late" in each.body) for each in streams] == [(200, True, True)] * 3
        await holds(lambda: under_test.gateway.core.fleet.leaving == (), "it has left")
        assert len(backend.ledger) == 3
        assert under_test.outcomes == {"completed": 9}


async def test_requests_that_wait_for_a_pod_that_terminates_go_to_another(
    api: ApiServer, backend: ScriptedBackend, other: ScriptedBackend, tmp_path: Path
) -> None:
    release = asyncio.Event()
    backend.plays(*stream_until(release))
    other.plays(*stream(2))
    api.put(pods(backend, pod("a")))
    async with discovering(api, tmp_path, "a", max_in_flight=1) as under_test:
        asked = many(under_test, 5, STREAM)
        await holds(lambda: under_test.gateway.core.lease_broker.waiting == 4, "one runs and four wait")
        api.put(pods(backend, pod("a", terminating=True, ready=False)))
        await lists(under_test)
        assert under_test.gateway.core.lease_broker.waiting == 4  # they are held, though no backend is there
        api.put(pods(other, pod("b")))
        await holds(lambda: len(other.ledger) == 4, "they are served")
        release.set()
        assert all([(await each).is_done for each in asked])
        assert len(backend.ledger) == 1


async def test_pods_are_replaced_under_load_without_a_lost_request(
    api: ApiServer, backend: ScriptedBackend, other: ScriptedBackend, tmp_path: Path
) -> None:
    for each in (backend, other):
        each.plays(*stream(4, 0.005))
    api.put(pods(backend, pod("a-0")))
    async with discovering(api, tmp_path, "a-0", max_in_flight=4) as under_test:
        answers: list[Answer] = []
        enough = asyncio.Event()

        async def client() -> None:
            while not enough.is_set():
                answers.append(await under_test.ask(STREAM))

        async def served_by(name: str) -> None:
            await holds(lambda: any(each.header("x-gateway-backend") == name for each in answers), f"{name} serves")

        clients = [asyncio.get_running_loop().create_task(client()) for _ in range(10)]
        await served_by("a-0")
        for turn in range(3):
            old, new = (backend, other) if turn % 2 == 0 else (other, backend)
            api.put(pods(new, pod(f"a-{turn + 1}", ready=False)))
            api.put(pods(new, pod(f"a-{turn + 1}")))
            await served_by(f"a-{turn + 1}")
            api.put(pods(old, pod(f"a-{turn}", ready=False, terminating=True)))
            await lists(under_test, f"a-{turn + 1}")
            api.delete(f"vllm-{old.port}")
        enough.set()
        await asyncio.gather(*clients)
        assert all(each.is_done for each in answers)
        assert under_test.outcomes == {"completed": len(answers)}
        assert {each.header("x-gateway-backend") for each in answers} == {"a-0", "a-1", "a-2", "a-3"}


async def test_a_pod_that_is_not_ready_for_a_while_keeps_what_is_known_of_it(
    api: ApiServer, backend: ScriptedBackend, other: ScriptedBackend, tmp_path: Path
) -> None:
    for each in (backend, other):
        each.plays(*json_answer())
        api.put(pods(each, pod(f"pod-{each.port}")))
    names = [f"pod-{each.port}" for each in (backend, other)]
    async with discovering(api, tmp_path, *names) as under_test:
        known = under_test.gateway.core.fleet.by_name[names[0]]
        api.put(pods(backend, pod(names[0], ready=False)))
        await holds(lambda: known.draining == "not ready", "it drains")
        answers = await asyncio.gather(*many(under_test, 4))
        assert {each.header("x-gateway-backend") for each in answers} == {names[1]}
        api.put(pods(backend, pod(names[0])))
        await holds(lambda: not known.draining, "it is back")
        answers = await asyncio.gather(*many(under_test, 4))
        assert {each.header("x-gateway-backend") for each in answers} == set(names)
        assert under_test.gateway.core.fleet.by_name[names[0]] is known


async def test_another_pod_at_the_same_address_is_another_backend(
    api: ApiServer, backend: ScriptedBackend, tmp_path: Path
) -> None:
    backend.plays(hang())
    api.put(pods(backend, pod("a")))
    async with discovering(api, tmp_path, "a") as under_test:
        [asked] = many(under_test, 1, STREAM)
        await holds(lambda: len(backend.ledger) == 1, "it runs")
        old = under_test.gateway.core.fleet.by_name["a"]
        backend.plays(*json_answer())
        api.put(pods(backend, pod("a", ready=False, terminating=True), pod("b")))
        await lists(under_test, "b")
        new = under_test.gateway.core.fleet.by_name["b"]
        assert (under_test.gateway.core.fleet.leaving, new.config.url) == ((old,), old.config.url)
        assert (await under_test.ask()).header("x-gateway-backend") == "b"
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await holds(lambda: under_test.gateway.core.fleet.leaving == (), "it has left")


async def test_backends_stay_while_the_api_server_is_away_and_changes_are_caught_up_with(
    api: ApiServer, backend: ScriptedBackend, other: ScriptedBackend, tmp_path: Path
) -> None:
    for each in (backend, other):
        each.plays(*json_answer())
    api.put(pods(backend, pod("a")))
    async with discovering(api, tmp_path, "a") as under_test:
        await api.stop()
        await holds(lambda: len(failures(under_test)) > 0, "it is said")
        assert (await under_test.ask()).header("x-gateway-backend") == "a"
        api.put(pods(other, pod("b")))
        api.delete(f"vllm-{backend.port}")
        await api.start()
        await lists(under_test, "b")
        assert (await under_test.ask()).header("x-gateway-backend") == "b"
        assert api.asked.count("list") == 1
        said = failures(under_test)
        assert all(each.startswith("the API server cannot be reached") for each in said)
        assert len(set(said)) == len(said)


@pytest.mark.parametrize("code", [401, 403, 500])
async def test_an_api_server_that_refuses_takes_no_backend_away(
    code: int, api: ApiServer, backend: ScriptedBackend, tmp_path: Path
) -> None:
    backend.plays(*json_answer())
    api.put(pods(backend, pod("a")))
    async with discovering(api, tmp_path, "a") as under_test:
        api.broken = code
        api.cut()
        await holds(lambda: any(str(code) in each for each in failures(under_test)), "it is said")
        assert (await under_test.ask()).status == 200
        assert list(under_test.gateway.core.fleet.by_name) == ["a"]


async def test_a_check_examines_the_pods_that_are_ready(
    api: ApiServer, backend: ScriptedBackend, tmp_path: Path
) -> None:
    api.put(pods(backend, pod("a")))
    api.put(endpoint_slice("vllm-2", pod("b", "10.0.0.2", ready=False)))
    document = await examine(parse(sections(api, tmp_path)))
    assert [(each["name"], each["reachable"]) for each in document["backends"]] == [("a", True)]
    api.delete("vllm-2")
    api.delete(f"vllm-{backend.port}")
    document = await examine(parse(sections(api, tmp_path)))
    assert "discovery: no EndpointSlice of vllm: check the name and the namespace" in document["warnings"]
    api.broken = 403
    document = await examine(parse(sections(api, tmp_path)))
    assert "discovery: the API server answered 403: it is broken" in document["warnings"]
