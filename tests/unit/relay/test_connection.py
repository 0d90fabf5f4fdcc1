"""Bytes of answers in, what they say out; and when a connection may be used again."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.relay.connection import BackendConnection
from tests.unit.relay.peers import FakeReceiver, FakeTransport, connected
from tests.unit.scheduling.virtual_time import run, turns

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"


def sending() -> tuple[BackendConnection, FakeTransport, FakeReceiver]:
    connection, transport = connected()
    receiver = FakeReceiver(connection)
    connection.send(b"GET / HTTP/1.1\r\n\r\n", receiver)
    return connection, transport, receiver


def test_an_answer_that_arrives_at_once_is_passed_on_in_order() -> None:
    connection, transport, receiver = sending()
    assert transport.sent == b"GET / HTTP/1.1\r\n\r\n"
    connection.data_received(PLAIN)
    assert receiver.said == ["head 200", "body", "end", "received"]
    assert receiver.headers == [(b"Content-Type", b"application/json"), (b"Content-Length", b"5")]
    assert connection.rest(0.0)


@given(st.sampled_from([PLAIN, CHUNKED]), st.lists(st.integers(1, 200), max_size=8))
def test_pieces_of_any_size_give_the_same_body_and_every_piece_is_reported(answer: bytes, sizes: list[int]) -> None:
    connection, _, receiver = sending()
    rest, pieces = answer, 0
    for size in [*sizes, len(answer)]:
        if rest:
            connection.data_received(rest[:size])
            rest, pieces = rest[size:], pieces + 1
    assert receiver.data == (b"hello" if answer is PLAIN else b"hello world")
    assert receiver.said.count("received") == pieces
    assert receiver.said[-2:] == ["end", "received"]
    assert connection.rest(0.0)


def test_one_connection_carries_one_answer_after_another() -> None:
    connection, _, _ = sending()
    connection.data_received(PLAIN)
    second = FakeReceiver(connection)
    connection.send(b"x", second)
    assert not connection.ended
    connection.data_received(CHUNKED)
    assert second.data == b"hello world"
    assert connection.exchanges == 2


def test_heads_that_only_inform_are_passed_over() -> None:
    connection, _, receiver = sending()
    connection.data_received(b"HTTP/1.1 100 Continue\r\n\r\n")
    connection.data_received(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + PLAIN)
    assert receiver.said == ["received", "head 200", "body", "end", "received"]
    assert (b"link", b"x") not in receiver.headers


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_a_connection_that_the_backend_will_close_is_not_used_again(head: bytes) -> None:
    connection, _, receiver = sending()
    connection.data_received(head)
    assert "end" in receiver.said
    assert not connection.rest(0.0)


@pytest.mark.parametrize("extra", [b"H", b"HTTP/1.1 200 OK\r\n", PLAIN, b"garbage", b"\x00"])
def test_bytes_after_an_answer_make_the_connection_unusable_but_not_the_answer(extra: bytes) -> None:
    connection, transport, receiver = sending()
    connection.data_received(PLAIN + extra)
    assert receiver.said == ["head 200", "body", "end", "received"]
    assert receiver.data == b"hello"
    assert transport.aborted
    assert not connection.rest(0.0)


def test_unexpected_bytes_make_an_idle_connection_unusable() -> None:
    connection, transport, _ = sending()
    connection.data_received(PLAIN)
    connection.data_received(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    assert transport.aborted
    assert not connection.rest(0.0)


@pytest.mark.parametrize(
    "answer",
    [b"garbage\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
     b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
     b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
     b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 101 + b"\r\n"],
)  # fmt: skip
def test_an_answer_that_is_not_http_fails_once(answer: bytes) -> None:
    connection, transport, receiver = sending()
    connection.data_received(answer)
    connection.connection_lost(None)
    assert [said for said in receiver.said if said.startswith("failed")] == ["failed BackendProtocolError"]
    assert transport.aborted


def test_a_head_without_end_is_given_up_at_64_kibibytes() -> None:
    connection, _, receiver = sending()
    connection.data_received(b"HTTP/1.1 200 OK\r\n")
    for number in range(20):
        connection.data_received(b"x-%d: %b\r\n" % (number, b"y" * 4096))
        if receiver.error:
            break
    assert receiver.said[-1] == "failed BackendProtocolError"
    assert number < 18


def test_a_long_body_does_not_count_as_a_long_head() -> None:
    async def main() -> None:
        connection, _, receiver = sending()
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + b"x" * 200_000)
        await turns(13)
        assert receiver.said[-2:] == ["end", "received"]

    run(main())


@pytest.mark.parametrize(
    ("exchanges", "received", "error"),
    [
        (1, b"", "FreshConnectionClosed"),
        (2, b"", "ReusedConnectionClosed"),
        (1, b"HTTP/1.1 200", "AnswerBrokeOff"),
        (2, PLAIN[:-1], "AnswerBrokeOff"),
        (1, CHUNKED[:-2], "AnswerBrokeOff"),
    ],
)
@pytest.mark.parametrize("reset", [True, False])
def test_what_a_lost_connection_means_depends_on_what_came_before(
    exchanges: int, received: bytes, error: str, reset: bool
) -> None:
    connection, _, receiver = sending()
    for _ in range(exchanges - 1):
        connection.data_received(PLAIN)
        receiver = FakeReceiver(connection)
        connection.send(b"x", receiver)
    if received:
        connection.data_received(received)
    assert not connection.eof_received()
    connection.connection_lost(ConnectionResetError("reset") if reset else None)
    assert receiver.said[-1] == f"failed {error}"
    assert receiver.error is not None
    assert ("(reset)" if reset else "(closed)") in receiver.error.message
    assert not connection.rest(0.0)


def test_losing_an_idle_connection_calls_no_receiver() -> None:
    connection, _, receiver = sending()
    connection.data_received(PLAIN)
    connection.connection_lost(None)
    assert receiver.said[-1] == "received"
    assert not connection.rest(0.0)
    connection.abort()


def test_after_an_abort_the_receiver_is_not_called() -> None:
    connection, transport, receiver = sending()
    connection.abort()
    assert transport.aborted
    connection.data_received(PLAIN)
    connection.connection_lost(None)
    assert receiver.said == []


def test_reading_is_paused_and_resumed_once() -> None:
    connection, transport, _ = sending()
    connection.pause_reading()
    connection.pause_reading()
    assert not transport.reading
    connection.resume_reading()
    connection.resume_reading()
    assert transport.reading


def test_who_writes_waits_until_the_backend_takes_more_or_is_gone() -> None:
    async def main(wake: str) -> None:
        connection, _, _ = sending()
        await connection.drained()
        connection.pause_writing()
        waiting = asyncio.create_task(connection.drained())
        await turns(2)
        assert not waiting.done()
        if wake == "room":
            connection.resume_writing()
        else:
            connection.connection_lost(None)
        await waiting

    run(main("room"))
    run(main("gone"))


STREAM_BUT_ITS_END = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\ne\r\ndata: [DONE]\n\n\r\n"


@pytest.mark.parametrize(
    ("rest", "kept"), [(b"0\r\n\r\n", True), (b"5\r\nhello\r\n0\r\n\r\n", False), (b"junk", False), (None, False)]
)
def test_a_connection_whose_answer_is_over_is_kept_once_its_framing_has_ended(rest: bytes | None, kept: bool) -> None:
    async def main() -> None:
        connection, transport, _ = sending()
        connection.data_received(STREAM_BUT_ITS_END)
        back: list[BackendConnection] = []
        connection.finish(back.append)
        assert not connection.ended
        if rest is None:
            connection.connection_lost(None)
        else:
            connection.data_received(rest)
        assert back == ([connection] if kept else [])
        assert connection.rest(0.0) == kept
        assert transport.aborted == (not kept and rest is not None)

    run(main())


def test_a_framing_that_does_not_end_costs_the_connection() -> None:
    async def main() -> None:
        connection, transport, _ = sending()
        connection.data_received(STREAM_BUT_ITS_END)
        connection.finish(lambda _: None)
        await asyncio.sleep(1.1)
        assert transport.aborted

    run(main())


@pytest.mark.parametrize(("unsent_bytes", "kept"), [(0, True), (1, False)])
def test_a_connection_with_a_part_of_its_last_request_unsent_is_not_used_again(unsent_bytes: int, kept: bool) -> None:
    connection, transport = connected()
    connection.send(b"POST / HTTP/1.1\r\n\r\n", FakeReceiver(connection), b"x" * 100_000)
    transport.unsent_bytes = unsent_bytes
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    assert connection.rest(0.0) == kept


@pytest.mark.parametrize(
    ("size_bytes", "status", "kept"), [(65536, 413, True), (65537, 413, False), (65537, 400, False), (65537, 200, True)]
)
def test_a_backend_that_refuses_a_large_body_may_not_have_read_it(size_bytes: int, status: int, kept: bool) -> None:
    connection, _ = connected()
    connection.send(b"POST / HTTP/1.1\r\n\r\n", FakeReceiver(connection), b"x" * size_bytes)
    connection.data_received(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % status)
    assert connection.rest(0.0) == kept
