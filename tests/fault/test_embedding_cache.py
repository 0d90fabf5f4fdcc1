"""Cached embeddings, on real sockets: limits still hold, and isolated keys share nothing."""

from typing import Any

import orjson

from tests.fault.rig import running
from tests.fault.test_embedding_batches import PATH, Embeds, body, vector, vectors
from tests.scripted import ScriptedBackend

KEPT: dict[str, Any] = {"embeddings": {"cache_bytes": 1_000_000}}


async def test_an_answer_from_memory_is_authorized_limited_charged_and_logged_like_any_other(
    backend: ScriptedBackend,
) -> None:
    backend.plays(Embeds())
    keys = [{"name": "ann", "key": "sk-ann", "requests_per_minute": 3, "tokens_per_minute": 60}]
    async with running(backend, sections={**KEPT, "auth": {"keys": keys}}) as under_test:
        header = b"authorization: Bearer sk-ann"
        answers = [await under_test.ask(body("a"), header, target=PATH) for _ in range(4)]
        assert [answer.status for answer in answers] == [200, 200, 200, 429]
        assert [answer.header("x-gateway-reused-inputs") for answer in answers] == ["0", "1", "1", None]
        assert [answer.header("x-ratelimit-remaining-requests") for answer in answers] == ["2", "1", "0", "0"]
        assert all(vectors(answer) == [vector("a")] for answer in answers[:3])
        assert "57/60" in repr(under_test.gateway.ledger.limits["ann"])  # a token each
        assert len(backend.ledger) == 1
        assert (await under_test.ask(body("a"), b"authorization: Bearer other", target=PATH)).status == 401
        assert under_test.outcomes == {"completed": 3, "rate_limited": 1, "rejected": 1}
    logged = [orjson.loads(line) for line in under_test.log.getvalue().splitlines()]
    known = [line for line in logged if line["reused_inputs"] == 1]
    assert [(line["backend"], line["attempts"], line["queue_ms"], line["prompt_tokens"]) for line in known] == [
        (None, 0, 0, 1)
    ] * 2


async def test_isolated_keys_cannot_learn_what_others_asked(backend: ScriptedBackend) -> None:
    backend.plays(Embeds())
    keys = [{"name": name, "key": f"sk-{name}", "isolate_cache": name != "all"} for name in ("ann", "bob", "all")]
    async with running(backend, sections={**KEPT, "auth": {"keys": keys}}) as under_test:
        for name in ("all", "ann", "bob", "ann"):
            answer = await under_test.ask(body("a"), b"authorization: Bearer sk-" + name.encode(), target=PATH)
            assert answer.status == 200
        assert answer.header("x-gateway-reused-inputs") == "1"
        assert len(backend.ledger) == 3
