"""Sending requests over connections that lead nowhere; and cutting answers that do not come."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest

from gateway.config import UpstreamConfig
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.health import ProbeResult
from gateway.core.errors import BackendError, ConnectFailed, FirstByteTimeout, RequestTimeout
from gateway.core.relay.connection import BackendConnection
from gateway.core.relay.relay import Relay
from gateway.core.request import Demand, InferenceRequest, Kind, UpstreamResult
from gateway.core.resources import MemoryBudget
from tests.unit.front.wires import fleet_of
from tests.unit.relay.peers import FakeSink, FakeTransport
from tests.unit.scheduling.virtual_time import run, turns

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"a\r\ndata: {}\n\n\r\n"
DONE = b"e\r\ndata: [DONE]\n\n\r\n"
STRUCTURE = b"d\r\nevent: ping\n\n\r\n"
BEGUN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"


def request(**fields: Any) -> InferenceRequest:
    made = InferenceRequest(
        "chat", Kind.GENERATE, b"POST", b"/v1/chat/completions", Demand("m"), "id-1", b"{}",
        headers=b"x-request-id: id-1\r\n", done_marker=b"data: [DONE]",
    )  # fmt: skip
    for name, value in fields.items():
        setattr(made, name, value)
    return made


class Scene:
    """A relay to one backend, in virtual time; `connect` can be made to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.fleet: Fleet = fleet_of()
        self.relay = Relay(
            self.fleet, UpstreamConfig.model_validate(config), clock=self.loop.time, memory=MemoryBudget(1 << 30)
        )
        self.sink = FakeSink()
        self.made: list[tuple[BackendConnection, FakeTransport]] = []
        self.refuses = False

        async def connect(make: Callable[[], BackendConnection], *_: object) -> tuple[FakeTransport, BackendConnection]:
            if self.refuses:
                raise ConnectionRefusedError
            connection, transport = make(), FakeTransport()
            connection.connection_made(cast(asyncio.BaseTransport, transport))
            self.made.append((connection, transport))
            return transport, connection

        monkeypatch.setattr(self.loop, "create_connection", connect)

    def send(self, what: InferenceRequest | None = None, *, fresh: bool = False) -> "asyncio.Task[UpstreamResult]":
        return self.loop.create_task(
            self.relay.send(
                what or request(), self.fleet.backends[0], self.sink, lambda: None, lambda _: 1000, fresh=fresh
            )
        )

    @property
    def connection(self) -> BackendConnection:
        return self.made[-1][0]

    @property
    def transport(self) -> FakeTransport:
        return self.made[-1][1]

    def check_that_nothing_is_left(self, idle: int = 0) -> None:
        assert repr(self.relay) == "<Relay 0 answers under way>"
        assert repr(self.relay._pools[self.fleet.backends[0]]) == f"<Pool a 0 in use, {idle} idle>"
        assert self.sink.on_writable is None


def test_a_request_is_written_whole_and_its_answer_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        scene = Scene(monkeypatch)
        task = scene.send()
        await turns(2)
        assert len(scene.relay) == 1
        assert scene.transport.sent == (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 10.0.0.1:8000\r\naccept-encoding: identity\r\n"
            b"x-request-id: id-1\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
        )
        scene.connection.data_received(ANSWER)
        assert (await task).status == 200
        assert scene.sink.body == b"{}"
        scene.check_that_nothing_is_left(idle=1)

    run(main())


def test_a_look_up_has_no_body(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        scene = Scene(monkeypatch)
        task = scene.send(request(method=b"GET", target=b"/v1/responses/resp_1", body=b""))
        await turns(2)
        assert scene.transport.sent.startswith(b"GET /v1/responses/resp_1 HTTP/1.1\r\n")
        assert scene.transport.sent.endswith(b"x-request-id: id-1\r\n\r\n")
        scene.connection.data_received(ANSWER)
        await task

    run(main())


@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("received", [b"", b"HTTP/1.1", STREAM, STREAM + CHUNK, ANSWER])
def test_a_client_that_leaves_at_any_moment_closes_the_connection_unless_its_answer_is_whole(
    monkeypatch: pytest.MonkeyPatch, received: bytes, after: int
) -> None:
    async def main() -> None:
        scene = Scene(monkeypatch)
        task = scene.send()
        await turns(2)
        if received:
            scene.connection.data_received(received)
        await turns(after)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) if received != ANSWER else nullcontext():
            await task
        whole = received == ANSWER
        assert scene.transport.aborted != whole
        scene.check_that_nothing_is_left(idle=int(whole))

    run(main())


def test_a_backend_that_cannot_be_reached_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        scene = Scene(monkeypatch)
        scene.refuses = True
        with pytest.raises(ConnectFailed):
            await scene.send()
        scene.check_that_nothing_is_left()

    run(main())


# Uploads.


async def pieces(*parts: bytes | BaseException, lease_broker: asyncio.Event | None = None) -> AsyncIterator[bytes]:
    for part in parts:
        if isinstance(part, BaseException):
            raise part
        yield part
        if lease_broker is not None:
            await lease_broker.wait()


def upload(source: AsyncIterator[bytes]) -> InferenceRequest:
    form = b"multipart/form-data; boundary=b"
    return request(upload=source, body=b"", kind=Kind.UPLOAD, content_type=form, repeatable=False)


def test_an_upload_is_passed_on_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        scene = Scene(monkeypatch)
        task = scene.send(upload(pieces(b"abc", b"0123456789abcdef")))
        await turns(5)
        head, _, body = scene.transport.sent.partition(b"\r\n\r\n")
        assert head.endswith(b"content-type: multipart/form-data; boundary=b\r\ntransfer-encoding: chunked")
        assert body == b"3\r\nabc\r\n10\r\n0123456789abcdef\r\n0\r\n\r\n"
        scene.connection.data_received(ANSWER)
        assert (await task).status == 200
        scene.check_that_nothing_is_left(idle=1)

    run(main())


def test_an_upload_goes_no_faster_than_the_backend_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        scene = Scene(monkeypatch)
        more = asyncio.Event()
        task = scene.send(upload(pieces(b"a", b"b", lease_broker=more)))
        await turns(3)
        scene.connection.pause_writing()
        more.set()
        await turns(3)
        assert scene.transport.sent.endswith(b"1\r\na\r\n1\r\nb\r\n")
        scene.connection.resume_writing()
        await turns(3)
        assert scene.transport.sent.endswith(b"0\r\n\r\n")
        scene.connection.data_received(ANSWER)
        await task

    run(main())


def test_a_backend_that_answers_before_the_upload_ends_is_heard_and_its_connection_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        scene = Scene(monkeypatch)
        more = asyncio.Event()
        task = scene.send(upload(pieces(b"a", b"b", b"c", lease_broker=more)))
        await turns(3)
        scene.connection.data_received(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\n{}")
        more.set()
        assert (await task).status == 413
        assert scene.transport.aborted
        scene.check_that_nothing_is_left()

    run(main())


def test_an_upload_that_fails_aborts_the_backends_work(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        scene = Scene(monkeypatch)
        with pytest.raises(RequestTimeout):
            await scene.send(upload(pieces(b"a", RequestTimeout("slow"))))
        assert scene.transport.aborted
        assert not scene.transport.sent.endswith(b"0\r\n\r\n")
        scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize("after", range(5))
def test_a_backend_that_closes_during_an_upload_is_reported(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    async def main() -> None:
        scene = Scene(monkeypatch)
        more = asyncio.Event()
        task = scene.send(upload(pieces(b"a", b"b", b"c", lease_broker=more)))
        await turns(2)
        scene.connection.connection_lost(ConnectionResetError("reset"))
        await turns(after)
        more.set()
        with pytest.raises(BackendError):
            await task
        scene.check_that_nothing_is_left()

    run(main())


# Answers that do not come.


@pytest.mark.parametrize(
    ("config", "received", "seconds", "error"),
    [
        *[
            ({"first_byte_timeout_seconds": 7, "idle_stream_timeout_seconds": 3}, received, 7, "FirstByteTimeout")
            for received in (b"", b"HTTP/1.1 200", BEGUN, STREAM, STREAM + STRUCTURE)
        ],
        ({"idle_stream_timeout_seconds": 5}, STREAM + CHUNK, 6, "StreamStalled"),
        ({"idle_stream_timeout_seconds": 5}, BEGUN + b"{", 6, "StreamStalled"),
    ],
)
def test_an_answer_that_stalls_is_given_up(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, float], received: bytes, seconds: float, error: str
) -> None:
    async def main() -> None:
        scene = Scene(monkeypatch, **config)
        with scene.relay.watching():
            task = scene.send()
            await turns(2)
            if received:
                scene.connection.data_received(received)
            began = scene.loop.time()
            with pytest.raises(BackendError) as raised:
                await task
            assert type(raised.value).__name__ == error
            assert seconds <= scene.loop.time() - began <= seconds + 1
            assert raised.value.silent_since == pytest.approx(began, abs=1.1)
            assert scene.transport.aborted
            scene.check_that_nothing_is_left()

    run(main())


BEGINNINGS = pytest.mark.parametrize(
    ("received", "rest"),
    [(b"", ANSWER), (BEGUN, b"{}"), (STREAM, CHUNK + DONE), (STREAM + STRUCTURE, CHUNK + DONE)],
    ids=["before the head", "whole", "stream", "after structure"],
)


@BEGINNINGS
def test_by_default_the_first_token_may_take_as_long_as_it_likes(
    monkeypatch: pytest.MonkeyPatch, received: bytes, rest: bytes
) -> None:
    async def main() -> None:
        scene = Scene(monkeypatch)
        with scene.relay.watching():
            task = scene.send()
            await turns(2)
            if received:
                scene.connection.data_received(received)
            await asyncio.sleep(3600)
            assert not scene.sink.begun
            scene.connection.data_received(rest)
            assert (await task).status == 200

    run(main())


@BEGINNINGS
def test_of_an_engine_that_is_down_the_first_token_is_waited_for_no_longer_than_the_next_one(
    monkeypatch: pytest.MonkeyPatch, received: bytes, rest: bytes
) -> None:
    async def main() -> None:
        scene = Scene(monkeypatch, idle_stream_timeout_seconds=5)
        with scene.relay.watching():
            task = scene.send()
            await turns(2)
            if received:
                scene.connection.data_received(received)
            await asyncio.sleep(100)
            assert not task.done()
            scene.fleet.probed(scene.fleet.backends[0], ProbeResult.UNWELL)
            scene.fleet.probed(scene.fleet.backends[0], ProbeResult.UNWELL)
            scene.fleet.probed(scene.fleet.backends[0], ProbeResult.UNWELL)
            with pytest.raises(FirstByteTimeout):
                await task

    run(main())


def test_bytes_that_keep_coming_keep_an_answer_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        scene = Scene(monkeypatch, idle_stream_timeout_seconds=5)
        with scene.relay.watching():
            task = scene.send()
            await turns(2)
            scene.connection.data_received(STREAM)
            for _ in range(20):
                await asyncio.sleep(4)
                scene.connection.data_received(CHUNK)
            assert not task.done()
            assert scene.fleet.backends[0].health.heard_at > scene.loop.time() - 5
            task.cancel()

    run(main())


@pytest.mark.parametrize(
    ("streams", "received", "comments"),
    [
        (True, b"", 3), (True, STREAM, 3), (True, STREAM + STRUCTURE, 3), (True, STREAM + CHUNK, 3),
        (False, b"", 0), (False, STREAM, 3),  # what is streamed is a stream
        (True, BEGUN, 0), (True, BEGUN + b"{", 0), (False, BEGUN, 0),  # a client that gets no stream is not sent them
    ],
)  # fmt: skip
def test_a_silent_stream_is_shown_to_be_alive(
    monkeypatch: pytest.MonkeyPatch, streams: bool, received: bytes, comments: int
) -> None:
    async def main() -> None:
        scene = Scene(monkeypatch)
        scene.relay._comment_seconds = 15
        with scene.relay.watching():
            task = scene.send(request(demand=Demand("m", streams=streams)))
            await turns(2)
            if received:
                scene.connection.data_received(received)
            await asyncio.sleep(50)
            assert scene.sink.comments == comments
            task.cancel()

    run(main())


def test_between_tokens_a_comment_is_due_when_the_stream_was_silent_for_the_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        scene = Scene(monkeypatch)
        scene.relay._comment_seconds = 15
        with scene.relay.watching():
            task = scene.send(request(demand=Demand("m", streams=True)))
            await turns(2)
            scene.connection.data_received(STREAM)
            for _ in range(10):
                scene.connection.data_received(CHUNK)
                await asyncio.sleep(12)
            assert scene.sink.comments == 0
            await asyncio.sleep(6)
            assert scene.sink.comments == 1
            scene.connection.data_received(DONE + b"0\r\n\r\n")
            await task
            await asyncio.sleep(60)
            assert scene.sink.comments == 1

    run(main())


def test_no_comment_cuts_an_event_or_follows_a_blank_line_where_events_have_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        scene = Scene(monkeypatch)
        scene.relay._comment_seconds = 15
        with scene.relay.watching():
            task = scene.send(request(demand=Demand("m", streams=True)))
            await turns(2)
            event = b"id: 7\ndata: {}\n\n"
            scene.connection.data_received(STREAM + b"%x\r\n%b\r\n" % (len(event), event))
            await asyncio.sleep(20)
            assert (scene.sink.comments, scene.sink.blank_lines) == (1, 0)
            long = b"data: " + b"x" * 200_000
            scene.connection.data_received(b"%x\r\n%b\r\n" % (len(long), long))
            await asyncio.sleep(1)
            assert len(scene.sink.body) > 100_000  # its beginning is passed on
            await asyncio.sleep(60)
            assert scene.sink.comments == 1
            scene.connection.data_received(b"2\r\n\n\n\r\n")
            await asyncio.sleep(20)
            assert scene.sink.comments == 2
            task.cancel()

    run(main())


def test_a_client_that_takes_nothing_is_not_the_backends_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        scene = Scene(monkeypatch, idle_stream_timeout_seconds=5)
        with scene.relay.watching():
            task = scene.send()
            await turns(2)
            scene.connection.data_received(STREAM)
            scene.sink.blocked = True
            await asyncio.sleep(100)
            assert not task.done()
            task.cancel()

    run(main())


def test_a_silent_connection_to_a_backend_that_refuses_others_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        scene = Scene(monkeypatch)
        with scene.relay.watching():
            task = scene.send()
            await turns(2)
            scene.fleet.probed(scene.fleet.backends[0], ProbeResult.REFUSED)
            began = scene.loop.time()
            with pytest.raises(BackendError, match="refuses connections"):
                await task
            assert 10 <= scene.loop.time() - began <= 11

    run(main())


def test_idle_connections_are_closed_when_the_gateway_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        scene = Scene(monkeypatch)
        task = scene.send()
        await turns(2)
        scene.connection.data_received(ANSWER)
        await task
        scene.relay.close_idle()
        assert scene.transport.aborted
        scene.check_that_nothing_is_left()

    run(main())
