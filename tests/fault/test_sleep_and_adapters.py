"""Backends that cannot sleep, wake or load an adapter go on serving, and requests keep their limits."""

import asyncio
from typing import Any

import orjson

from tests.clients import chat
from tests.fault.rig import holds, running
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import answer, json_answer, raw, whole

NOT_FOUND: Any = {"detail": "Not Found"}
METRICS = 'vllm:num_requests_running{engine="0"} 0\nvllm:engine_sleep_state{sleep_state="%s"} 1\n'


def reports(backend: ScriptedBackend, state: str) -> None:
    backend.control[b"/metrics"] = raw(whole(200, (METRICS % state).encode(), kind=b"text/plain"))


async def test_a_backend_that_cannot_sleep_goes_on_serving(backend: ScriptedBackend) -> None:
    backend.plays(*answer(404, NOT_FOUND))
    async with running(backend, per_backend={"sleep": {"idle_seconds": 0.1}}) as under_test:
        await holds(
            lambda: any(event["event"] == "backend_sleep_failed" for event in under_test.events),
            "it was asked to sleep",
        )
        assert [seen.target for seen in backend.ledger] == [b"/sleep?level=1&mode=wait"]
        backend.plays(*json_answer())
        assert (await under_test.ask(chat())).status == 200


async def test_a_backend_that_does_not_wake_is_not_used(backend: ScriptedBackend) -> None:
    reports(backend, "weights_offloaded")
    backend.plays(*answer(500, NOT_FOUND))
    sections = {"admission": {"max_wait_seconds": 1.0}}
    async with running(backend, sections=sections, per_backend={"sleep": {}}) as under_test:
        await holds(lambda: bool(under_test.backend(backend).sleep_state), "it is known to sleep")
        refused = await under_test.ask(chat())
        assert (refused.status, b"asleep" in refused.body) == (503, True)
        assert {seen.target for seen in backend.ledger} == {b"/wake_up"}
        backend.plays(*json_answer())
        reports(backend, "awake")  # somebody else woke it
        await holds(lambda: not under_test.backend(backend).sleep_state, "it is awake")
        assert (await under_test.ask(chat())).status == 200


async def test_a_request_waits_while_its_backend_wakes(backend: ScriptedBackend) -> None:
    reports(backend, "weights_offloaded")
    async with running(backend, per_backend={"sleep": {}}) as under_test:
        await holds(lambda: bool(under_test.backend(backend).sleep_state), "it is known to sleep")
        asked = [asyncio.create_task(under_test.ask(chat())) for _ in range(3)]
        await holds(lambda: b"/wake_up" in {seen.target for seen in backend.ledger}, "it is woken")
        reports(backend, "awake")
        assert [each.status for each in await asyncio.gather(*asked)] == [200] * 3


async def test_an_adapter_that_no_backend_loads_ends_in_503(backend: ScriptedBackend) -> None:
    models = {"poet": {"lora": {"base": MODEL, "path": "/adapters/poet"}}}
    backend.plays(*answer(404, NOT_FOUND))
    async with running(backend, sections={"models": models, "admission": {"max_wait_seconds": 1.0}}) as under_test:
        assert (await under_test.ask(chat(model="poet"))).status == 503
        [asked] = backend.ledger
        assert asked.target == b"/v1/load_lora_adapter"
        assert orjson.loads(asked.body) == {"lora_name": "poet", "lora_path": "/adapters/poet"}
        backend.plays(*json_answer())
        assert (await under_test.ask(chat())).status == 200
