"""The spans of a request, as a receiver reads them."""

from itertools import count

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from gateway.core.observe.record import Record
from gateway.core.request import Demand
from gateway.core.routing.engine import Engine
from gateway.core.routing.policy import EngineVerdict
from gateway.features.tracing.spans import Spans
from gateway.features.tracing.trace import Finished, RequestTrace
from tests.otlp import values

SPAN_IDS = count(1)
UNIX_SECONDS = 1_700_000_000.0


def spans() -> Spans:
    return Spans("gateway-a", "1.0", lambda size: next(SPAN_IDS).to_bytes(size, "big"))


def ended(record: Record, trace: RequestTrace) -> Finished:
    record.traced(trace)
    return Finished(record, trace, {"a:8000": "http://a:8000"}, UNIX_SECONDS)


def verdict(engine: str, cost: float, hit_tokens: int, *, is_open: bool) -> EngineVerdict:
    return EngineVerdict(Engine(0, engine), cost, hit_tokens, is_open, None)


def trace_of(record: Record, parent_id: bytes = b"") -> RequestTrace:
    clock = count(record.arrived_seconds + 1)
    ids = b"a" * 32, b"b" * 16, parent_id
    return RequestTrace(ids, "POST", "/v1/chat/completions", clock.__next__, lambda: b"%016x" % next(SPAN_IDS))


def answered(outcome: str = "completed", status: int = 200, error: str = "", parent_id: bytes = b"") -> Finished:
    """A streamed request that asked at 1 s, was placed at 2 s after 0.5 s in the queue, and ended at 4 s."""
    record = Record("id-1", "chat", 0.0, 100, "team-a")
    trace = trace_of(record, parent_id)
    record.traced(trace)
    record.parsed(Demand("m", streams=True), "m")
    trace.asks([verdict("a:8000", 12.25, 160, is_open=True), verdict("b:8000", 20.0, 0, is_open=False)])
    record.placed("m", "a:8000", 0.5, 160)
    record.attempted(2.5, 3)
    record.counted(250)
    record.ended(outcome, status, 4.0, error)
    return ended(record, trace)


def read(*traces: Finished) -> list[Span]:
    export = ExportTraceServiceRequest.FromString(spans().export(list(traces), lambda: None, 16))
    [resource] = export.resource_spans
    [scope] = resource.scope_spans
    service = values(resource.resource.attributes)
    assert (service["service.name"], service["service.version"]) == ("gateway-a", "1.0")
    assert (scope.scope.name, scope.scope.version) == ("vllm-batching-gateway", "1.0")
    return list(scope.spans)


def seconds(span: Span) -> tuple[float, float]:
    return span.start_time_unix_nano / 1e9 - UNIX_SECONDS, span.end_time_unix_nano / 1e9 - UNIX_SECONDS


def test_a_request_that_waited_has_four_spans() -> None:
    request, placement, queue, sent = read(answered())
    assert [span.kind for span in (request, placement, queue, sent)] == [
        Span.SPAN_KIND_SERVER, Span.SPAN_KIND_INTERNAL, Span.SPAN_KIND_INTERNAL, Span.SPAN_KIND_CLIENT
    ]  # fmt: skip
    assert [seconds(span) for span in (request, placement, queue, sent)] == [(0, 4), (1, 2), (1.5, 2), (2, 3)]
    assert {span.trace_id.hex() for span in (request, placement, queue, sent)} == {"a" * 32}
    assert request.parent_span_id == b""
    assert [span.parent_span_id for span in (placement, queue, sent)] == [
        request.span_id, placement.span_id, request.span_id
    ]  # fmt: skip
    assert sent.span_id.hex() == "b" * 16
    assert {span.status.code for span in (request, placement, queue, sent)} == {Status.STATUS_CODE_UNSET}
    assert values(request.attributes) == {
        "http.request.method": "POST", "url.path": "/v1/chat/completions", "http.response.status_code": 200,
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gateway.request_id": "id-1",
        "gateway.outcome": "completed", "gateway.client": "team-a",
    }  # fmt: skip
    assert values(placement.attributes) == {
        "gateway.backend": "a:8000", "gateway.predicted_hit_tokens": 160,
        "gateway.engines": ["a:8000;cost=12.25;hit=160;open=1", "b:8000;cost=20;hit=0;open=0"],
    }  # fmt: skip
    assert values(queue.attributes) == {"gateway.class": "interactive", "gateway.model": "m"}
    assert values(sent.attributes) == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "vllm", "gen_ai.request.model": "m",
        "gen_ai.request.stream": True, "gen_ai.usage.input_tokens": 250,
        "gen_ai.response.time_to_first_chunk": 0.5, "server.address": "a", "server.port": 8000,
        "gateway.backend": "a:8000",
    }  # fmt: skip
    assert [(event.name, event.time_unix_nano) for event in sent.events] == [("first_token", 1_700_000_002_500_000_000)]


def test_spans_say_whether_their_parent_is_the_clients() -> None:
    request, *rest = read(answered(parent_id=b"c" * 16))
    assert request.parent_span_id.hex() == "c" * 16
    assert request.flags == 0x300
    assert {span.flags for span in rest} == {0x100}
    assert read(answered())[0].flags == 0x100


def test_a_failure_has_its_reason_whatever_characters_that_has() -> None:
    request, *_, sent = read(answered("backend_error", 502, "It said \ud800."))
    for span in (request, sent):
        assert (span.status.code, span.status.message) == (Status.STATUS_CODE_ERROR, "It said ?.")
        assert values(span.attributes)["error.type"] == "backend_error"


def test_a_refusal_is_no_error_of_the_request() -> None:
    record = Record("id-1", "chat", 0.0)
    record.ended("rejected", 400, 1.0, "No messages.")
    [request] = read(ended(record, trace_of(record)))
    assert request.status.code == Status.STATUS_CODE_UNSET
    assert values(request.attributes)["gateway.outcome"] == "rejected"


def test_one_that_got_no_backend_has_the_time_that_it_waited() -> None:
    record = Record("id-1", "chat", 0.0)
    trace = trace_of(record)
    trace.asks([])
    record.ended("wait_expired", 503, 5.0)
    _, placement, queue = read(ended(record, trace))
    assert (seconds(placement), seconds(queue)) == ((1, 5), (1, 5))
    assert placement.status.code == Status.STATUS_CODE_ERROR


def test_spans_of_many_requests_follow_one_another() -> None:
    rests: list[int] = []
    traces = [answered() for _ in range(40)]
    export = spans().export(traces, lambda: rests.append(1), 16)
    [resource] = ExportTraceServiceRequest.FromString(export).resource_spans
    assert len(resource.scope_spans[0].spans) == 4 * 40
    assert len(rests) == 2
