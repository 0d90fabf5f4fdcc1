"""Which requests are traced, and what their backends see of it."""

from itertools import islice

import pytest
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from gateway.observe.trace import Price, RequestTrace, Tracer, random_ids

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PATH = b"/v1/chat/completions"


def tracer(ratio: float, *ids: str) -> Tracer:
    return Tracer(ratio, iter(ids).__next__ if ids else random_ids().__next__, lambda: 7.0)


def begun(ratio: float, headers: dict[bytes, bytes], *ids: str) -> RequestTrace | None:
    return tracer(ratio, *ids).begin(headers, b"POST", PATH)


def test_ids_are_random_and_never_repeat() -> None:
    ids = list(islice(random_ids(), 1000))
    assert len(set(ids)) == 1000
    assert {len(each) for each in ids} == {48}
    assert all(set(each) <= set("0123456789abcdef") for each in ids)


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, 1.0])
def test_the_same_traces_are_sampled_as_by_other_services(ratio: float) -> None:
    """OpenTelemetry's sampler decides by the trace's id, so services with one ratio agree."""
    theirs, ids = TraceIdRatioBased(ratio), list(islice(random_ids(), 2000))
    for each in ids:
        ours = begun(ratio, {}, each, "f" * 48) is not None
        assert ours == (theirs.should_sample(None, int(each[:32], 16), "").decision is Decision.RECORD_AND_SAMPLE)


def test_about_one_request_in_a_hundred_is_sampled() -> None:
    one = tracer(0.01)
    sampled = sum(one.begin({}, b"POST", PATH) is not None for _ in range(20_000))
    assert 120 < sampled < 290


def test_backends_see_the_trace_and_the_span_of_the_attempt() -> None:
    headers: dict[bytes, bytes] = {}
    trace = begun(1.0, headers, "a" * 32 + "b" * 16, "c" * 48)
    assert trace is not None
    assert (trace.trace_id, trace.span_id, trace.parent_id) == ("a" * 32, "c" * 16, "")
    assert headers == {b"traceparent": b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"}
    trace.asks([])
    assert trace.attempts[0].span_id == "b" * 16


def test_backends_see_that_a_request_is_not_sampled() -> None:
    headers: dict[bytes, bytes] = {}
    assert begun(0.0, headers, "a" * 32 + "b" * 16) is None
    assert headers == {b"traceparent": b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-00"}


def test_a_client_decides_for_its_own_traces() -> None:
    headers = {b"traceparent": PARENT, b"tracestate": b"a=b"}
    trace = begun(0.0, headers, "a" * 32 + "b" * 16, "c" * 48)
    assert trace is not None
    assert (trace.trace_id, trace.parent_id) == (PARENT[3:35].decode(), PARENT[36:52].decode())
    assert headers == {b"traceparent": PARENT[:36] + b"b" * 16 + b"-01", b"tracestate": b"a=b"}
    unsampled = {b"traceparent": PARENT[:-1] + b"0"}
    assert begun(1.0, unsampled) is None
    assert unsampled == {b"traceparent": PARENT[:-1] + b"0"}


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
    trace = begun(1.0, headers)
    assert trace is not None
    assert trace.parent_id == ""
    assert headers == {b"traceparent": trace.header()}


def test_a_later_version_of_the_context_is_understood() -> None:
    trace = begun(0.0, {b"traceparent": b"01" + PARENT[2:] + b"-more"})
    assert trace is not None
    assert trace.parent_id == PARENT[36:52].decode()


def test_a_retry_has_a_span_of_its_own() -> None:
    headers: dict[bytes, bytes] = {}
    trace = begun(1.0, headers, *("0123456789"[n] * 48 for n in range(4)))
    assert trace is not None
    line = b"x-request-id: a\r\ntraceparent: " + headers[b"traceparent"] + b"\r\n"
    trace.asks([Price("a", 1.0, 5, True)])
    trace.placed("a", 0.5, 5)
    trace.failed("backend_busy")
    trace.attempted(None)
    assert trace.retried(line) == line.replace(b"0" * 16 + b"-01", b"2" * 16 + b"-01")
    trace.asks([])
    trace.placed("b", 0.0, 0)
    first, second = trace.attempts
    assert (first.span_id, first.backend, first.error, first.ended_seconds) == ("0" * 16, "a", "backend_busy", 7.0)
    assert (second.span_id, second.backend, second.ended_seconds) == ("2" * 16, "b", None)
