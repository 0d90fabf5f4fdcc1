"""One answer on its way from a backend to a client.

A short answer is held until it is complete, so that a backend that fails before can be replaced unseen. A stream of
events is passed on as it comes. A long plain answer is passed on once it has grown past what is worth holding.
"""

import asyncio
import re
from collections.abc import Callable

import orjson

from gateway.errors import (
    AnswerBrokeOff,
    BackendAborted,
    BackendBusy,
    BackendError,
    BackendFault,
    BackendRefusesKey,
    EndpointNotOffered,
    EngineDead,
    FreshConnectionClosed,
    ModelMissing,
    StreamInterrupted,
)
from gateway.relay.connection import BackendConnection
from gateway.relay.sse import ABORTED, EventStream, read_stream_usage, read_usage
from gateway.request import Sink, UpstreamResult, Usage

_HELD_BYTES = 131072  # plus the last read; also the limit of memory for a client that does not read
_TAIL_BYTES = 4096
_EVENT_END = b"\n\n"
_EVENT_BYTES = 512  # a larger piece may hold several events
_ENGINE_DEATH = re.compile(rb'"(?:message|type|detail)"\s*:\s*"Engine(?:Core|Dead)')  # never in quoted text
_MAX_VALUE_BYTES = 1024  # a longer header of a backend goes no further
_MAX_EXTRA_BYTES = 4096
_PASSED_HEADERS = frozenset((b"content-language", b"content-disposition", b"openai-processing-ms", b"retry-after"))


class UpstreamResponse:
    """Takes one answer from a connection and passes it on to a sink. `done` is its result, or a BackendError."""

    __slots__ = (
        "_client_was_slow", "_clock", "_connection", "_content_type", "_done_marker", "_ended", "_events", "_expected",
        "_extra", "_first_byte_seconds", "_first_token", "_held_bytes", "_held_parts", "_hides_usage", "_left",
        "_on_opening", "_on_tokens", "_parts", "_silent_seconds", "_sink", "_status", "_tail", "body", "done", "heard",
        "streams",
    )  # fmt: skip

    def __init__(
        self,
        sink: Sink,
        connection: BackendConnection,
        first_token: Callable[[], None],
        on_tokens: Callable[[int], int],
        clock: Callable[[], float],
        done_marker: bytes | None,
        hides_usage: bool,
        streams: bool = False,
        on_opening: Callable[[bytes], None] | None = None,
    ) -> None:
        self.done: asyncio.Future[UpstreamResult] = asyncio.get_running_loop().create_future()
        self.heard = False  # a byte came since the last call of `silence`
        self.streams = streams  # the client requested a stream of events
        self._silent_seconds = 0.0
        self._on_opening = on_opening  # gets the first bytes of an answer with status 200
        self._sink = sink
        self._connection = connection
        self._first_token = first_token
        self._on_tokens = on_tokens
        self._expected = self._left = 0  # events between two calls of `on_tokens`, and how many of these are left
        self._clock = clock
        self._done_marker = done_marker
        self._hides_usage = hides_usage
        self._status = 0
        self._content_type = b"application/json"
        self._extra = b""
        self._events: EventStream | None = None
        self._parts: list[bytes] = []
        self.body = self._parts.append  # what the connection calls with body bytes, once an event: no frame for it
        self._held_parts = 0
        self._held_bytes = 0
        self._tail = b""
        self._ended = False
        self._client_was_slow = False
        self._first_byte_seconds: float | None = None

    @property
    def begun(self) -> bool:
        """Something of the answer has arrived."""
        return self._connection.answered

    @property
    def answered(self) -> bool:
        """The client has its whole answer."""
        return self.done.done() and not self.done.cancelled() and self.done.exception() is None

    def silence(self, passed_seconds: float) -> float:
        """For how many seconds the backend has sent nothing; 0 while the client is slow, so that it is not read."""
        if self.heard or self._sink.blocked:
            self.heard = False
            self._silent_seconds = 0.0
        else:
            self._silent_seconds += passed_seconds
        return self._silent_seconds

    def comment(self) -> None:
        """Send the client a keep-alive comment, unless a part of the answer has arrived."""
        if self._first_byte_seconds is None and not self.done.done():
            self._sink.comment()

    # What the connection calls.

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status = status
        for name, value in headers:
            if len(value) > _MAX_VALUE_BYTES:
                continue
            name = name.lower()
            if name == b"content-type":
                self._content_type = value
            elif (name == b"content-encoding" or name in _PASSED_HEADERS) and len(self._extra) < _MAX_EXTRA_BYTES:
                self._extra += b"%b: %b\r\n" % (name, value)
        if status == 200 and self._content_type.startswith(b"text/event-stream"):
            self._events = EventStream(self._done_marker, self._hides_usage)

    def end(self) -> None:
        self._ended = True

    def flushed(self) -> None:
        self.heard = True
        if self._events is not None and self._first_byte_seconds is not None and not self._ended:
            if self._parts:
                self._pass_events(self._events)
            return
        if self._parts:
            if self._first_byte_seconds is None:
                self._first_byte_seconds = self._clock()
                if self._events is not None:
                    self._first_token()
            if self._events is not None:
                self._pass_events(self._events)
            elif self._sink.begun:
                self._pass_plain()
            elif not self._ended:
                self._hold()
        if self._ended and not self.done.done():
            self._finish()

    def failed(self, error: BackendError) -> None:
        """The answer broke off. After its first byte went to the client nothing can be tried again."""
        if self.done.done():
            return
        if self._events is not None and self._events.complete and self._done_marker is not None:
            self._finish()  # the end marker arrived; only the framing is missing
        elif self._sink.begun:
            self.done.set_exception(error if isinstance(error, StreamInterrupted) else StreamInterrupted(error.message))
        elif isinstance(error, AnswerBrokeOff) and self._first_byte_seconds is None:
            self.done.set_exception(FreshConnectionClosed(error.message))  # a head without a body is no answer yet
        else:
            self.done.set_exception(error)

    def close(self) -> bool:
        """Pass on no more, and count the tokens that are not counted yet. Returns `answered`."""
        if self._client_was_slow:
            self._sink.when_writable(None)
        if answered := self.answered:
            return answered
        rest, self._expected = self._expected - self._left, self._left
        if rest:
            self._on_tokens(rest)
        return answered

    def give_up(self, error: BackendError) -> None:
        """Wait no longer for the backend."""
        self.failed(error)
        self._connection.abort()

    # Passing on.

    def _pass_events(self, events: EventStream) -> None:
        parts = self._parts
        if self.done.done():  # the end marker has come, or the client has left, and this was under way
            parts.clear()
            return
        count = len(parts)  # an engine sends each event as one piece
        data = events.take(parts[0] if count == 1 else b"".join(parts))
        parts.clear()
        if data:
            sink = self._sink
            if self._on_opening is not None:
                self._note_opening(data)
            if not sink.begun:
                sink.begin(200, self._content_type, self._extra)
            if sink.write(data):
                self._wait_for_room()
            self._left -= count if len(data) <= count * _EVENT_BYTES else data.count(_EVENT_END)
            if self._left <= 0:
                self._expected = self._left = self._on_tokens(self._expected - self._left)
            if events.ended and not self._ended:
                self._finish()  # engines send the end of the framing a little later: do not wait for it

    def _pass_plain(self) -> None:
        data = b"".join(self._parts)
        self._parts.clear()
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if self._sink.write(data):
            self._wait_for_room()

    def _hold(self) -> None:
        self._held_bytes += sum(map(len, self._parts[self._held_parts :]))
        self._held_parts = len(self._parts)
        if self._held_bytes > _HELD_BYTES:
            if self._on_opening is not None:
                self._note_opening(b"".join(self._parts))
            self._sink.begin(self._status, self._content_type, self._extra)
            self._pass_plain()

    def _note_opening(self, data: bytes) -> None:
        if self._on_opening is not None and self._status == 200:
            self._on_opening(data)
        self._on_opening = None

    def _wait_for_room(self) -> None:
        self._client_was_slow = True
        self._connection.pause_reading()
        self._sink.when_writable(self._connection.resume_reading)

    def _finish(self) -> None:
        events, sink = self._events, self._sink
        if events is not None:
            if events.failure:
                self._gave_up(events.failure)
            elif not events.complete:
                self.done.set_exception(StreamInterrupted("The backend's response ended before it was complete."))
            else:
                if not sink.begun:
                    sink.begin(200, self._content_type, self._extra)
                sink.end()
                self.done.set_result(self._answer(read_stream_usage(events.usage_first, events.usage_last)))
        elif sink.begun:
            sink.end()
            self.done.set_result(self._answer(read_usage(self._tail)))
        else:
            self._finish_held(b"".join(self._parts))

    def _gave_up(self, event: bytes) -> None:
        """The backend ended the stream with an error, or by aborting it."""
        aborted = ABORTED in event or _is_engine_death(event)
        if self._sink.begun:
            message = f"The backend aborted the response: {_message(event)}"
            self.done.set_exception(StreamInterrupted(message, answered=not aborted))
        elif aborted:
            self.done.set_exception(BackendAborted("The backend aborted the response."))
        else:
            self.done.set_exception(BackendFault(f"The backend returned an error: {_message(event)}"))

    def _finish_held(self, body: bytes) -> None:
        status = self._status
        if status < 400 and self._done_marker is not None and ABORTED in body:
            self.done.set_exception(BackendAborted("The backend aborted the response."))
            return
        if status < 400:
            if self._on_opening is not None:
                self._note_opening(body)
            self._sink.send(status, self._content_type, self._extra, body)
            self.done.set_result(self._answer(read_usage(body[-_TAIL_BYTES:])))
            return
        answer = UpstreamResult(status, None, self._first_byte_seconds, body, self._content_type, self._extra)
        if error := _judge(answer):
            self.done.set_exception(error)
        else:
            self._sink.send(status, self._content_type, self._extra, body)
            self.done.set_result(answer)

    def _answer(self, usage: Usage | None) -> UpstreamResult:
        return UpstreamResult(self._status, usage, self._first_byte_seconds, client_was_slow=self._client_was_slow)


def _judge(answer: UpstreamResult) -> BackendError | None:
    """The failure of the backend that an error response shows; None = the request is at fault."""
    status, body = answer.status, answer.body
    if status in (429, 503):
        return BackendBusy(f"The backend returned {status}.", answer=answer)
    if status >= 500:
        if _is_engine_death(body):
            return EngineDead("The backend's engine is dead.", answer=answer)
        return BackendFault(f"The backend returned {status}.", answer=answer)
    if status == 404 and b"does not exist" in body:
        return ModelMissing("The backend no longer serves this model.", answer=answer)
    if status in (401, 403):
        return BackendRefusesKey("The backend rejected the gateway's API key: set its api_key in the configuration.")
    if status in (404, 405) and b'"error"' not in body:
        return EndpointNotOffered("The backend of this model does not support this endpoint.")
    return None


def _is_engine_death(body: bytes) -> bool:
    return _ENGINE_DEATH.search(body) is not None


def _message(event: bytes) -> str:
    try:
        said = orjson.loads(event.partition(b"data: ")[2])["error"]["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        said = "no reason given"
    return str(said)[:500]
