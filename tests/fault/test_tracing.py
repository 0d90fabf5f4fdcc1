"""Traces of requests, as an OTLP receiver gets them, and as engines see them in `traceparent`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.core.observe.record import Record
from gateway.features.tracing.tracing import EXPORTED_AT_ONCE, MAX_HELD_TRACES
from tests.clients import chat, request
from tests.fault.rig import BACKEND_KEY, CLIENT_KEY, PROMPT_CANARY, UnderTest, holds, running
from tests.fault.test_embedding_batches import PATH, Embeds, body
from tests.otlp import CLIENT, ERROR, INTERNAL, SERVER, Receiver, Span, grpc_receiver, http_receiver
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import chunk, fin, hang, json_answer, raw, stream, until, whole

STREAM = chat(stream=True)
PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = (f"00-{'-'.join(PARENT)}-{flag}".encode() for flag in ("01", "00"))


@asynccontextmanager
async def traced(
    *engines: ScriptedBackend,
    protocol: str = "http",
    ratio: float = 1.0,
    sections: dict[str, dict[str, Any]] | None = None,
    **per_backend: Any,
) -> AsyncIterator[tuple[UnderTest, Receiver]]:
    """A gateway that sends traces to a receiver."""
    async with {"http": http_receiver, "grpc": grpc_receiver}[protocol]() as receiver:
        tracing = settings_of(receiver, protocol=protocol, sample_ratio=ratio) | (sections or {}).get("tracing", {})
        settings = (sections or {}) | {"tracing": tracing}
        async with running(*engines, sections=settings, per_backend=per_backend) as under_test:
            yield under_test, receiver


def settings_of(receiver: Receiver, **more: Any) -> dict[str, Any]:
    usual = {"sample_ratio": 1.0, "service_name": "gateway-a", "export_interval_seconds": 0.2}
    return {"endpoint": receiver.url, **usual, **more}


async def received(under_test: UnderTest, receiver: Receiver, requests: int = 1) -> list[Span]:
    """The spans, once those of so many requests are there; the first is the request's own."""
    under_test.gateway.core.finished.settle()
    await holds(lambda: len([span for span in receiver.spans if span.kind == SERVER]) >= requests, "spans arrive")
    return sorted(receiver.spans, key=lambda span: (span.start, span.kind != SERVER))


def traceparent(backend: ScriptedBackend, number: int = -1) -> list[str]:
    return (backend.ledger[number].header(b"traceparent") or b"").decode().split("-")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_stream_is_traced_from_client_to_engine(backend: ScriptedBackend, protocol: str) -> None:
    backend.plays(*stream(3, 0.01))
    async with traced(backend, protocol=protocol) as (under_test, receiver):
        assert (await under_test.ask(STREAM, b"x-request-id: id-1")).is_done
        asked, placement, sent = await received(under_test, receiver)
    assert [span.kind for span in (asked, placement, sent)] == [SERVER, INTERNAL, CLIENT]
    assert (asked.name, placement.name, sent.name) == ("POST /v1/chat/completions", "placement", f"chat {MODEL}")
    assert {span.service for span in receiver.spans} == {"gateway-a"}
    assert len({span.trace_id for span in receiver.spans}) == 1
    assert (asked.parent_id, placement.parent_id, sent.parent_id) == ("", asked.span_id, asked.span_id)
    assert traceparent(backend) == ["00", sent.trace_id, sent.span_id, "01"]
    assert asked.start <= placement.start <= sent.start < sent.end <= asked.end
    assert sent.end - sent.start > 0.02
    assert sent.events == ["first_token"]
    assert asked.attributes["http.response.status_code"] == 200
    assert asked.attributes["gateway.request_id"] == "id-1"
    assert asked.attributes["gateway.outcome"] == "completed"
    name = backend.url.removeprefix("http://")
    [price] = placement.attributes["gateway.engines"]
    assert price.startswith(f"{name};cost=")
    assert price.endswith(";hit=0;open=1")
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "vllm", "gen_ai.request.model": MODEL,
        "gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 3, "server.address": "127.0.0.1",
        "server.port": backend.port, "gateway.backend": name,
    }  # fmt: skip
    assert {key: sent.attributes[key] for key in expected} == expected
    assert 0 <= sent.attributes["gen_ai.response.time_to_first_chunk"] < sent.end - sent.start
    assert "error.type" not in {**asked.attributes, **sent.attributes}


async def test_the_trace_of_a_client_goes_on(backend: ScriptedBackend) -> None:
    async with traced(backend, ratio=0.0) as (under_test, receiver):
        assert (await under_test.ask(None, b"traceparent: " + SAMPLED, b"tracestate: a=b")).status == 200
        asked, *_, sent = await received(under_test, receiver)
    assert (asked.trace_id, asked.parent_id) == PARENT
    assert traceparent(backend) == ["00", PARENT[0], sent.span_id, "01"]
    assert backend.ledger[-1].header(b"tracestate") == b"a=b"


@pytest.mark.parametrize("given", [b"", b"traceparent: " + UNSAMPLED])
async def test_a_request_that_is_not_sampled_is_not_sampled_by_engines_either(
    backend: ScriptedBackend, given: bytes
) -> None:
    async with traced(backend, ratio=0.0) as (under_test, receiver):
        assert (await under_test.ask(None, *([given] if given else []))).status == 200
    version, trace_id, span_id, flags = traceparent(backend)
    assert (version, flags) == ("00", "00")
    assert ((trace_id, span_id) == PARENT) == bool(given)
    assert receiver.requests == 0


@pytest.mark.parametrize("given", [b"nonsense", b"00-" + b"0" * 32 + b"-b7ad6b7169203331-01", b"ff" + SAMPLED[2:]])
async def test_a_broken_trace_context_begins_a_new_trace(backend: ScriptedBackend, given: bytes) -> None:
    async with traced(backend) as (under_test, receiver):
        await under_test.ask(None, b"traceparent: " + given, b"tracestate: a=b")
        asked, *_ = await received(under_test, receiver)
    assert asked.parent_id == ""
    assert traceparent(backend)[1] == asked.trace_id != PARENT[0]
    assert backend.ledger[-1].header(b"tracestate") is None


async def test_each_attempt_has_a_span_that_engines_join(backend: ScriptedBackend, other: ScriptedBackend) -> None:
    for each in (backend, other):
        each.plays_once(raw(whole(503, b'{"error":{"message":"busy"}}')))
    async with traced(backend, other) as (under_test, receiver):
        assert (await under_test.ask()).status == 503
        await received(under_test, receiver)
    first, second = receiver.named(f"chat {MODEL}")
    assert {traceparent(backend)[2], traceparent(other)[2]} == {first.span_id, second.span_id}
    assert "http.request.resend_count" not in first.attributes
    assert second.attributes["http.request.resend_count"] == 1
    assert (first.status, second.status) == (ERROR, ERROR)
    assert first.attributes["error.type"] == second.attributes["error.type"] == "backend_busy"
    assert len(receiver.named("placement")) == 2
    [asked] = receiver.named("POST /v1/chat/completions")
    assert (asked.status, asked.attributes["error.type"]) == (ERROR, "backend_error")
    assert asked.attributes["gateway.attempts"] == 2


async def test_the_time_in_the_queue_has_a_span(backend: ScriptedBackend) -> None:
    go = asyncio.Event()
    backend.plays(until(go), *json_answer())
    async with traced(backend, max_in_flight=1) as (under_test, receiver):
        tasks = [asyncio.create_task(under_test.ask()) for _ in range(2)]
        await holds(lambda: len(under_test.gateway.core.queue) == 1, "one waits")
        await asyncio.sleep(0.05)
        go.set()
        await asyncio.gather(*tasks)
        await received(under_test, receiver, 2)
    [queue] = receiver.named("queue")
    assert queue.end - queue.start > 0.04  # the loop counts whole milliseconds
    assert queue.parent_id in {span.span_id for span in receiver.named("placement")}


async def test_refusals_and_failures_are_traced_with_their_reason(backend: ScriptedBackend) -> None:
    backend.plays(chunk(b""), fin())
    async with traced(backend, sections={"admission": {"max_wait_seconds": 0.2}}) as (under_test, receiver):
        statuses = [(await under_test.ask(each)).status for each in (b"{", chat(model="absent"), chat())]
        await received(under_test, receiver, 3)
    assert statuses == [400, 404, 502]
    spans = {span.attributes["http.response.status_code"]: span for span in receiver.named("POST /v1/chat/completions")}
    rejected, absent, failed = (spans[status] for status in statuses)
    assert (rejected.status, absent.status, failed.status) == (0, 0, ERROR)
    assert rejected.attributes["gateway.outcome"] == absent.attributes["gateway.outcome"] == "rejected"
    assert failed.attributes["error.type"] == "backend_error"


async def test_a_batch_of_embeddings_is_one_span_of_each_request(backend: ScriptedBackend) -> None:
    backend.plays(Embeds())
    async with traced(backend) as (under_test, receiver):
        answers = await asyncio.gather(*(under_test.ask(body(f"text {n}"), target=PATH) for n in range(3)))
        assert {answer.status for answer in answers} == {200}
        await received(under_test, receiver, 3)
    sent = receiver.named(f"embeddings {MODEL}")
    assert len({span.trace_id for span in sent}) == len(sent) == 3
    assert {span.parent_id for span in sent} == {span.span_id for span in receiver.named("POST /v1/embeddings")}


async def test_spans_have_neither_prompts_nor_keys(backend: ScriptedBackend) -> None:
    keys = {"auth": {"keys": [{"name": "team-a", "key": CLIENT_KEY}]}}
    key = b"authorization: Bearer " + CLIENT_KEY.encode()
    async with traced(backend, sections=keys) as (under_test, receiver):
        assert (await under_test.ask(chat(PROMPT_CANARY), key)).status == 200
        assert (await under_test.ask(chat(PROMPT_CANARY, model="absent"), key)).status == 404
        await received(under_test, receiver, 2)
    assert receiver.spans[0].attributes["gateway.client"] == "team-a"
    for secret in (CLIENT_KEY, BACKEND_KEY, PROMPT_CANARY):
        assert secret not in repr(receiver.spans)


async def test_traces_that_cannot_be_kept_are_counted(backend: ScriptedBackend) -> None:
    async with traced(backend) as (under_test, _):
        tracing, record = under_test.gateway.features["tracing"].tracing, Record("id", "chat", 0.0)
        tracer = tracing.tracer
        assert tracer is not None
        _, trace = tracer.begin({}, b"POST", b"/v1/chat/completions")
        assert trace is not None
        record.traced(trace)
        tracing.finished([record] * (MAX_HELD_TRACES + 3))
        assert tracing.totals["dropped"] == 3


async def test_few_traces_wait_for_the_interval_and_many_do_not(backend: ScriptedBackend) -> None:
    rarely = {"tracing": {"export_interval_seconds": 3600}}
    async with traced(backend, sections=rarely) as (under_test, receiver):
        for _ in range(EXPORTED_AT_ONCE - 1):
            assert (await under_test.ask()).status == 200
        under_test.gateway.core.finished.settle()
        assert receiver.requests == 0
        await under_test.ask()
        await received(under_test, receiver, EXPORTED_AT_ONCE)
        assert receiver.requests == 1


async def test_a_client_that_leaves_ends_its_spans(backend: ScriptedBackend) -> None:
    backend.plays(hang())
    async with traced(backend) as (under_test, receiver):
        async with await under_test.client() as client:
            await client.send(request(STREAM))
            await holds(lambda: backend.running == 1, "it runs")
        spans = await received(under_test, receiver)
    assert [span.attributes.get("error.type") for span in spans] == ["client_gone", None, "client_gone"]


async def test_a_receiver_that_refuses_costs_traces_and_no_request(backend: ScriptedBackend) -> None:
    async with traced(backend) as (under_test, receiver):
        receiver.refuses = True
        assert (await under_test.ask()).status == 200
        under_test.gateway.core.finished.settle()
        await holds(
            lambda: under_test.gateway.features["tracing"].tracing.totals["dropped"] == 1, "the trace is dropped"
        )
        [dropped] = [each for each in under_test.events if each["event"] == "traces_dropped"]
        assert "400" in dropped["reason"]
        receiver.refuses = False
        assert (await under_test.ask()).status == 200
        await received(under_test, receiver)
        await holds(
            lambda: under_test.gateway.features["tracing"].tracing.totals == {"exported": 1, "dropped": 1},
            "both are counted",
        )


async def test_a_reload_begins_and_ends_tracing(backend: ScriptedBackend) -> None:
    async with http_receiver() as receiver, running(backend) as under_test:
        gateway = under_test.gateway
        await under_test.ask()
        assert backend.ledger[-1].header(b"traceparent") is None
        assert "tracing" not in gateway.features
        settings = settings_of(receiver)
        config = gateway.core.config
        await gateway.reload(config.model_copy(update={"tracing": config.tracing.model_validate(settings)}))
        await under_test.ask()
        await received(under_test, receiver)
        await gateway.reload(config.model_copy(update={"tracing": config.tracing.model_validate({})}))
        await under_test.ask(None, b"traceparent: " + SAMPLED)
        assert backend.ledger[-1].header(b"traceparent") == SAMPLED
    assert len([span for span in receiver.spans if span.kind == SERVER]) == 1
