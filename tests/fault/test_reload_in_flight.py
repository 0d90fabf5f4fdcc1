"""Settings change while requests wait and streams run: none is lost, and what was learned stays."""

import asyncio
from typing import Any

import pytest

from gateway.config.file import parse
from tests.clients import Answer, chat, request
from tests.fault.rig import UnderTest, holds, running
from tests.scripted import ScriptedBackend
from tests.scripts import chunk, event, head, json_answer, stream, until
from tests.unit.operate.test_reload_applied import VALUES

ONE_SLOT = {"max_in_flight": 1}
LONG = "A conversation that begins with the same words each time. " * 60


def follows(under_test: UnderTest, sections: dict[str, dict[str, Any]], **per_backend: Any) -> None:
    """Change some keys of the configuration in effect, and settings of all backends."""
    document = under_test.gateway.reloads.config.model_dump(mode="json")
    for name, section in sections.items():
        document[name] = {**document[name], **section}
    document["backends"] = [{**each, **per_backend} for each in document["backends"]]
    config = parse(document)
    under_test.gateway.reloads.config = config
    under_test.gateway.apply(config)


def section_of(path: str, value: Any) -> dict[str, dict[str, Any]]:
    section, _, key = path.partition(".")
    return {section: {key: value}}


async def ask(under_test: UnderTest, text: str = "hi", *headers: bytes) -> Answer:
    async with await under_test.client() as client:
        await client.send(request(chat(text), *headers))
        return await client.answer()


CHANGES: list[tuple[dict[str, dict[str, Any]], dict[str, Any]]] = [
    ({}, {"max_in_flight": 4}),
    ({"routing": {"policy": "prefix"}}, {"max_in_flight": 2}),
    ({"routing": {"policy": "least_loaded", "scan": 1}}, {"max_in_flight": 2}),
    ({"admission": {"kv_headroom": 0.5, "adaptive": False}}, {"max_in_flight": 2}),
    ({"admission": {"max_queued_requests": 0, "max_wait_seconds": 0.01}}, {"max_in_flight": 2}),
    ({"health": {"slow_start_seconds": 5}, "upstream": {"keep_alive_seconds": 1}}, {"max_in_flight": 2}),
]


@pytest.mark.parametrize(("sections", "per_backend"), CHANGES)
async def test_requests_that_wait_are_served_under_the_new_settings(
    backend: ScriptedBackend, sections: dict[str, dict[str, Any]], per_backend: dict[str, Any]
) -> None:
    release = asyncio.Event()
    backend.plays(until(release), *json_answer())
    async with running(backend, per_backend=ONE_SLOT) as under_test:
        asking = [asyncio.create_task(ask(under_test)) for _ in range(5)]
        await holds(lambda: len(under_test.gateway.core.queue) == 4, "four wait")
        follows(under_test, sections, **per_backend)
        slots = per_backend["max_in_flight"]
        await holds(lambda: len(backend.ledger) == slots, "the new slots are used")
        assert len(under_test.gateway.core.queue) == 5 - slots
        await asyncio.sleep(0.05)  # a new queue timeout is not theirs
        release.set()
        assert [(await each).status for each in asking] == [200] * 5


async def test_a_lower_limit_of_the_queue_refuses_new_requests_only(backend: ScriptedBackend) -> None:
    release = asyncio.Event()
    backend.plays(until(release), *json_answer())
    async with running(backend, per_backend=ONE_SLOT) as under_test:
        asking = [asyncio.create_task(ask(under_test)) for _ in range(4)]
        await holds(lambda: len(under_test.gateway.core.queue) == 3, "three wait")
        follows(under_test, {"admission": {"max_queued_requests": 1}})
        assert (await ask(under_test)).status == 429
        assert len(under_test.gateway.core.queue) == 3
        release.set()
        assert [(await each).status for each in asking] == [200] * 4


async def test_a_stream_survives_the_change_of_every_key(backend: ScriptedBackend) -> None:
    going_on = asyncio.Event()
    opening = (head(200), chunk(event("a")))
    backend.plays(*opening, until(going_on), *stream(3)[1:])
    async with running(backend) as under_test, await under_test.client() as client:
        await client.send(request(chat(stream=True)))
        await holds(lambda: len(backend.ledger) == 1, "it runs")
        for path, values in VALUES.items():
            if not path.startswith(
                ("auth.keys", "discovery", "server.admin", "server.metrics")
            ) and "tokenizer" not in str(values):
                for value in (*values[1:], values[0]):
                    follows(under_test, section_of(path, value))
                    await asyncio.sleep(0)
        going_on.set()
        answer = await client.answer()
        assert answer.is_done
        assert b'"content":"a"' in answer.events[0]
        assert backend.ledger[0].peer_left_at is None


@pytest.mark.parametrize(
    "section",
    [
        {"decode_weight": 5.0},
        {"aging": 0.5, "scan": 4, "starvation_seconds": 1.0},
        {"index_capacity_factor": 2.0, "seconds_per_prefill_token": 1e-4},
        {"index_memory_bytes": 100_000_000},
    ],
)
async def test_prefix_hits_survive_a_change_of_routing(
    backend: ScriptedBackend, other: ScriptedBackend, section: dict[str, Any]
) -> None:
    for each in (backend, other):
        each.plays(*json_answer())
    async with running(backend, other, sections={"routing": {"policy": "prefix"}}) as under_test:
        first = await ask(under_test, LONG)
        assert first.header("x-gateway-prefix-tokens") == "0"
        follows(under_test, {"routing": section})
        second = await ask(under_test, f"{LONG} And more.")
        assert int(second.header("x-gateway-prefix-tokens") or 0) > 100
        assert second.header("x-gateway-backend") == first.header("x-gateway-backend")


async def test_a_held_request_gets_503_once_requests_are_not_held_any_more(backend: ScriptedBackend) -> None:
    backend.plays(*json_answer())
    async with running(backend) as under_test:
        await backend.stop()
        await holds(lambda: not under_test.gateway.core.fleet.ready, "it is gone")
        asking = asyncio.create_task(ask(under_test))
        await holds(lambda: len(under_test.gateway.core.queue) == 1, "it is held")
        follows(under_test, {"admission": {"hold_without_backend": False}})
        assert (await asking).status == 503


async def test_headers_and_the_access_log_follow(backend: ScriptedBackend) -> None:
    backend.plays(*json_answer())
    async with running(backend) as under_test:
        assert (await ask(under_test)).header("x-gateway-backend")
        follows(under_test, {"server": {"response_headers": False, "access_log_prefixes": True}})
        assert (await ask(under_test)).header("x-gateway-backend") is None
    lines = under_test.log.getvalue().splitlines()
    assert [b'"prefix":' in line for line in lines] == [False, True]
