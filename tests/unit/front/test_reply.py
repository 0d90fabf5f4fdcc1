import inspect
from collections.abc import Iterator

import orjson
import pytest

from gateway.core import errors
from gateway.core.errors import (
    BackendError,
    GatewayError,
    InvalidRequest,
    MethodNotAllowed,
    QueueFull,
    RateLimited,
    StreamInterrupted,
    Unauthorized,
)
from gateway.core.front.reply import JSON, error_headers, render
from tests.unit.front.wires import FakeWire, reply_on


def leaves() -> Iterator[GatewayError]:
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, GatewayError) and kind not in (GatewayError, BackendError):
            yield kind("why", allow="POST") if kind is MethodNotAllowed else kind("why")


def test_a_whole_response_is_one_write() -> None:
    wire = FakeWire()
    reply = reply_on(wire)
    reply.set_backend_headers(b"x-gateway-backend: a\r\n")
    reply.send(200, JSON, b"x-more: 1\r\n", b"{}")
    assert wire.sent == (
        b"HTTP/1.1 200 OK\r\nx-request-id: id-1\r\nx-gateway-backend: a\r\ncontent-type: application/json\r\n"
        b"content-length: 2\r\nx-more: 1\r\n\r\n{}"
    )
    assert (reply.begun, reply.complete, reply.status) == (True, True, 200)


def test_a_stream_is_chunked_and_ends_with_the_last_chunk() -> None:
    wire = FakeWire()
    reply = reply_on(wire)
    reply.begin(200, b"text/event-stream; charset=utf-8", b"")
    assert (reply.begun, reply.complete) == (True, False)
    reply.write(b"data: 1\n\n")
    reply.write(b"data: 2\n\n")
    reply.end()
    assert wire.header(b"transfer-encoding") == b"chunked"
    assert wire.header(b"x-accel-buffering") == b"no"
    assert wire.sent.endswith(b"\r\n\r\n9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\n0\r\n\r\n")
    assert reply.complete


def test_http_1_0_gets_a_stream_that_ends_with_the_connection() -> None:
    wire = FakeWire()
    reply = reply_on(wire, http10=True)
    reply.begin(200, b"text/event-stream", b"")
    reply.write(b"data: 1\n\n")
    reply.end()
    assert wire.header(b"transfer-encoding") is None
    assert wire.header(b"connection") == b"close"
    assert wire.sent.endswith(b"\r\n\r\ndata: 1\n\n")
    assert not reply.keep_alive


@pytest.mark.parametrize(
    ("keep_alive", "http10", "header"),
    [(True, False, None), (False, False, b"close"), (True, True, b"keep-alive"), (False, True, b"close")],
)
def test_the_connection_header_says_what_its_version_does_not_imply(
    keep_alive: bool, http10: bool, header: bytes | None
) -> None:
    wire = FakeWire()
    reply_on(wire, keep_alive=keep_alive, http10=http10).send(200, JSON, b"", b"")
    assert wire.header(b"connection") == header


@pytest.mark.parametrize("error", list(leaves()), ids=lambda error: type(error).__name__)
def test_every_error_has_openais_shape(error: GatewayError) -> None:
    wire = FakeWire()
    reply_on(wire).fail(error)
    assert wire.status == error.status
    assert orjson.loads(wire.body) == {
        "error": {"message": "why", "type": error.type, "param": None, "code": error.code}
    }


@pytest.mark.parametrize("error", list(leaves()), ids=lambda error: type(error).__name__)
def test_every_error_has_anthropics_shape_for_its_endpoint(error: GatewayError) -> None:
    document = orjson.loads(render(error, anthropic=True))
    assert document["type"] == "error"
    assert document["error"]["message"] == "why"
    expected = {
        400: "invalid_request_error",
        401: "authentication_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        502: "api_error",
        503: "overloaded_error",
    }
    if error.status in expected:
        assert document["error"]["type"] == expected[error.status]


def test_the_field_that_is_wrong_is_named() -> None:
    assert orjson.loads(render(InvalidRequest("why", param="n")))["error"]["param"] == "n"


@pytest.mark.parametrize(
    ("seconds", "headers"),
    [
        (1.0, b"retry-after: 1\r\nretry-after-ms: 1000\r\n"),
        (1.2, b"retry-after: 2\r\nretry-after-ms: 1200\r\n"),
        (0.1, b"retry-after: 1\r\nretry-after-ms: 100\r\n"),
        (0.0, b"retry-after: 1\r\nretry-after-ms: 1\r\n"),
        (60.0, b"retry-after: 60\r\nretry-after-ms: 60000\r\n"),
    ],
)
def test_when_to_come_back_is_rounded_up(seconds: float, headers: bytes) -> None:
    assert error_headers(QueueFull("why", retry_after_seconds=seconds)) == headers


def test_other_headers_of_errors() -> None:
    never = b"x-should-retry: false\r\n"
    assert error_headers(InvalidRequest("why")) == never
    assert error_headers(Unauthorized("why")) == never + b"www-authenticate: Bearer\r\n"
    assert error_headers(MethodNotAllowed("why", allow="GET")) == never + b"allow: GET\r\n"


def test_an_error_that_is_not_retryable_says_so_in_a_header() -> None:
    error = RateLimited("too large")
    error.not_retryable = True
    assert error_headers(error) == b"x-should-retry: false\r\n"
    assert b"x-should-retry" not in error_headers(QueueFull("why", retry_after_seconds=3.0))


def test_what_every_answer_has_errors_have_too() -> None:
    for end in (lambda reply: reply.fail(QueueFull("why")), lambda reply: reply.send(200, JSON, b"", b"{}")):
        wire = FakeWire()
        reply = reply_on(wire)
        reply.set_headers(b"x-standing: 1\r\n")
        reply.set_backend_headers(b"x-extra: 2\r\n")
        end(reply)
        assert (wire.header(b"x-standing"), wire.header(b"x-extra")) == (b"1", b"2")


def test_a_stream_that_breaks_ends_with_an_error_event_and_without_a_last_chunk() -> None:
    wire = FakeWire()
    reply = reply_on(wire)
    reply.begin(200, b"text/event-stream", b"")
    reply.write(b"data: 1\n\n")
    reply.fail(StreamInterrupted("why"))
    assert wire.body.startswith(b'data: 1\n\ndata: {"error":{')
    assert wire.body.endswith(b"\n\n")
    assert not wire.sent.endswith(b"0\r\n\r\n")
    assert not reply.keep_alive
    assert not reply.complete


def test_a_broken_stream_of_messages_ends_with_a_named_event() -> None:
    wire = FakeWire()
    reply = reply_on(wire, anthropic=True)
    reply.begin(200, b"text/event-stream", b"")
    reply.fail(StreamInterrupted("why"))
    assert wire.body.startswith(b'event: error\ndata: {"type":"error"')


def test_a_plain_answer_that_breaks_gets_no_error_event_in_its_middle() -> None:
    wire = FakeWire()
    reply = reply_on(wire)
    reply.begin(200, JSON, b"")
    reply.write(b'{"a":')
    before = wire.sent
    reply.fail(StreamInterrupted("why"))
    assert wire.sent == before
    assert not reply.keep_alive


def test_after_a_complete_answer_nothing_is_added() -> None:
    wire = FakeWire()
    reply = reply_on(wire)
    reply.send(200, JSON, b"", b"{}")
    before = wire.sent
    reply.fail(InvalidRequest("why"))
    assert wire.sent == before


def test_a_status_without_a_name_is_passed_on() -> None:
    wire = FakeWire()
    reply_on(wire).send(529, JSON, b"", b"")
    assert wire.sent.startswith(b"HTTP/1.1 529 Unknown\r\n")


def test_it_is_blocked_when_the_wire_is() -> None:
    wire = FakeWire()
    reply = reply_on(wire)
    assert not reply.blocked
    wire.blocked = True
    assert reply.blocked
