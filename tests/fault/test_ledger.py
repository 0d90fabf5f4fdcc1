"""Every route: what its backend reports moves the budgets, the rate and the usage of its key, by the same number."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import orjson
import pytest

from gateway.features.keys.usage import totals
from tests.clients import Answer, request
from tests.fault.rig import UnderTest, holds, merged, running
from tests.fault.test_embedding_batches import Embeds
from tests.fault.test_rate_limits import AS_CLIENT, AS_FORM, FORM, limited
from tests.routes import ROUTES
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import Step, answer, chunk, fin, hang, head, last_chunk, raw, whole

OPENAI = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
INPUTS = {"input_tokens": 7, "output_tokens": 5}
POOLED = {"prompt_tokens": 12, "total_tokens": 12}
USED = 12
ANSWER = {"id": "x", "object": "list", "data": [{"index": 0, "object": "embedding", "embedding": "AACAPw=="}]}
MESSAGES = [{"role": "user", "content": "Hello."}]
DONE = b"data: [DONE]\n\n"


def event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


def data(**fields: Any) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(fields)


CHUNKS = [data(choices=[{"index": 0, "delta": {"content": "a"}}]), data(choices=[], usage=OPENAI), DONE]
RESPONSE = [
    event("response.created", response={"id": "resp_1", "status": "in_progress"}),
    event("response.output_text.delta", delta="a"),
    event("response.completed", response={"id": "resp_1", "status": "completed", "usage": INPUTS}),
]
MESSAGE = [
    event("message_start", message={"usage": {"input_tokens": 7, "output_tokens": 0}}),
    event("content_block_delta", index=0, delta={"type": "text_delta", "text": "a"}),
    event("message_delta", delta={}, usage={"output_tokens": 5}),
    event("message_stop"),
]


class Case(NamedTuple):
    """A request on a route: the body, the usage of a whole answer, and the events of a stream, if it can be one."""

    body: dict[str, Any]
    usage: dict[str, Any]
    events: list[bytes]
    is_form: bool = False


CHAT = Case({"messages": MESSAGES}, OPENAI, CHUNKS)
RERANK = Case({"query": "q", "documents": ["a", "b"]}, POOLED, [])
SCORE = Case({"text_1": "q", "text_2": ["a", "b"]}, POOLED, [])
SPEECH = Case({}, OPENAI, CHUNKS, is_form=True)
CASES: dict[bytes, Case] = {
    b"/v1/chat/completions": CHAT,
    b"/v1/chat/completions/batch": Case({"messages": [MESSAGES, MESSAGES]}, OPENAI, []),
    b"/v1/completions": Case({"prompt": "Hello."}, OPENAI, CHUNKS),
    b"/v1/responses": Case({"input": "Hello."}, INPUTS, RESPONSE),
    b"/v1/messages": Case({"messages": MESSAGES, "max_tokens": 20}, INPUTS, MESSAGE),
    b"/invocations": CHAT,
    b"/v1/embeddings": Case({"input": "Hello."}, POOLED, []),
    b"/v1/score": SCORE,
    b"/score": SCORE,
    b"/v1/rerank": RERANK,
    b"/rerank": RERANK,
    b"/v2/rerank": RERANK,
    b"/v2/embed": Case({"texts": ["a"]}, POOLED, []),
    b"/pooling": Case({"input": "Hello."}, POOLED, []),
    b"/classify": Case({"input": "Hello."}, POOLED, []),
    b"/generative_scoring": Case({"query": "q", "items": ["a", "b"], "label_token_ids": [1, 2]}, OPENAI, []),
    b"/v1/audio/transcriptions": SPEECH,
    b"/v1/audio/translations": SPEECH,
}
SESSIONS = {b"/v1/realtime"}  # tests/fault/test_realtime_ledger.py
FREE = {
    b"/v1/messages/count_tokens": (b"POST", {"messages": MESSAGES}),
    b"/tokenize": (b"POST", {"prompt": "Hello."}),
    b"/detokenize": (b"POST", {"tokens": [1, 2]}),
    b"/tokenizer_info": (b"GET", None),
}
STREAMED = [path for path, case in CASES.items() if case.events]
LIMITS = {"tokens_per_minute": 60_000, "tokens_per_day": 100_000, "tokens_per_month": 200_000}


def books(under_test: UnderTest) -> list[int]:
    """Tokens by the rate, by each budget, by the usage page and by the counters of models."""
    gateway = under_test.gateway
    limits, metrics = gateway.core.ledger.limits["limited"], gateway.core.metrics
    rows = totals(gateway.features["keys"].usage_now(), 0, 1 << 30, by_day=False)
    usage = sum(counts[1] + counts[3] for *_, counts in rows)
    counters = sum(metrics.prompt_tokens.values.values()) + sum(metrics.completion_tokens.values.values())
    budgets = [used for _, used in limits.spent().values()]
    return [round(limits.account()["tokens"]), *budgets, usage, counters]


@asynccontextmanager
async def keeping_books(*engines: Any, sections: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[Any]:
    """A gateway whose key has all limits, with a clock for its rates that stands still."""
    made = merged(limited(**LIMITS), {"admission": {"hold_without_backend": False}}, sections or {})
    async with running(*engines, sections=made, **options) as under_test:
        now = under_test.gateway.core.clock()
        for limits in under_test.gateway.core.ledger.limits.values():
            limits._clock = lambda: now
        yield under_test


def asked(path: bytes, *, stream: bool = False, **more: Any) -> bytes:
    """The bytes of a request on a route."""
    case = CASES[path]
    if case.is_form:
        return request(FORM % (b"x" * 6400), AS_CLIENT, AS_FORM, target=path)
    body = {"model": MODEL, **case.body, **({"stream": True} if stream else {}), **more}
    return request(orjson.dumps(body), AS_CLIENT, target=path)


async def send(under_test: UnderTest, data: bytes) -> Answer:
    async with await under_test.client() as client:
        await client.send(data)
        return await client.answer()


def streaming(events: list[bytes], *ending: Step) -> list[Step]:
    return [head(200), *(chunk(each) for each in events), *ending]


def test_every_route_to_a_backend_has_a_case() -> None:
    assert {path for (_, path), route in ROUTES.items() if not route.local} == {*CASES, *FREE, *SESSIONS}
    assert not CASES.keys() & FREE.keys()


@pytest.mark.parametrize("path", CASES, ids=bytes.decode)
async def test_an_answer_costs_what_its_backend_reports_and_a_failure_nothing(
    path: bytes, backend: ScriptedBackend
) -> None:
    async with keeping_books(backend) as under_test:
        backend.plays(*answer(200, {**ANSWER, "usage": CASES[path].usage}))
        for number in (1, 2):
            assert (await send(under_test, asked(path))).status == 200
            assert books(under_test) == [number * USED] * 5
        backend.plays(raw(whole(400, b'{"error":{"message":"bad"}}')))
        assert (await send(under_test, asked(path))).status == 400
        backend.plays(fin())
        assert (await send(under_test, asked(path))).status == 502
        assert books(under_test) == [2 * USED] * 5


@pytest.mark.parametrize("path", STREAMED, ids=bytes.decode)
async def test_a_stream_costs_what_its_backend_reports(path: bytes, backend: ScriptedBackend) -> None:
    backend.plays(*streaming(CASES[path].events, last_chunk()))
    async with keeping_books(backend) as under_test:
        assert (await send(under_test, asked(path, stream=True))).complete
        assert books(under_test) == [USED] * 5


@pytest.mark.parametrize("path", STREAMED, ids=bytes.decode)
@pytest.mark.parametrize("ending", [hang(), fin()], ids=["its client leaves", "it breaks off"])
async def test_a_stream_that_is_cut_costs_its_prompt_and_what_came(
    path: bytes, ending: Step, backend: ScriptedBackend
) -> None:
    events = CASES[path].events
    until_text = 1 + next(number for number, each in enumerate(events) if b'"a"' in each)
    backend.plays(*streaming(events[:until_text], ending))
    async with keeping_books(backend) as under_test:
        client = await under_test.client()
        await client.send(asked(path, stream=True))
        await client.read()
        client.close()
        await holds(lambda: not len(under_test.gateway.core.ledger), "its entry is closed")
        found = books(under_test)
        assert found == [found[0]] * 5
        assert 2 <= found[0] <= 110


@pytest.mark.parametrize(
    "path", [path for path in CASES if path != b"/v1/embeddings"], ids=bytes.decode
)  # whose answers need a usage
async def test_what_is_not_reported_costs_what_was_expected_however_it_ends(
    path: bytes, backend: ScriptedBackend
) -> None:
    backend.plays(*answer(200, ANSWER))
    async with keeping_books(backend) as under_test:
        assert (await send(under_test, asked(path))).status == 200
        expected = books(under_test)
        assert expected == [expected[0]] * 5
        assert expected[0] > 0
        backend.plays(hang())
        seen = len(backend.ledger)
        client = await under_test.client()
        await client.send(asked(path))
        await holds(lambda: len(backend.ledger) > seen and backend.ledger[-1].whole, "it is at the backend")
        client.close()
        await holds(lambda: not len(under_test.gateway.core.ledger), "its entry is closed")
        assert books(under_test) == [2 * each for each in expected]


@pytest.mark.parametrize("path", FREE, ids=bytes.decode)
async def test_what_computes_no_tokens_costs_none(path: bytes, backend: ScriptedBackend) -> None:
    method, fields = FREE[path]
    body = b"" if fields is None else orjson.dumps({"model": MODEL, **fields})
    backend.plays(*answer(200, {"count": 9, "usage": OPENAI}))
    async with keeping_books(backend) as under_test:
        assert (await under_test.ask(body, AS_CLIENT, method=method, target=path)).status == 200
        assert books(under_test) == [0] * 5


async def test_a_stored_response_costs_nothing_more_however_often_it_is_read(backend: ScriptedBackend) -> None:
    stored = {"id": "resp_1", "object": "response", "status": "completed", "usage": INPUTS}
    backend.plays(*answer(200, stored))
    async with keeping_books(backend) as under_test:
        assert (await send(under_test, asked(b"/v1/responses"))).status == 200
        for method, target in ((b"GET", b""), (b"GET", b""), (b"POST", b"/cancel")):
            target = b"/v1/responses/resp_1" + target
            assert (await under_test.ask(b"", AS_CLIENT, method=method, target=target)).status == 200
        backend.plays(*streaming(RESPONSE, last_chunk()))
        target = b"/v1/responses/resp_1?stream=true"
        assert (await under_test.ask(b"", AS_CLIENT, method=b"GET", target=target)).complete
        backend.plays(*streaming(RESPONSE[:1], hang()))
        async with await under_test.client() as client:
            await client.send(request(b"", AS_CLIENT, method=b"GET", target=target))
            await client.read()
        await holds(lambda: not len(under_test.gateway.core.ledger), "its entry is closed")
        assert books(under_test) == [USED] * 5


async def test_a_shared_batch_costs_each_client_its_part(backend: ScriptedBackend) -> None:
    step = Embeds()
    backend.plays(step)
    async with keeping_books(backend) as under_test:
        found = await asyncio.gather(
            *(send(under_test, asked(b"/v1/embeddings", input=["a", f"text {number}"])) for number in range(12))
        )
        assert {each.status for each in found} == {200}
        assert len(step.batches) < 12
        assert books(under_test) == [24] * 5


async def test_another_model_in_its_place_costs_what_that_one_reports(backend: ScriptedBackend) -> None:
    backend.plays(*answer(200, {"object": "chat.completion", "usage": OPENAI}))
    models = {"models": {"absent": {"fallback": [MODEL]}}}
    async with keeping_books(backend, sections=models) as under_test:
        assert (await send(under_test, asked(b"/v1/chat/completions", model="absent"))).status == 200
        assert books(under_test) == [USED] * 5


async def test_requests_of_keys_without_limits_have_no_entry_and_their_usage(backend: ScriptedBackend) -> None:
    backend.plays(*answer(200, {"object": "chat.completion", "usage": OPENAI}))
    async with keeping_books(backend) as under_test:
        free = asked(b"/v1/chat/completions").replace(AS_CLIENT, b"authorization: Bearer sk-free")
        assert (await send(under_test, free)).status == 200
        assert books(under_test) == [0, 0, 0, USED, USED]
