"""Requests that make any engine fail: who sends them costs others nothing."""

import asyncio

import orjson
import pytest

from tests.clients import chat
from tests.fault.rig import holds, running
from tests.scripted import Connection, ScriptedBackend
from tests.scripts import DONE_EVENT, chunk, completion, event, head, last_chunk, raw, whole

POISON = "poison"
AS_POISONER, AS_OTHER = b"authorization: Bearer sk-poisoner", b"authorization: Bearer sk-other"
KEYS = {"auth": {"keys": [{"name": "poisoner", "key": "sk-poisoner"}, {"name": "other", "key": "sk-other"}]}}
FAILED = whole(500, b'{"error":{"message":"list index out of range","type":"InternalServerError","code":500}}')
FAILS_ON_THE_WAY = (
    head(200), chunk(event("a")), chunk(b'data: {"error": {"message": "out of range", "code": 500}}\n\n'),
    chunk(DONE_EVENT), last_chunk(),
)  # fmt: skip


async def digests(connection: Connection) -> None:
    """Answer as an engine that poison makes fail."""
    assert connection.seen is not None
    body = orjson.loads(connection.seen.body)
    if body["messages"][-1]["content"] != POISON:
        connection.send(whole(200, orjson.dumps(completion("ok"))))
        return
    for step in FAILS_ON_THE_WAY if body.get("stream") else (raw(FAILED),):
        await step(connection)


@pytest.mark.parametrize("streams", [False, True])
async def test_poison_of_one_tenant_loses_no_backend_while_another_tenant_is_served(
    backend: ScriptedBackend, other: ScriptedBackend, streams: bool
) -> None:
    backend.plays(digests)
    other.plays(digests)
    async with running(backend, other, sections=KEYS) as under_test:
        for _ in range(2):
            assert (await under_test.ask(chat(), AS_OTHER)).status == 200
        for turn in range(60):
            answer = await under_test.ask(chat(POISON, stream=streams), AS_POISONER)
            assert answer.status == (200 if streams else 500)
            assert (under_test.state(backend), under_test.state(other)) == ("up", "up")
            if turn % 20 == 10:
                assert (await under_test.ask(chat(), AS_OTHER)).status == 200


async def test_a_backend_that_fails_every_tenant_is_ejected_after_as_many_failures_as_any(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    backend.plays(raw(FAILED))
    other.plays(digests)
    sections = KEYS | {"health": {"eject_base_seconds": 30}}
    async with running(backend, other, sections=sections) as under_test:
        for turn in range(20):
            await under_test.ask(chat(), (AS_OTHER, AS_POISONER)[turn // 2 % 2])
        assert under_test.state(backend) == "ejected"
        assert len(backend.ledger) == 5


async def test_without_keys_a_backend_that_fails_everything_is_ejected_at_once_beside_one_that_works(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    backend.plays(raw(FAILED))
    other.plays(digests)
    async with running(backend, other, sections={"health": {"eject_base_seconds": 30}}) as under_test:
        for _ in range(20):
            await under_test.ask()
        assert under_test.state(backend) == "ejected"
        assert len(backend.ledger) == 5


async def test_without_keys_of_several_that_fail_everything_each_is_ejected_in_the_end(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    async with ScriptedBackend() as third, ScriptedBackend() as fourth:
        for each, script in ((backend, raw(FAILED)), (other, raw(FAILED)), (third, digests), (fourth, digests)):
            each.plays(script)
        sections = {"health": {"eject_base_seconds": 30}}
        async with running(backend, other, third, fourth, sections=sections) as under_test:

            async def ask() -> None:
                while True:
                    await under_test.ask()

            asking = asyncio.create_task(ask())
            await holds(lambda: under_test.state(backend) == under_test.state(other) == "ejected", "both are ejected")
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
