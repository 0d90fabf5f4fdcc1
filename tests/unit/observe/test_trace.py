"""Which requests are traced, and what their backends see of it."""

import pytest
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from gateway.observe.trace import Price, RandomIds, RequestTrace, Tracer

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PATH = b"/v1/chat/completions"


def tracer(ratio: float, *ids: bytes) -> Tracer:
    return Tracer(ratio, iter(ids).__next__ if ids else RandomIds().take, lambda: 7.0)


def begun(ratio: float, headers: dict[bytes, bytes], *ids: bytes) -> tuple[bytes, RequestTrace | None]:
    return tracer(ratio, *ids).begin(headers, b"POST", PATH)


def sampled(ratio: float, headers: dict[bytes, bytes], *ids: bytes) -> tuple[bytes, RequestTrace]:
    line, trace = begun(ratio, headers, *ids)
    assert trace is not None
    return line, trace


def test_ids_are_random_and_never_repeat() -> None:
    source = RandomIds()
    ids = [source.take() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert {len(each) for each in ids} == {48}
    assert all(set(each) <= set(b"0123456789abcdef") for each in ids)


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, 1.0])
def test_the_same_traces_are_sampled_as_by_other_services(ratio: float) -> None:
    """OpenTelemetry's sampler decides by the trace's id, so services with one ratio agree."""
    theirs, source = TraceIdRatioBased(ratio), RandomIds()
    for each in [source.take() for _ in range(2000)]:
        ours = begun(ratio, {}, each, b"f" * 48)[1] is not None
        assert ours == (theirs.should_sample(None, int(each[:32], 16), "").decision is Decision.RECORD_AND_SAMPLE)


def test_about_one_request_in_a_hundred_is_sampled() -> None:
    one = tracer(0.01)
    assert 120 < sum(one.begin({}, b"POST", PATH)[1] is not None for _ in range(20_000)) < 290


def test_backends_see_the_trace_and_the_span_of_the_attempt() -> None:
    line, trace = sampled(1.0, {}, b"a" * 32 + b"b" * 16, b"c" * 48)
    assert (trace.trace_id, trace.span_id, trace.parent_id) == ("a" * 32, "c" * 16, "")
    assert line == b"traceparent: 00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01\r\n"
    trace.asks([])
    assert trace.attempts[0].span_id == "b" * 16


def test_backends_see_that_a_request_is_not_sampled() -> None:
    line, trace = begun(0.0, {}, b"a" * 32 + b"b" * 16)
    assert trace is None
    assert line == b"traceparent: 00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-00\r\n"


def test_a_client_decides_for_its_own_traces() -> None:
    headers = {b"traceparent": PARENT, b"tracestate": b"a=b"}
    line, trace = sampled(0.0, headers, b"a" * 32 + b"b" * 16, b"c" * 48)
    assert (trace.trace_id, trace.parent_id) == (PARENT[3:35].decode(), PARENT[36:52].decode())
    assert line == b"traceparent: " + PARENT[:36] + b"b" * 16 + b"-01\r\n"
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
    assert trace.parent_id == ""
    assert line == b"traceparent: " + trace.header() + b"\r\n"
    assert headers == {}


def test_a_later_version_of_the_context_is_understood() -> None:
    _, trace = sampled(0.0, {b"traceparent": b"01" + PARENT[2:] + b"-more"})
    assert trace.parent_id == PARENT[36:52].decode()


def test_a_retry_has_a_span_of_its_own() -> None:
    made, trace = sampled(1.0, {}, *(b"%d" % n * 48 for n in range(4)))
    line = b"x-request-id: a\r\n" + made
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
