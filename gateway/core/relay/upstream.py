"""One answer of a backend on its way to the client.

A short answer is held until it is complete, so that a retry after a failure is invisible to the client. A stream of
events is held until its first token, and then passed on as it arrives. A long plain answer is passed on once it exceeds
the limit for holding.
"""

import asyncio
import re
from collections.abc import Callable
from math import inf

import orjson

from gateway.config import UpstreamConfig
from gateway.core.backends.backend import Backend
from gateway.core.backends.fleet import Fleet
from gateway.core.errors import (
    AnswerBrokeOff,
    BackendAborted,
    BackendBusy,
    BackendDown,
    BackendError,
    BackendFault,
    BackendRefusesKey,
    EndpointNotOffered,
    EngineDead,
    FirstByteTimeout,
    FreshConnectionClosed,
    GatewayError,
    ModelMissing,
    StreamInterrupted,
    StreamStalled,
)
from gateway.core.relay.connection import BackendConnection, Receiver
from gateway.core.relay.first_token import BEGINS_WITH_TEXT, Opening
from gateway.core.relay.refusals import as_clients_read
from gateway.core.relay.renaming import NameReplacer, RenamedEvents
from gateway.core.relay.sse import ABORTED, EventStream, last_usage, read_stream_usage
from gateway.core.request import DONE_MARKER, InferenceRequest, Sink, UpstreamResult, Usage
from gateway.core.resources import Holding, MemoryBudget

_HELD_BYTES = 131072  # plus the last read; also the limit of memory for a client that does not read
_WRITTEN_BYTES = 65536  # per write: a transport keeps a partly sent bytes object whole
_TAIL_BYTES = 4096
_EVENT_END = b"\n\n"
_EVENT_BYTES = 512  # a larger piece may hold several events
_ENGINE_DEATH = re.compile(rb'"(?:message|type|detail)"\s*:\s*"Engine(?:Core|Dead)')  # never in quoted text
_MAX_VALUE_BYTES = 1024  # a longer header of a backend goes no further
_MAX_EXTRA_BYTES = 4096
_GONE_SECONDS = 10.0  # a backend that refuses connections may leave open ones silent forever
_PASSED_HEADERS = frozenset(
    b"content-type content-encoding content-disposition content-language openai-processing-ms retry-after".split()
)


class UpstreamResponse(Receiver):
    """Takes one answer from a connection and passes it on to a sink. `done` is its result, or a BackendError.

    `first_token` is called when a stream's output begins; `on_tokens` with the number of events since its last call: it
    returns the number of events until its next call. Held parts of a stream are reserved in `memory`.
    """

    def __init__(
        self,
        request: InferenceRequest,
        backend: Backend,
        connection: BackendConnection,
        sink: Sink,
        first_token: Callable[[], None],
        on_tokens: Callable[[int], int],
        clock: Callable[[], float],
        memory: MemoryBudget,
        movable: bool = False,
    ) -> None:
        self._backend = backend
        self._movable = movable
        self.done: asyncio.Future[UpstreamResult | GatewayError] = asyncio.get_running_loop().create_future()
        self.answered = False  # the client has its whole answer
        self.heard = False  # a byte came since the last call of `watch`
        self._silent_seconds = 0.0  # without output
        self._silent_since = 0.0
        self._memory = memory
        self._request = request
        self._connection = connection
        self._sink = sink
        self._first_token = first_token
        self._on_tokens = on_tokens
        self._expected = self._left = 0  # events between two calls of `on_tokens`, and how many of these are left
        self._clock = clock
        self._status = 0  # the head has not come
        self._content_type = b"application/json"
        self._extra = b""
        self._events: EventStream | None = None
        self._remembering: EventStream | None = None  # the same, if its end marker may be in chunks passed on as is
        self._opening: Opening | None = None  # of a stream, until its first token
        self._has_ids = False  # its events have ids
        self._kept: list[bytes] = []  # a plain answer in parts until it is passed on, then its end
        self._kept_bytes = 0
        self._names: NameReplacer | None = None  # of a plain answer whose client used an alias
        self._client_was_slow = False
        self._output_seconds: float | None = None  # time of a stream's first token, or a plain answer's first byte

    def watch(
        self, now: float, passed_seconds: float, config: UpstreamConfig, comment_seconds: int, fleet: Fleet
    ) -> None:
        """Give up a backend that has sent no output for too long, or that went down while others serve; send the client
        of a silent stream a keep-alive comment every `comment_seconds`. Called every `passed_seconds`, whole ones.
        """
        health, has_begun = self._backend.health, self._output_seconds is not None
        if self.heard:
            health.heard(now, is_output=has_begun)  # it responds, even if its /health is slow
        if (self.heard and has_begun) or self._sink.blocked:  # while the client is slow, the backend is not read
            self.heard = False
            self._silent_seconds, self._silent_since = 0.0, now
            return
        self.heard = False
        if not self._silent_seconds and not has_begun:
            self._silent_since = now - passed_seconds
        self._silent_seconds += passed_seconds
        silent = self._silent_seconds
        if comment_seconds and not silent % comment_seconds:
            self._comment()
        message = f"The backend sent no output for {silent:g} s."
        limit_seconds = config.idle_stream_timeout_seconds
        if not has_begun and health.state != "down":
            limit_seconds = config.first_byte_timeout_seconds or inf
        if self._movable and not has_begun and not self._sink.begun and self._is_replaced(fleet):
            self.give_up(BackendDown(f"{message} Its health probes fail."))
        elif health.gone and silent >= _GONE_SECONDS:
            self.give_up(FreshConnectionClosed(f"{message} It refuses connections."))
        elif silent >= limit_seconds:
            kind = StreamStalled if has_begun or self._sink.begun else FirstByteTimeout
            self.give_up(kind(message, silent_since=self._silent_since))

    def _comment(self) -> None:
        """Send a keep-alive comment, if the client waits for a stream that is between two events."""
        events = self._events
        streams = self._request.demand.streams and not self._status if events is None else events.at_event_end
        if streams and not self.done.done():
            self._sink.comment(blank_line=not self._has_ids)

    def _is_replaced(self, fleet: Fleet) -> bool:
        """Whether the backend is down, and others get requests of this model."""
        if self._backend.health.state != "down":
            return False
        serving = fleet.serving(self._request.demand.model) or (self._backend,)
        return self._backend not in serving

    # Called by the connection.

    def received(self) -> None:
        """Pass on what has arrived together: of a stream, mostly one event in one part."""
        self.heard = True
        connection = self._connection
        if not self._status and connection.status:
            self._take_head()
        events, parts, count = self._events, connection.parts, len(connection.parts)
        if self.done.done():  # the end marker has come, or the client has left
            parts.clear()
            return
        if count:
            data = parts[0] if count == 1 else b"".join(parts)
            parts.clear()
            if events is None:
                self._keep(data)
            elif data := events.take(data):
                if self._output_seconds is None:
                    self._open(data, count)
                else:
                    self._pass_events(data, count)
        # Engines send the end of a stream's framing a little later than its last event: do not wait for it.
        if connection.ended or (events is not None and events.ended):
            self._finish()

    def received_chunks(self, data: bytes, chunks: int) -> None:
        """Pass complete events on as they arrive, byte for byte."""
        self.heard = True
        if self._remembering is not None:
            self._remembering.skip(data)
        self._pass_events(data, chunks, framed=True)

    def failed(self, error: BackendError) -> None:
        """The answer broke off. After its first byte went to the client nothing can be tried again."""
        if self.done.done():
            return
        if self._events is not None and self._events.complete and self._request.done_marker is not None:
            self._finish()  # the end marker arrived; only the framing is missing
        else:
            self._broke_off(error)

    def _broke_off(self, error: BackendError) -> None:
        if self._sink.begun:
            self.done.set_result(error if isinstance(error, StreamInterrupted) else StreamInterrupted(error.message))
        elif isinstance(error, AnswerBrokeOff) and self._output_seconds is None:
            self.done.set_result(FreshConnectionClosed(error.message))  # without output it is no answer yet
        else:
            self.done.set_result(error)

    def close(self) -> bool:
        """Pass on no more, and count the tokens that are not counted yet. Returns `answered`."""
        if self._client_was_slow:
            self._sink.when_writable(None)
        if self._opening is not None:
            self._opening.drop()
        rest, self._expected = self._expected - self._left, self._left
        if rest and not self.answered:
            self._on_tokens(rest)
        return self.answered

    def give_up(self, error: BackendError) -> None:
        """End the wait for the backend without its answer."""
        self.failed(error)
        self._connection.abort()

    # Passing on.

    def _take_head(self) -> None:
        self._status = self._connection.status
        passed = _PASSED_HEADERS
        for name, value in self._connection.headers:
            name = name.lower()
            if name not in passed or len(value) > _MAX_VALUE_BYTES:
                continue
            if name == b"content-type":
                self._content_type = value
            elif len(self._extra) < _MAX_EXTRA_BYTES:
                self._extra += b"%b: %b\r\n" % (name, value)
        request, choice = self._request, self._request.model_choice
        alias = choice.alias if choice is not None and b"content-encoding" not in self._extra.lower() else ""
        if self._status == 200 and self._content_type.startswith(b"text/event-stream"):
            marker = request.done_marker
            self._events = EventStream(marker, request.hides_usage)
            if alias:
                self._events = RenamedEvents(marker, request.hides_usage, alias, nested=marker != DONE_MARKER)
            self._remembering = None if marker == DONE_MARKER else self._events
        elif alias and self._status == 200:
            self._names = NameReplacer(alias)

    def _keep(self, data: bytes) -> None:
        """Keep a part of a plain answer; pass on a long answer, keeping only its end."""
        sink = self._sink
        if self._output_seconds is None:
            self._output_seconds = self._clock()
        if self._names is not None:
            data = self._names.feed(data)
            if not data:  # an empty chunk would end the answer
                return
        self._kept.append(data)
        self._kept_bytes += len(data)
        if not sink.begun and (self._kept_bytes <= _HELD_BYTES or self._connection.ended):
            return
        kept = b"".join(self._kept)
        self._kept = [kept[-_TAIL_BYTES:]]
        if not sink.begun:
            data = kept
            self._begin(data)
        if sink.write(data):
            self._wait_for_room()

    def _begin(self, data: bytes) -> None:
        self._note_opening(data)
        self._sink.begin(self._status, self._content_type, self._extra)

    def _open(self, data: bytes, count: int) -> None:
        """Hold the events before the first token; with it, begin to pass on."""
        opening = self._opening
        has_output = opening is None and BEGINS_WITH_TEXT.match(data) is not None
        if not has_output:
            if opening is None:
                # The id of a response that continues in the background is needed now: no other backend can have it.
                limit_bytes = _HELD_BYTES + 2 * len(self._request.body) if self._request.background is None else 0
                opening = self._opening = Opening(Holding(self._memory), limit_bytes)
            data = opening.take(data)
            has_output, self._has_ids = opening.has_output, opening.has_ids
        if has_output:
            self._opening = None
            self._output_seconds = self._clock()
            self._first_token()
        if data:
            if not self._sink.begun:
                self._begin(data)
            self._connection.passes_chunks = has_output and type(self._events) is EventStream and self._sink.chunked
            if len(data) > _WRITTEN_BYTES:
                for at in range(0, len(data), _WRITTEN_BYTES):
                    self._pass_events(data[at : at + _WRITTEN_BYTES], 1)
            else:
                self._pass_events(data, count)

    def _note_opening(self, data: bytes) -> None:
        if self._request.on_opening is not None and self._status == 200:
            self._request.on_opening(self._backend.name, data)

    def _pass_events(self, data: bytes, count: int, framed: bool = False) -> None:
        if self._sink.write(data, framed):
            self._wait_for_room()
        self._left -= count if len(data) <= count * _EVENT_BYTES else data.count(_EVENT_END)
        if self._left <= 0:
            self._expected = self._left = self._on_tokens(self._expected - self._left)

    def _wait_for_room(self) -> None:
        self._client_was_slow = True
        self._connection.pause_reading()
        self._sink.when_writable(self._connection.resume_reading)

    def _finish(self) -> None:
        self._connection.passes_chunks = False  # nothing is passed on after the end
        events, sink, status, kept = self._events, self._sink, self._status, b"".join(self._kept)
        if events is not None:
            if events.failure:
                self._gave_up(events.failure)
                return
            if not events.complete or (self._opening is not None and self._opening.drop()):
                self._broke_off(AnswerBrokeOff("The backend's response ended before it was complete."))
                return
            if not sink.begun:
                sink.begin(200, self._content_type, self._extra)
            sink.end()
            usage = read_stream_usage(events.usage_first, events.usage_last)
        elif sink.begun:
            if self._names is not None and (rest := self._names.rest()):
                sink.write(rest)
            sink.end()
            usage = read_usage(kept)
        elif status >= 400:
            answer = UpstreamResult(status, None, self._output_seconds, kept, self._content_type, extra=self._extra)
            if error := _judge(answer):
                self.done.set_result(error)
                return
            status, kept = as_clients_read(status, kept, self._request)
            sink.send(status, self._content_type, self._extra, kept)
            usage = None
        elif self._request.done_marker is not None and kept.find(ABORTED) >= 0:
            self.done.set_result(BackendAborted("The backend aborted the response."))
            return
        else:
            if self._names is not None:
                kept += self._names.rest()
            if self._request.on_opening is not None:
                self._note_opening(kept)
            sink.send(status, self._content_type, self._extra, kept)
            usage = read_usage(kept[-_TAIL_BYTES:])
        self.answered = True
        result = UpstreamResult(status, usage, self._output_seconds)
        result.client_was_slow = self._client_was_slow
        self.done.set_result(result)

    def _gave_up(self, event: bytes) -> None:
        """The backend ended the stream with an error, or by aborting it."""
        aborted = ABORTED in event or _ENGINE_DEATH.search(event) is not None
        if self._sink.begun:
            message = f"The backend aborted the response: {_message(event)}"
            self.done.set_result(StreamInterrupted(message, answered=not aborted))
        elif aborted:
            self.done.set_result(BackendAborted("The backend aborted the response."))
        else:
            self.done.set_result(BackendFault(f"The backend returned an error: {_message(event)}"))


def _judge(answer: UpstreamResult) -> BackendError | None:
    """The failure of the backend that an error response shows; None = the request is at fault."""
    status, body = answer.status, answer.body
    if status in (429, 503):
        return BackendBusy(f"The backend returned {status}.", answer=answer)
    if status >= 500:
        if _ENGINE_DEATH.search(body):
            return EngineDead("The backend's engine is dead.", answer=answer)
        return BackendFault(f"The backend returned {status}.", answer=answer)
    if status == 404 and b"does not exist" in body:
        return ModelMissing("The backend no longer serves this model.", answer=answer)
    if status in (401, 403):
        return BackendRefusesKey("The backend rejected the gateway's API key: set its api_key in the configuration.")
    if status in (404, 405) and b'"error"' not in body:
        return EndpointNotOffered("The backend of this model does not support this endpoint.")
    return None


def _message(event: bytes) -> str:
    try:
        said = orjson.loads(event.partition(b"data: ")[2])["error"]["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        said = "no reason given"
    return str(said)[:500]


def read_usage(tail: bytes) -> Usage | None:
    """The last usage in the end of a plain answer, where it mostly is one of the last fields of the whole."""
    start = tail.rfind(b'"usage"')
    if start < 0:
        return None
    try:
        found = orjson.loads(b"{" + tail[start:])["usage"]
    except orjson.JSONDecodeError:
        found = None
    return Usage.of(found if found and type(found) is dict else last_usage(tail))
