"""Backends that report what no request can have used: nothing that is learned, limited or counted goes by it."""

from typing import Any

import orjson
import pytest

from tests.clients import chat
from tests.fault.rig import UnderTest, running
from tests.scripted import Connection, ScriptedBackend
from tests.scripts import DONE_EVENT, answer, chunk, completion, event, head, json_answer, last_chunk, whole

CONTEXT = 8192  # of the scripted model
LIMITED = {"auth": {"keys": [{"name": "limited", "key": "sk-limited", "tokens_per_minute": 100_000}]}}
AS_CLIENT = b"authorization: Bearer sk-limited"


def learned(under_test: UnderTest) -> tuple[Any, ...]:
    """What answers have taught."""
    gateway = under_test.gateway
    gateway.core.finished.settle()
    lengths, estimates = gateway.core.cache_state.output_lengths, gateway.core.cache_state.estimates
    return (
        sum(lengths.expected("scripted", "limited", None)), sum(lengths.expected("scripted", "limited", 0)),
        estimates.bytes_per_token("scripted"),
    )  # fmt: skip


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
@pytest.mark.parametrize("value", [10**12, 2**62, -(10**12), 1e300, "9", True])
async def test_one_absurd_usage_teaches_nothing_and_costs_a_key_no_more_than_the_model_can_do(
    backend: ScriptedBackend, name: str, value: Any, streams: bool
) -> None:
    async with running(backend, sections=LIMITED) as under_test:
        assert (await under_test.ask(chat(), AS_CLIENT)).status == 200
        before = learned(under_test)
        usage = {"prompt_tokens": 5, "completion_tokens": 1} | {name: value}
        if streams:
            told = b'data: {"choices":[],"usage":%b}\n\n' % orjson.dumps(usage)
            backend.plays_once(
                head(200), chunk(event("a")), chunk(told), chunk(DONE_EVENT), last_chunk()
            )  # fmt: skip
        else:
            backend.plays_once(*answer(200, completion("ok") | {"usage": usage}))
        assert (await under_test.ask(chat(stream=streams), AS_CLIENT)).status == 200
        after = learned(under_test)
        assert after[0] <= 2 * before[0]
        assert abs(after[1] - before[1]) <= 1
        assert after[2] == before[2]
        backend.plays(*json_answer())
        assert (await under_test.ask(chat(), AS_CLIENT)).status == 200  # its minute is not used up
        metrics = under_test.gateway.core.metrics
        assert 0 <= metrics.prompt_tokens.values["scripted",] <= 2 * CONTEXT
        assert 0 <= metrics.completion_tokens.values["scripted",] <= 2 * CONTEXT
        assert all(
            0 <= orjson.loads(line)["prompt_tokens"] <= CONTEXT for line in under_test.log.getvalue().splitlines()
        )


def embeds(*told: int) -> Any:
    """A step that answers embeddings requests; the first answers tell these tokens, later ones four for each byte."""
    first = list(told)

    async def step(connection: Connection) -> None:
        assert connection.seen is not None
        texts = orjson.loads(connection.seen.body)["input"]
        texts = [texts] if isinstance(texts, str) else texts
        data = [{"object": "embedding", "index": number, "embedding": [0.5]} for number in range(len(texts))]
        tokens = first.pop(0) if first else sum(map(len, texts)) // 4
        document = {"object": "list", "data": data, "model": "scripted", "usage": {"prompt_tokens": tokens}}
        connection.send(whole(200, orjson.dumps(document)))

    return step


async def embed(under_test: UnderTest, text: str) -> int:
    """The status of an embeddings request."""
    body = orjson.dumps({"model": "scripted", "input": text})
    return (await under_test.ask(body, target=b"/v1/embeddings")).status


async def test_after_absurd_usage_of_embeddings_short_texts_share_batches_again(backend: ScriptedBackend) -> None:
    backend.plays(embeds(2**62, 2**62, 2**62))
    async with running(backend) as under_test:
        gateway = under_test.gateway
        for number in range(100):
            assert await embed(under_test, f"text {number}") == 200
        sizes = gateway.features["embeddings"].batcher.sizes_of(gateway.features["embeddings"].coalescer, "scripted")
        assert not sizes.may_be_too_long(sizes.tokens_of_texts([1000]))
        assert 0 <= under_test.gateway.core.metrics.prompt_tokens.values["scripted",] < 10 * CONTEXT
