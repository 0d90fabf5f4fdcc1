"""Inputs that are asked for again, on real sockets: limits still hold, and clients may leave each other."""

import asyncio
from typing import Any

import orjson

from tests.clients import Client, request
from tests.fault.rig import holds, running
from tests.fault.test_embedding_batches import PATH, Embeds, body, vector, vectors
from tests.scripted import ScriptedBackend
from tests.scripts import until

KEPT: dict[str, Any] = {"embeddings": {"cache_bytes": 1_000_000, "deduplicate": True}}


async def test_an_answer_from_memory_is_authorized_limited_charged_and_logged_like_any_other(
    backend: ScriptedBackend,
) -> None:
    backend.plays(Embeds())
    keys = [{"name": "ann", "key": "sk-ann", "requests_per_minute": 3, "tokens_per_minute": 1000}]
    async with running(backend, sections={**KEPT, "auth": {"keys": keys}}) as under_test:
        header = b"authorization: Bearer sk-ann"
        answers = [await under_test.ask(body("a"), header, target=PATH) for _ in range(4)]
        assert [answer.status for answer in answers] == [200, 200, 200, 429]
        assert [answer.header("x-gateway-reused-inputs") for answer in answers] == ["0", "1", "1", None]
        assert [answer.header("x-ratelimit-remaining-requests") for answer in answers] == ["2", "1", "0", "0"]
        assert all(vectors(answer) == [vector("a")] for answer in answers[:3])
        assert "997/1000" in repr(under_test.gateway.handler._rate_limits["ann"])  # a token each
        assert len(backend.ledger) == 1
        assert (await under_test.ask(body("a"), b"authorization: Bearer other", target=PATH)).status == 401
        assert under_test.outcomes == {"completed": 3, "rate_limited": 1, "rejected": 1}
    logged = [orjson.loads(line) for line in under_test.log.getvalue().splitlines()]
    known = [line for line in logged if line["reused_inputs"] == 1]
    assert [(line["backend"], line["attempts"], line["queue_ms"], line["prompt_tokens"]) for line in known] == [
        (None, 0, 0, 1)
    ] * 2


async def test_isolated_keys_are_not_told_what_others_asked(backend: ScriptedBackend) -> None:
    backend.plays(Embeds())
    keys = [{"name": name, "key": f"sk-{name}", "isolate_cache": name != "all"} for name in ("ann", "bob", "all")]
    async with running(backend, sections={**KEPT, "auth": {"keys": keys}}) as under_test:
        for name in ("all", "ann", "bob", "ann"):
            answer = await under_test.ask(body("a"), b"authorization: Bearer sk-" + name.encode(), target=PATH)
            assert answer.status == 200
        assert answer.header("x-gateway-reused-inputs") == "1"
        assert len(backend.ledger) == 3


async def test_a_client_that_leaves_takes_nothing_from_those_who_wait_for_the_same(backend: ScriptedBackend) -> None:
    go, embeds = asyncio.Event(), Embeds()
    backend.plays(until(go), embeds)
    async with running(backend, sections=KEPT) as under_test:
        first = await Client.connect(under_test.port)
        await first.send(request(body("same"), target=PATH))
        await holds(lambda: len(backend.ledger) == 1, "it is under way")
        others = [asyncio.create_task(under_test.ask(body(given), target=PATH)) for given in ("same", ["same", "same"])]
        await holds(lambda: under_test.gateway.coalescer._present == 3, "they wait")
        first.close()
        await holds(lambda: under_test.gateway.coalescer._present == 2, "the first has left")
        go.set()
        answers = await asyncio.gather(*others)
        assert [vectors(answer) for answer in answers] == [[vector("same")], [vector("same")] * 2]
        assert embeds.batches == [["same"]]
        await holds(lambda: under_test.gateway.coalescer.busy == 0, "nothing is left")
