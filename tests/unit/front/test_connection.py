"""Bytes of requests in, one answer at a time out, and a bound on everything that a client chooses."""

import asyncio
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import Draining, Unauthorized
from gateway.core.front.http_request import HttpRequest
from gateway.core.front.reply import ClientResponse
from tests.unit.front.clients import CHUNKED, GET, POST, UPLOAD, Scene, hang, play, wait_for
from tests.unit.scheduling.virtual_time import turns


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([GET, POST, CHUNKED]), min_size=1, max_size=4), st.lists(st.integers(1, 80), max_size=10)
)
def test_any_pieces_give_the_same_requests_answered_in_order(requests: list[bytes], sizes: list[int]) -> None:
    async def scenario(scene: Scene) -> None:
        rest = b"".join(requests)
        for size in [*sizes, len(rest)]:
            if rest:
                scene.client.data_received(rest[:size])
                rest = rest[size:]
                await turns(size % 3)
        await turns(20)
        assert scene.bodies == [b"" if request is GET else b"hello" for request in requests]
        assert scene.statuses == [200] * len(requests)
        assert scene.client.idle
        assert not scene.wire.closed

    play(scenario)


NOT_FOUND = b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
TOO_LARGE = b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 70\r\n\r\n" + b"x" * 70
CLOSED = GET[:-2] + b"Connection: close\r\n\r\n"


@pytest.mark.parametrize(
    "read",
    [
        GET,
        POST,
        CHUNKED,
        UPLOAD + b"hello",
        NOT_FOUND,
        TOO_LARGE,
        CLOSED,
        GET + POST,
        POST + b"GET",
        b"\r\n" + GET,
        POST[:-1],
    ],
    ids=range(11),
)
@pytest.mark.parametrize("options", [{}, {"memory_budget_bytes": 1}], ids=["with memory", "without"])
def test_what_one_read_brings_is_answered_as_by_the_parser(read: bytes, options: dict[str, int]) -> None:
    def is_held(scene: Scene) -> tuple[int, bytes, list[tuple[object, ...]]]:
        served = [
            (
                each.method,
                each.path,
                each.headers,
                body,
                held_bytes,
                each.keep_alive,
                each.route,
                str(each.error),
            )
            for each, body, held_bytes in zip(scene.served, scene.bodies, scene.held, strict=True)
        ]
        return scene.memory.used_bytes, scene.wire.sent, served

    async def at_once(scene: Scene) -> None:
        for _ in range(2):
            scene.read_buffer[: len(read)] = read
            scene.client.buffer_updated(len(read))
            await turns(5)

    async def by_parser(scene: Scene) -> None:
        for _ in range(2):
            scene.client.data_received(read)
            await turns(5)

    assert is_held(play(at_once, max_body_bytes=64, **options)) == is_held(
        play(by_parser, max_body_bytes=64, **options)
    )


def test_one_request_is_answered_at_a_time() -> None:
    async def scenario(scene: Scene) -> None:
        release = asyncio.Event()
        scene.story = wait_for(release)
        await scene.send(GET + POST)
        assert len(scene.served) == 1
        assert scene.client.answering
        release.set()
        await turns(5)
        assert len(scene.served) == 2

    play(scenario)


@pytest.mark.parametrize("request_", [b"GET /livez HTTP/1.0\r\n\r\n", GET[:-2] + b"Connection: close\r\n\r\n"])
def test_a_client_that_wants_to_close_is_closed_after_its_answer(request_: bytes) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.send(request_)
        assert scene.statuses == [200]
        assert scene.wire.closed

    play(scenario)


@pytest.mark.parametrize(
    ("bytes_", "status"),
    [
        (b"garbage\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", 400),
        (b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /score HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /score HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n", 400),
        (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 9000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
    ],
    ids=range(15),
)
def test_what_is_malformed_is_refused_once_and_the_connection_ends(bytes_: bytes, status: int) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.send(bytes_, GET)
        assert scene.statuses == [status]
        assert scene.wire.half_closed
        scene.client.look(scene.loop.time() + 2.1)
        assert scene.wire.closed

    play(scenario)


def test_a_head_that_never_ends_is_refused_at_64_kibibytes() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.send(b"GET / HTTP/1.1\r\nHost: x\r\n")
        for _ in range(20):
            await scene.send(b"A: %b\r\n" % (b"x" * 4000))
        assert scene.statuses == [431]

    play(scenario)


def test_a_body_larger_than_it_may_be_is_refused_while_it_arrives() -> None:
    async def scenario(scene: Scene) -> None:
        head = b"POST /score HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        await scene.send(head, b"5\r\nhello\r\n")
        assert scene.statuses == []
        await scene.send(b"1\r\nx\r\n")
        assert scene.statuses == [413]
        assert scene.bodies == [b""]

    play(scenario, max_body_bytes=5)


def test_a_body_cut_into_single_bytes_is_refused_after_128_kibibytes_of_framing() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.send(b"POST /score HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(8):
            await scene.send(b"1\r\nx\r\n" * 10_000)
        assert scene.statuses == [400]

    play(scenario)


def test_a_request_refused_by_its_head_is_answered_without_its_body() -> None:
    async def scenario(scene: Scene) -> None:
        scene.refusal = Unauthorized("no key")
        await scene.send(POST[:-5])
        assert scene.statuses == [401]
        await scene.send(b"hello" + GET)
        assert scene.statuses == [401]

    play(scenario)


def test_a_refusal_comes_after_the_answers_to_what_was_asked_before() -> None:
    async def scenario(scene: Scene) -> None:
        release = asyncio.Event()
        scene.story = wait_for(release)
        await scene.send(GET + b"garbage\r\n\r\n")
        assert scene.statuses == []
        release.set()
        await turns(6)
        assert scene.statuses == [200, 400]

    play(scenario)


def test_a_client_that_waits_for_permission_gets_it_before_its_body() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.send(POST[:-9] + b"\r\nExpect: 100-continue\r\n\r\n")
        assert scene.wire.sent == b"HTTP/1.1 100 Continue\r\n\r\n"
        await scene.send(b"hello")
        assert scene.statuses == [100, 200]

    play(scenario)


def test_a_client_that_will_be_refused_gets_no_permission() -> None:
    async def scenario(scene: Scene) -> None:
        scene.refusal = Unauthorized("no key")
        await scene.send(POST[:-9] + b"\r\nExpect: 100-continue\r\n\r\n")
        assert scene.statuses == [401]

    play(scenario)


def test_an_offer_of_another_protocol_is_not_taken_up_but_its_body_is_read() -> None:
    async def scenario(scene: Scene) -> None:
        head = POST[:-9] + b"\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
        await scene.send(head + b"he", b"llo")
        assert scene.statuses == [200]
        assert scene.bodies == [b"hello"]

    play(scenario)


def test_a_client_that_leaves_stops_its_answer() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.send(POST)
        assert scene.client.answering
        scene.leave()
        await turns(3)
        assert scene.ended == ["cancelled"]
        assert scene.here == []
        assert scene.client._transport is None
        scene.client.write(b"late")

    play(scenario, hang)


@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("is_busy", [False, True])
def test_a_client_that_leaves_at_any_moment_leaves_no_task(after: int, is_busy: bool) -> None:
    async def scenario(scene: Scene) -> None:
        with scene.busy() if is_busy else nullcontext():
            scene.client.data_received(GET + POST + GET)
            await turns(after)
            scene.leave()
        await turns(5)
        assert len(asyncio.all_tasks()) == 1
        assert len(scene.served) == len(scene.ended)
        assert scene.beginnings._beginning == 0
        assert scene.memory.used_bytes == 0

    play(scenario)


def test_requests_that_are_put_off_are_answered_in_order_and_have_arrived_when_they_did() -> None:
    async def scenario(scene: Scene) -> None:
        arrived = scene.loop.time()
        with scene.busy():
            await scene.send(POST, GET)
            assert scene.statuses == []
            assert not scene.client.idle
            await asyncio.sleep(1)
        await turns(20)
        assert [incoming.method for incoming in scene.served] == [b"POST", b"GET"]
        assert scene.served[0].arrived_seconds == arrived
        assert scene.beginnings._beginning == 0

    play(scenario)


def test_requests_sent_ahead_are_read_up_to_a_bound_and_none_is_lost() -> None:
    async def scenario(scene: Scene) -> None:
        release = asyncio.Event()
        scene.story = wait_for(release)
        for _ in range(100):
            scene.client.data_received(GET)
        await turns(2)
        assert not scene.wire.reading
        assert len(scene.client._pipelined) <= 16
        release.set()
        await turns(500)
        assert scene.statuses == [200] * 100
        assert scene.wire.reading

    play(scenario)


def test_answers_that_the_client_does_not_take_are_not_piled_up() -> None:
    async def scenario(scene: Scene) -> None:
        scene.client.pause_writing()
        await scene.send(GET * 5)
        assert scene.statuses == []
        scene.client.resume_writing()
        await turns(20)
        assert scene.statuses == [200] * 5

    play(scenario)


def test_a_response_is_notified_when_the_clients_buffer_has_space() -> None:
    rooms: list[str] = []

    async def story(incoming: HttpRequest, reply: ClientResponse) -> None:
        reply.when_writable(lambda: rooms.append("room"))
        await hang(incoming, reply)

    async def scenario(scene: Scene) -> None:
        await scene.send(GET)
        scene.client.pause_writing()
        assert scene.client.blocked
        scene.client.resume_writing()
        assert rooms == ["room"]
        assert not scene.client.blocked

    play(scenario, story)


def test_an_answer_that_was_not_completed_closes_the_connection() -> None:
    async def story(incoming: HttpRequest, reply: ClientResponse) -> None:
        reply.begin(200, b"text/event-stream", b"")
        reply.write(b"data: 1\n\n")

    async def scenario(scene: Scene) -> None:
        await scene.send(GET)
        assert scene.wire.closed
        assert not scene.wire.sent.endswith(b"0\r\n\r\n")

    play(scenario, story)


def test_too_many_clients_are_turned_away_at_once() -> None:
    async def scenario(scene: Scene) -> None:
        assert scene.wire.aborted

    play(scenario, accepts=False)


def test_shutting_down_ends_a_stream_with_an_error_and_closes() -> None:
    async def story(incoming: HttpRequest, reply: ClientResponse) -> None:
        reply.begin(200, b"text/event-stream", b"")
        await hang(incoming, reply)

    async def scenario(scene: Scene) -> None:
        await scene.send(GET)
        scene.client.cut(Draining("bye"))
        assert b'"code":"shutting_down"' in scene.wire.sent
        assert scene.wire.closed
        assert scene.client.was_cut

    play(scenario, story)
