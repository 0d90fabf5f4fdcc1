"""Comments to a client that waits for a stream, and what can follow them."""

import orjson
import pytest

from gateway.core.errors import QueueFull
from gateway.core.front.reply import JSON
from tests.unit.front.wires import FakeWire, reply_on

WAITING = b": waiting\n\n"
EVENTS = b"text/event-stream; charset=utf-8"


def test_the_first_comment_brings_the_head_of_a_stream() -> None:
    wire = FakeWire()
    reply = reply_on(wire)
    reply.comment()
    reply.comment()
    assert (wire.status, wire.header(b"content-type"), wire.body) == (200, EVENTS, WAITING * 2)
    assert wire.header(b"x-accel-buffering") == b"no"
    assert not reply.begun


def test_a_stream_goes_on_where_the_comments_end_without_another_head() -> None:
    wire = FakeWire()
    reply = reply_on(wire)
    reply.comment()
    reply.begin(200, b"text/event-stream", b"x-late: 1\r\n")
    assert reply.begun
    reply.write(b"data: 1\n\n")
    reply.comment()
    reply.comment(blank_line=False)
    reply.write(b"data: 2\n\n")
    reply.end()
    reply.comment()
    assert wire.body == WAITING + b"data: 1\n\n" + WAITING + b": waiting\ndata: 2\n\n"
    assert wire.sent.endswith(b"0\r\n\r\n")
    assert b"x-late" not in wire.sent
    assert reply.complete
    assert reply.keep_alive


@pytest.mark.parametrize("anthropic", [False, True])
def test_an_error_after_comments_is_the_last_event_of_a_stream_that_ends_uncleanly(anthropic: bool) -> None:
    wire = FakeWire()
    reply = reply_on(wire, anthropic=anthropic)
    reply.comment()
    reply.fail(QueueFull("why"))
    event = wire.body.removeprefix(WAITING)
    assert event.startswith(b"event: error\ndata: {" if anthropic else b"data: {")
    assert orjson.loads(event.partition(b"data: ")[2])["error"]["message"] == "why"
    assert not wire.sent.endswith(b"0\r\n\r\n")
    assert (reply.status, reply.keep_alive, reply.complete) == (200, False, False)


def test_a_backends_error_answer_after_comments_becomes_one_event_on_one_line() -> None:
    wire = FakeWire()
    reply = reply_on(wire)
    reply.comment()
    reply.send(400, JSON, b"x-extra: 1\r\n", b'{\n "error": {"message": "too long", "code": 400}\n}')
    assert wire.body == WAITING + b'data: {"error":{"message":"too long","code":400}}\n\n'
    assert (reply.status, reply.begun, reply.keep_alive) == (200, True, False)


@pytest.mark.parametrize("body", [b"Bad gateway", b"[]", b'{"detail":"Not Found"}', b'{"choices":[]}'])
@pytest.mark.parametrize("anthropic", [False, True])
def test_an_answer_that_is_neither_a_stream_nor_an_error_becomes_an_error(body: bytes, anthropic: bool) -> None:
    wire = FakeWire()
    reply = reply_on(wire, anthropic=anthropic)
    reply.comment()
    reply.send(200, JSON, b"", body)
    error = orjson.loads(wire.body.partition(b"data: ")[2])["error"]
    assert error["message"] == "The backend returned 200 without an event stream."
    assert error["type"] == ("api_error" if anthropic else "upstream_error")


def test_of_a_long_answer_that_is_no_stream_nothing_is_passed_on_after_comments() -> None:
    wire = FakeWire()
    reply = reply_on(wire)
    reply.comment()
    reply.begin(200, JSON, b"")
    sent = wire.sent
    reply.write(b"{}")
    reply.end()
    assert wire.sent == sent
    assert b"without an event stream" in sent
    assert not reply.keep_alive


def test_slow_clients_and_those_with_an_answer_get_no_comments() -> None:
    wire = FakeWire(blocked=True)
    reply_on(wire).comment()
    assert wire.sent == b""
    wire = FakeWire()
    reply = reply_on(wire)
    reply.send(200, JSON, b"", b"{}")
    sent = wire.sent
    reply.comment()
    assert wire.sent == sent


def test_an_old_client_gets_comments_unframed_and_its_connection_closed() -> None:
    wire = FakeWire()
    reply = reply_on(wire, http10=True)
    reply.comment()
    assert wire.sent.endswith(b"\r\n\r\n" + WAITING)
    assert not reply.keep_alive
