"""Which requests are traced, and what their backends see of it."""

import re
import secrets

import pytest
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from gateway.features.tracing.trace import RequestTrace, Tracer

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PATH = b"/v1/chat/completions"
LINE = re.compile(rb"traceparent: 00-([0-9a-f]{32})-([0-9a-f]{16})-0([01])\r\n")


def tracer(ratio: float) -> Tracer:
    return Tracer(ratio, secrets.token_bytes, lambda: 7.0)


def begun(ratio: float, headers: dict[bytes, bytes]) -> tuple[bytes, RequestTrace | None]:
    return tracer(ratio).begin(headers, b"POST", PATH)


def sampled(ratio: float, headers: dict[bytes, bytes]) -> tuple[bytes, RequestTrace]:
    line, trace = begun(ratio, headers)
    assert trace is not None
    return line, trace


def test_ids_are_random_and_never_repeat() -> None:
    one = tracer(0.0)
    found = [LINE.fullmatch(one.begin({}, b"POST", PATH)[0]) for _ in range(1000)]
    ids = [(each[1], each[2]) for each in found if each is not None]
    assert len(ids) == len({trace_id for trace_id, _ in ids}) == len({span_id for _, span_id in ids}) == 1000


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, 1.0])
def test_the_same_traces_are_sampled_as_by_other_services(ratio: float) -> None:
    """OpenTelemetry's sampler decides by the trace's id, so services with one ratio agree."""
    theirs, ours = TraceIdRatioBased(ratio), tracer(ratio)
    for _ in range(2000):
        line, trace = ours.begin({}, b"POST", PATH)
        found = LINE.fullmatch(line)
        assert found is not None
        decision = theirs.should_sample(None, int(found[1], 16), "").decision
        assert (trace is not None) == (found[3] == b"1") == (decision is Decision.RECORD_AND_SAMPLE)


def test_about_one_request_in_a_hundred_is_sampled() -> None:
    one = tracer(0.01)
    assert 120 < sum(one.begin({}, b"POST", PATH)[1] is not None for _ in range(20_000)) < 290


def test_backends_see_the_trace_and_the_span_of_the_attempt() -> None:
    line, trace = sampled(1.0, {})
    trace.asks([])
    [attempt] = trace.attempts
    assert line == b"traceparent: 00-%b-%b-01\r\n" % (trace.trace_id, attempt.span_id)
    assert trace.span_id != attempt.span_id
    assert trace.parent_id == b""


def test_a_client_decides_for_its_own_traces() -> None:
    headers = {b"traceparent": PARENT, b"tracestate": b"a=b"}
    line, trace = sampled(0.0, headers)
    assert (trace.trace_id, trace.parent_id) == (PARENT[3:35], PARENT[36:52])
    trace.asks([])
    assert line == b"traceparent: " + PARENT[:36] + trace.attempts[0].span_id + b"-01\r\n"
    assert headers == {b"tracestate": b"a=b"}
    unsampled = {b"traceparent": PARENT[:-1] + b"0", b"tracestate": b"a=b"}
    assert begun(1.0, unsampled) == (b"", None)
    assert unsampled == {b"traceparent": PARENT[:-1] + b"0", b"tracestate": b"a=b"}


@pytest.mark.parametrize(
    "given",
    [
        b"",
        PARENT[:-1],
        PARENT.upper(),
        PARENT + b"-more",
        b"ff" + PARENT[2:],
        b"00-" + b"0" * 32 + PARENT[35:],
        PARENT[:36] + b"0" * 16 + b"-01",
    ],
)
def test_a_context_that_is_none_is_replaced(given: bytes) -> None:
    headers = {b"traceparent": given, b"tracestate": b"a=b"}
    line, trace = sampled(1.0, headers)
    assert trace.parent_id == b""
    assert line == b"traceparent: " + trace.header() + b"\r\n"
    assert headers == {}


def test_a_later_version_of_the_context_is_understood() -> None:
    _, trace = sampled(0.0, {b"traceparent": b"01" + PARENT[2:] + b"-more"})
    assert trace.parent_id == PARENT[36:52]


def test_a_retry_has_a_span_of_its_own() -> None:
    made, trace = sampled(1.0, {})
    lines = b"x-request-id: a\r\n" + made
    trace.asks([])
    trace.placed("a", 0.5, 5)
    trace.failed("backend_busy")
    trace.attempted(None)
    retried = trace.retried(lines)
    trace.asks([])
    trace.placed("b", 0.0, 0)
    first, second = trace.attempts
    assert first.span_id != second.span_id
    assert retried == lines.replace(first.span_id, second.span_id)
    assert (first.backend, first.error, first.ended_seconds) == ("a", "backend_busy", 7.0)
    assert (second.backend, second.ended_seconds) == ("b", None)
