"""What a backend says, and what the client and the dispatcher get of it."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import UpstreamConfig
from gateway.core.errors import AnswerBrokeOff, BackendError, FirstByteTimeout, StreamStalled
from gateway.core.relay import connection as relay_connection
from gateway.core.relay.upstream import UpstreamResponse
from gateway.core.request import Demand, InferenceRequest, Kind, ModelChoice, UpstreamResult, Usage
from gateway.core.resources import MemoryBudget
from tests.unit.relay.peers import FakeSink, a_fleet, backend, connected
from tests.unit.scheduling.virtual_time import run

EVENTS = [(b"Content-Type", b"text/event-stream; charset=utf-8")]
JSON = [(b"Content-Type", b"application/json"), (b"Server", b"uvicorn"), (b"Retry-After", b"3")]
DONE = b"data: [DONE]\n\n"
CHUNK = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'


class Scene:
    """An response between a scripted backend and a sink."""

    def __init__(
        self,
        done_marker: bytes | None = b"data: [DONE]",
        hides_usage: bool = False,
        on_opening: Callable[[bytes], None] | None = None,
        alias: str = "",
    ) -> None:
        self.sink = FakeSink()
        self.connection, self.transport = connected()
        self.first_tokens = 0
        self.came: list[int] = []
        self.expected: list[int] = []
        self.now = 5.0
        self.memory = MemoryBudget(1 << 30)
        request = InferenceRequest(
            "chat",
            Kind.GENERATE,
            b"POST",
            b"/v1/chat/completions",
            Demand("m"),
            "id-1",
            done_marker=done_marker,
            hides_usage=hides_usage,
            on_opening=None if on_opening is None else lambda _, data: on_opening(data),
            model_choice=ModelChoice(alias) if alias else None,
        )
        self.response = UpstreamResponse(
            request, backend(), self.connection, self.sink, self._first_token, self._came, lambda: self.now, self.memory
        )
        self.connection.send(b"request", self.response)

    def _first_token(self) -> None:
        self.first_tokens += 1

    def _came(self, tokens: int) -> int:
        self.came.append(tokens)
        return self.expected.pop(0) if self.expected else 1000

    def head(self, status: int = 200, headers: list[tuple[bytes, bytes]] = JSON) -> None:
        self.connection.status, self.connection.headers = status, headers

    def body(self, *pieces: bytes, end: bool = False) -> None:
        self.connection.parts += pieces
        self.connection.ended = end
        self.response.received()

    @property
    def answer(self) -> UpstreamResult:
        answer = self.response.done.result()
        assert isinstance(answer, UpstreamResult)
        return answer

    @property
    def error(self) -> BackendError:
        error = self.response.done.result()
        assert isinstance(error, BackendError)
        return error

    @property
    def fault(self) -> str:
        return type(self.error).__name__


async def test_a_short_answer_is_held_until_it_is_complete() -> None:
    scene = Scene()
    scene.head()
    scene.body(b'{"usage":{"prompt_tokens":3,')
    assert not scene.sink.begun
    scene.now = 6.0
    scene.body(b'"completion_tokens":4}}', end=True)
    sink = scene.sink
    assert (sink.status, sink.content_type, sink.complete) == (200, b"application/json", True)
    assert sink.body == b'{"usage":{"prompt_tokens":3,"completion_tokens":4}}'
    assert scene.answer.usage == Usage(3, 4)
    assert scene.answer.first_byte_seconds == 5.0
    assert scene.first_tokens == 0


async def test_only_harmless_headers_are_passed_on() -> None:
    scene = Scene()
    scene.head(200, [*JSON, (b"Set-Cookie", b"a=b"), (b"Content-Encoding", b"gzip"), (b"Connection", b"close")])
    scene.body(b"{}", end=True)
    assert scene.sink.extra == b"retry-after: 3\r\ncontent-encoding: gzip\r\n"


async def test_headers_that_are_too_long_or_too_many_are_not_passed_on() -> None:
    scene = Scene()
    scene.head(200, [(b"content-type", b"text/" + b"x" * 60_000), *[(b"content-language", b"e" * 1024)] * 60])
    scene.body(b"{}", end=True)
    assert scene.sink.content_type == b"application/json"
    assert len(scene.sink.extra) < 5200


async def test_an_answer_without_a_body_is_passed_on() -> None:
    scene = Scene()
    scene.head(204, [])
    scene.body(end=True)
    assert (scene.sink.status, scene.sink.body, scene.answer.first_byte_seconds) == (204, b"", None)


async def test_a_long_plain_answer_is_passed_on_once_it_is_over_128_kibibytes() -> None:
    scene = Scene()
    scene.head()
    scene.body(b"x" * 131072)
    assert not scene.sink.begun
    scene.body(b"y")
    assert scene.sink.begun
    scene.body(b"z" * 10 + b'"usage":{"prompt_tokens":1,"completion_tokens":2}', end=True)
    assert scene.sink.complete
    assert len(scene.sink.body) == 131072 + 1 + 10 + 49
    assert scene.answer.usage == Usage(1, 2)


async def test_a_stream_is_passed_on_as_it_comes_and_its_first_token_is_reported_once() -> None:
    scene = Scene()
    scene.head(headers=EVENTS)
    assert not scene.sink.begun
    scene.body(CHUNK)
    assert (scene.sink.begun, scene.sink.body, scene.first_tokens) == (True, CHUNK, 1)
    scene.body(CHUNK[:7])
    scene.body(CHUNK[7:], DONE, end=True)
    assert scene.sink.body == CHUNK + CHUNK + DONE
    assert scene.sink.complete
    assert scene.first_tokens == 1
    assert scene.answer.status == 200


async def test_usage_of_a_stream_is_read_and_hidden_from_who_did_not_ask() -> None:
    scene = Scene(hides_usage=True)
    scene.head(headers=EVENTS)
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":8}}\n\n'
    scene.body(CHUNK + usage + DONE, end=True)
    assert scene.sink.body == CHUNK + DONE
    assert scene.answer.usage == Usage(7, 8)


@pytest.fixture(autouse=True, scope="module")
def chunks_are_passed_on() -> Iterator[None]:
    """As with the extension."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay_connection, "IN_C", True)
        yield


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":8}}\n\n'


def framed(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


async def test_whole_events_in_chunks_are_passed_on_as_they_came_after_the_first() -> None:
    scene = Scene()
    scene.sink.chunked = True
    for data in (HEAD, framed(CHUNK), framed(CHUNK), framed(CHUNK, CHUNK), framed(USAGE, DONE) + b"0\r\n\r\n"):
        scene.connection.data_received(data)
    assert scene.sink.framed == 2
    assert scene.sink.body == CHUNK * 4 + USAGE + DONE
    assert scene.answer.usage == Usage(7, 8)
    assert scene.response.close()
    assert scene.came == [1]
    assert scene.connection.rest(5.0)


@pytest.mark.parametrize("chunked", [True, False])
async def test_chunks_are_passed_on_as_they_came_only_to_a_client_that_gets_chunks(chunked: bool) -> None:
    scene = Scene()
    scene.sink.chunked = chunked
    for data in (HEAD + framed(CHUNK), framed(CHUNK)):
        scene.connection.data_received(data)
    assert scene.sink.framed == chunked
    assert scene.sink.body == CHUNK * 2


@pytest.mark.parametrize("event", [b'data: {"error":{}}\n\n', b'data: {"finish_reason":"abort"}\n\n', b"data: x\n"])
async def test_an_event_that_is_not_for_the_client_is_not_passed_on_as_it_came(event: bytes) -> None:
    scene = Scene()
    scene.sink.chunked = True
    for data in (HEAD, framed(CHUNK), framed(event), framed(CHUNK)[:9]):
        scene.connection.data_received(data)
    assert scene.sink.body == CHUNK


@given(
    st.lists(st.sampled_from([CHUNK, CHUNK, CHUNK, USAGE, CHUNK + CHUNK, CHUNK[:20], CHUNK[20:]]), max_size=8),
    st.lists(st.integers(1, 150), max_size=12),
    st.booleans(),
)
def test_a_stream_cut_anywhere_is_the_same_stream(events: list[bytes], sizes: list[int], hides_usage: bool) -> None:
    async def sent(chunked: bool) -> tuple[bytes, list[int], bool, bool]:
        scene, rest = Scene(hides_usage=hides_usage), HEAD + framed(*events, DONE) + b"0\r\n\r\n"
        scene.sink.chunked = chunked
        for size in [*sizes, len(rest)]:
            if rest:
                scene.connection.data_received(rest[:size])
            rest = rest[size:]
        return scene.sink.body, scene.came, scene.sink.complete, scene.connection.rest(5.0)

    assert run(sent(True)) == run(sent(False))


async def test_a_stream_without_its_end_marker_is_interrupted() -> None:
    scene = Scene()
    scene.head(headers=EVENTS)
    scene.body(CHUNK, end=True)
    assert scene.fault == "StreamInterrupted"
    assert not scene.sink.complete


async def test_a_stream_that_ends_by_its_body_alone_is_complete() -> None:
    scene = Scene(done_marker=None)
    scene.head(headers=EVENTS)
    scene.body(CHUNK, end=True)
    assert scene.sink.complete
    assert scene.answer.status == 200


async def test_with_its_end_marker_a_stream_is_complete_whatever_becomes_of_its_framing() -> None:
    scene = Scene()
    scene.head(headers=EVENTS)
    scene.body(CHUNK, DONE)
    assert scene.sink.complete
    assert scene.answer.status == 200
    scene.response.failed(AnswerBrokeOff("reset"))
    assert scene.answer.status == 200


async def test_before_its_end_marker_a_stream_that_breaks_off_is_interrupted() -> None:
    scene = Scene()
    scene.head(headers=EVENTS)
    scene.body(CHUNK)
    scene.response.failed(AnswerBrokeOff("reset"))
    assert (scene.fault, scene.error.message) == ("StreamInterrupted", "reset")
    assert not scene.sink.complete


async def test_an_error_event_ends_a_stream_that_has_begun() -> None:
    scene = Scene()
    scene.head(headers=EVENTS)
    scene.body(CHUNK)
    scene.body(b'data: {"error":{"message":"out of memory"}}\n\n' + DONE, end=True)
    assert scene.fault == "StreamInterrupted"
    assert "out of memory" in scene.error.message
    assert scene.sink.body == CHUNK


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        (b'data: {"error":{"message":"bad"}}', "BackendFault"),
        (b'data: {"error":{"message":"EngineCore died"}}', "BackendAborted"),
        (b'data: {"choices":[{"finish_reason":"abort"}]}', "BackendAborted"),
    ],
)
async def test_an_error_event_before_anything_else_is_no_answer_yet(event: bytes, fault: str) -> None:
    scene = Scene()
    scene.head(headers=EVENTS)
    scene.body(event + b"\n\n", DONE, end=True)
    assert scene.fault == fault
    assert not scene.sink.begun


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_an_error_that_says_something_of_the_request_is_passed_on(status: int) -> None:
    scene = Scene()
    scene.head(status)
    scene.body(b'{"error":{}}', end=True)
    assert (scene.sink.status, scene.sink.body) == (status, b'{"error":{}}')
    assert scene.answer.status == status


@pytest.mark.parametrize(
    ("status", "body", "fault"),
    [
        (503, b"{}", "BackendBusy"),
        (429, b"{}", "BackendBusy"),
        (500, b'{"error":{}}', "BackendFault"),
        (502, b"", "BackendFault"),
        (500, b'{"error":{"message":"EngineDeadError"}}', "EngineDead"),
        (500, b'{"error":{"message":"cannot render \\"message\\":\\"EngineDead EngineCore"}}', "BackendFault"),
        (404, b'{"error":{"message":"The model `m` does not exist."}}', "ModelMissing"),
    ],
)
async def test_an_error_that_says_something_of_the_backend_is_not_sent_but_kept(
    status: int, body: bytes, fault: str
) -> None:
    scene = Scene()
    scene.head(status)
    scene.body(body, end=True)
    assert scene.fault == fault
    assert not scene.sink.begun
    kept = scene.error.answer
    assert (kept.status, kept.body, kept.content_type, kept.extra) == (
        status, body, b"application/json", b"retry-after: 3\r\n"
    )  # fmt: skip


async def test_a_plain_answer_that_was_aborted_is_no_answer() -> None:
    scene = Scene()
    scene.head()
    scene.body(b'{"choices":[{"finish_reason":"abort"}]}', end=True)
    assert scene.fault == "BackendAborted"
    assert not scene.sink.begun


@pytest.mark.parametrize(
    ("pieces", "fault"),
    [([], "FreshConnectionClosed"), ([b'{"a":'], "AnswerBrokeOff")],
    ids=["head alone", "some body"],
)
async def test_a_plain_answer_that_breaks_off_may_be_replaced_only_if_none_of_its_body_came(
    pieces: list[bytes], fault: str
) -> None:
    scene = Scene()
    scene.head()
    if pieces:
        scene.body(*pieces)
    scene.response.failed(AnswerBrokeOff("reset"))
    assert scene.fault == fault
    assert not scene.sink.begun


async def test_giving_up_closes_the_connection_and_keeps_its_reason() -> None:
    scene = Scene()
    scene.response.give_up(FirstByteTimeout("too long"))
    assert scene.fault == "FirstByteTimeout"
    assert scene.transport.aborted


async def test_giving_up_a_stream_says_that_it_stalled() -> None:
    scene = Scene()
    scene.head(headers=EVENTS)
    scene.body(CHUNK)
    scene.response.give_up(StreamStalled("too long"))
    assert scene.fault == "StreamStalled"


async def test_after_the_end_no_failure_counts() -> None:
    scene = Scene()
    scene.head()
    scene.body(b"{}", end=True)
    scene.response.failed(AnswerBrokeOff("reset"))
    assert scene.answer.status == 200


@pytest.mark.parametrize("headers", [EVENTS, JSON])
async def test_a_slow_client_stops_reading_from_the_backend(headers: list[tuple[bytes, bytes]]) -> None:
    scene = Scene()
    scene.head(headers=headers)
    scene.sink.blocked = True
    scene.body(CHUNK * 30_000)
    for _ in range(3):
        scene.response.watch(5.0, 1.0, UpstreamConfig(idle_stream_timeout_seconds=2.0), 0, a_fleet())
    assert not scene.response.done.done()
    assert not scene.transport.reading
    assert scene.sink.on_writable is not None
    scene.sink.on_writable()
    assert scene.transport.reading


@pytest.mark.parametrize("blocked", [True, False])
async def test_it_is_noted_whether_the_client_was_slow(blocked: bool) -> None:
    scene = Scene()
    scene.head(headers=EVENTS)
    scene.sink.blocked = blocked
    scene.body(CHUNK)
    scene.sink.blocked = False
    scene.body(DONE, end=True)
    assert scene.answer.client_was_slow is blocked


async def test_whether_any_byte_arrived_is_noted() -> None:
    scene = Scene()
    assert not scene.response.heard
    assert not scene.connection.answered
    scene.connection.data_received(b"HTTP/1.1 200 OK\r\n")
    assert scene.response.heard
    assert scene.connection.answered


@pytest.mark.parametrize(
    ("status", "body", "fault"),
    [
        (401, b'{"error":{"message":"Unauthorized"}}', "BackendRefusesKey"),
        (404, b'{"detail":"Not Found"}', "EndpointNotOffered"),
        (405, b'{"detail":"Method Not Allowed"}', "EndpointNotOffered"),
    ],
)
async def test_an_answer_that_speaks_of_how_the_fleet_is_set_up_is_replaced_by_our_own(
    status: int, body: bytes, fault: str
) -> None:
    scene = Scene()
    scene.head(status)
    scene.body(body, end=True)
    assert scene.fault == fault
    assert scene.error.answer is None
    assert not scene.sink.begun


async def test_events_of_a_stream_are_counted_when_there_are_more_than_expected() -> None:
    scene = Scene()
    scene.expected = [5, 2, 100]
    scene.head(headers=EVENTS)
    scene.body(CHUNK)
    assert scene.came == [1]
    scene.body(CHUNK, CHUNK)
    scene.body(CHUNK, CHUNK)
    assert scene.came == [1]
    scene.body(CHUNK, CHUNK)
    assert scene.came == [1, 6]
    scene.body(CHUNK)
    assert scene.came == [1, 6]
    scene.body(CHUNK)
    assert scene.came == [1, 6, 2]
    scene.body(CHUNK * 50, CHUNK * 50)
    assert scene.came == [1, 6, 2, 100]
    scene.body(DONE, end=True)
    assert scene.came == [1, 6, 2, 100]
    assert scene.answer.status == 200


async def test_a_plain_answer_counts_no_tokens() -> None:
    scene = Scene()
    scene.head()
    scene.body(b'{"text":"\n\n"}\n\n', end=True)
    assert scene.answer.status == 200
    assert scene.came == []


async def test_the_events_of_a_stream_that_is_cut_are_all_counted_once() -> None:
    scene = Scene()
    scene.response.close()
    assert scene.came == []
    scene.head(headers=EVENTS)
    for _ in range(4):
        scene.body(CHUNK)
    scene.response.close()
    scene.response.close()
    assert sum(scene.came) == 4
