"""Any field with any value at any endpoint, odd headers, lying backends: no internal error, and all comes to rest."""

import asyncio
import json
from random import Random
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.clients import EndOfConnection, request
from tests.fault.rig import CLIENT_KEY, UnderTest, running
from tests.fault.test_embedding_batches import Embeds
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import DONE_EVENT, completion, event, whole

if TYPE_CHECKING:
    from tests.scripted import Connection

MESSAGES = [{"role": "user", "content": "hi"}]
TEXTS = {"/v1/embeddings": {"input": ["a", "b"]}, "/pooling": {"input": "a"}, "/classify": {"input": ["a"]},
         "/v1/score": {"text_1": "a", "text_2": ["b", "c"]}, "/score": {"queries": "a", "documents": ["b"]},
         "/v1/rerank": {"query": "a", "documents": ["b", "c"]}, "/rerank": {"query": "é", "documents": ["b"] * 90},
         "/v2/rerank": {"query": "a", "documents": ["b"]}}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    **TEXTS,
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/responses/resp_1/cancel": {},
}
FIELDS = (
    "model", "messages", "prompt", "input", "stream", "stream_options", "n", "best_of", "max_tokens", "system", "tools",
    "max_completion_tokens", "max_output_tokens", "cache_salt", "instructions", "query", "queries",
    "documents", "items",
    "text_1", "text_2", "data_1", "data_2", "top_n", "encoding_format", "dimensions", "truncate_prompt_tokens", "user",
    "add_special_tokens", "priority", "prompt_cache_key", "previous_response_id", "request_id", "background", "store",
    "kv_transfer_params", "vllm_xargs", "response_format", "logprobs", "echo", "suffix", "metadata", "tokens", "",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 1.5, -0.0, 1e308, 2**31, 2**63, 2**64, -(2**63), 10**4, "", "a", "é",
    "\0", "0", "true",
    "x" * 5000, "\U0001f600", "scripted", "alias", "other", "resp_1", "../x", "http://169.254.169.254/", [],
    [[]], [None],
    [0], [1, 2, 3], [[1, 2], [3]], [-1], [2**40], [1.5], ["a"], ["a", "a"], ["a", 1], [["a"]],
    ["é" * 50] * 70, [{}], {},
    {"a": 1}, {"": None}, {"type": "text", "text": "a"}, {"include_usage": True}, {"include_usage": 0}, MESSAGES,
    [{"role": "user"}], [{"content": "a"}], [{"role": 1, "content": 2}], [{"role": "user", "content": None}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [1, None, "a"]}],
    [{"role": "user", "content": {"image_url": {"url": 5}}}], [{"role": "tool", "tool_calls": "x"}],
    {"model": "scripted"},
)  # fmt: skip
HEADERS = (
    b"x-gateway-deadline-ms: 0", b"x-gateway-deadline-ms: 99999999999999999999", b"x-gateway-deadline-ms: x",
    b"x-gateway-priority: batch", b"x-gateway-priority: \xff", b"x-gateway-explain: 1", b"x-data-parallel-rank: 0",
    b"x-data-parallel-rank: -1", b"x-data-parallel-rank: 99999999999999999999", b"x-stainless-timeout: nan",
    b"x-stainless-read-timeout: 1e999", b"x-tenant: ", b"x-tenant: \xff\xfe", b"traceparent: 00-0-0-0",
    b"tracestate: x",
    b"x-session-id: " + b"s" * 5000, b"x-request-id: \xff", b"x-request-id: same", b"content-type: text/plain",
)  # fmt: skip
ANSWERS = (
    b"", b"{}", b"[]", b"null", b"1", b"not JSON", b'{"usage":null}', b'{"usage":[]}', b'{"data":null,"results":5}',
    b'{"usage":{"prompt_tokens":-1,"completion_tokens":1e99}}', b'{"data":[{"index":0,"embedding":"AAAA"}]}',
    b'{"usage":{"prompt_tokens":"5","completion_tokens":true,"prompt_tokens_details":7}}', b'{"error":{"code":[]}}',
    b'{"usage":{"prompt_tokens":9223372036854775808,"completion_tokens":0}}', b"\xff\xfe",
    b'{"results":[{"index":-1,"relevance_score":null}]}', b'{"id":{},"status":[]}',
)  # fmt: skip
STATUSES = (200, 200, 200, 200, 400, 404, 429, 500, 503, 599)
SECTIONS: dict[str, dict[str, Any]] = {
    "admission": {"max_wait_seconds": 0.5, "hold_without_backend": False, "tenant_header": "x-tenant"},
    "health": {"eject_failures": 10_000},
    "upstream": {"first_byte_timeout_seconds": 2.0},
    "models": {"aliases": {"alias": MODEL}},
}
KEY = {"name": "k", "key": CLIENT_KEY, "isolate_cache": True, "tokens_per_minute": 10**9, "max_concurrent_requests": 99}

EXAMPLES = 25  # of 30 to 40 requests each
Case = tuple[str, dict[str, Any], list[bytes]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """An endpoint, a body with up to three fields of any value, and up to two odd headers of different names."""
    path = draw(st.sampled_from(sorted(BODIES)))
    fields = draw(st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(VALUES), max_size=3))
    headers = draw(st.lists(st.sampled_from(HEADERS), max_size=2, unique_by=lambda line: line.partition(b":")[0]))
    return path, {"model": MODEL, **BODIES[path], **fields}, headers


class Lies:
    """Half of the answers are right for some endpoint, half are not what any client asked for."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._embeds = Embeds()

    async def __call__(self, connection: "Connection") -> None:
        random = self._random
        assert connection.seen is not None
        if random.random() < 0.5 and connection.seen.target == b"/v1/embeddings" and is_texts(connection.seen.body):
            await self._embeds(connection)
        elif random.random() < 0.3:
            connection.send(whole(200, orjson.dumps(completion("ok"))))
        elif random.random() < 0.3:
            pieces = [event("a"), b"data: " + random.choice(ANSWERS) + b"\n\n", DONE_EVENT]
            body = b"".join(pieces[: random.randrange(4)])
            connection.send(whole(200, body, kind=b"text/event-stream"))
        else:
            connection.send(whole(random.choice(STATUSES), random.choice(ANSWERS)))


def is_texts(body: bytes) -> bool:
    """The input is a text or a list of texts."""
    given = orjson.loads(body)["input"]
    return all(isinstance(each, str) for each in given) if isinstance(given, list) else isinstance(given, str)


def encoded(document: dict[str, Any]) -> bytes:
    """The body; integers beyond 64 bits as they are."""
    return json.dumps(document).encode()


async def answered(under_test: UnderTest, case: Case, *more: bytes) -> tuple[Case, int, bytes]:
    """The status that a request gets; 0 where the connection ended without one."""
    path, document, headers = case
    async with await under_test.client() as client:
        try:
            await client.send(request(encoded(document), *headers, *more, target=path.encode()))
            answer = await client.answer()
        except EndOfConnection:
            return case, 0, b""
    return case, answer.status, answer.body


@pytest.mark.parametrize("key", [None, KEY])
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(fuzz=st.lists(cases(), min_size=30, max_size=40), seed=st.integers(0, 1000))
async def test_no_field_header_or_answer_makes_an_internal_error_or_holds_anything(
    key: dict[str, Any] | None, fuzz: list[Case], seed: int
) -> None:
    sections = SECTIONS | ({"auth": {"keys": [key]}} if key else {})
    more = (b"authorization: Bearer " + CLIENT_KEY.encode(),) if key else ()
    async with ScriptedBackend() as one, ScriptedBackend() as two:
        for number, backend in enumerate((one, two)):
            backend.plays(Lies(2 * seed + number))
        async with running(one, two, sections=sections) as under_test:  # checks outcomes and gauges when it ends
            for start in range(0, len(fuzz), 8):
                found = await asyncio.gather(*(answered(under_test, each, *more) for each in fuzz[start : start + 8]))
                for case, status, body in found:
                    assert 200 <= status < 600, case
                    assert b"internal_error" not in body, case
