"""Sends one request and measures its answer. Refusals, breaks and timeouts are results, never exceptions.

`StreamWatch` finds the moments of a token stream and the few events that matter, and parses no JSON while it runs.
"""

from __future__ import annotations

import asyncio
import errno
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from loadtest.drive.connections import Connections, NoConnection, Received
from loadtest.drive.plan import Plan
from loadtest.drive.record import (
    BAD_BODY,
    BODY_CUT,
    CLIENT_LIMIT,
    CONNECT,
    CONNECTION,
    DISCONNECTED,
    ERROR_OBJECT,
    INTERRUPTED,
    NOT_A_STREAM,
    NOTHING,
    OK,
    OTHER_ANSWER,
    SILENT_END,
    STREAM_CUT,
    STREAM_ERROR,
    TIMEOUT,
    Record,
    RequestEnd,
    http_outcome,
    written,
)
from loadtest.workloads.prompts import Call, Endpoint

# A key in front of its colon cannot occur inside a JSON string, where the quotes would be escaped.
_CONTENT = re.compile(
    rb'"(?:content|text|reasoning_content|reasoning|refusal)"\s*:\s*"[^"]|"tool_calls"\s*:\s*\[\s*\{|"token_ids"\s*:\s*\[\s*\d'
)
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_DONE = b"[DONE]"
_QUOTE = b'"'
_BLANK = b"\n\n"


class StreamWatch:
    """Fed with the reads of one response; notes the time of content, the last usage, an error event, and the end."""

    __slots__ = (
        "_closing",
        "_kept",
        "_opening",
        "_rest",
        "_usage",
        "done",
        "error",
        "error_is_object",
        "events",
        "first_event",
        "read_times",
    )

    def __init__(self, *, keeps_text: bool = False) -> None:
        self._rest = b""
        # How the events of this stream begin, up to their text, and how they go on behind it.
        self._opening: bytes | None = None
        self._closing = b""
        self._kept: list[bytes] | None = [] if keeps_text else None
        self._usage: bytes | None = None
        self.read_times: list[float] = []
        self.first_event: float | None = None
        self.events = 0
        self.done = False
        self.error: str | None = None
        self.error_is_object = False

    @property
    def first_content(self) -> float | None:
        """The time of the first content; for a stream without content, of its first event that is no error."""
        return self.read_times[0] if self.read_times else self.first_event

    def feed(self, data: bytes, now: float) -> None:
        """Takes one read that arrived at `now`; events may be cut anywhere."""
        if not self._rest and data.endswith(_BLANK) and self._is_usual(data[:-2]):
            self.events += 1  # the usual read
            self.read_times.append(now)
            return
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *whole, self._rest = data.split(_BLANK)
        before = self.events
        for event in whole:
            if self._is_usual(event):
                self.events += 1
            else:
                self._event(event, now)
        if self.events > before:
            self.read_times.append(now)

    def _is_usual(self, event: bytes) -> bool:
        """Whether it differs from an earlier event by its text only, as most do, and needs no closer look."""
        opening = self._opening
        if opening is None or not event.startswith(opening) or not event.endswith(self._closing):
            return False
        # The text is not empty, and has no quote in it.
        return len(opening) < event.find(_QUOTE, len(opening)) == len(event) - len(self._closing)

    def finish(self) -> None:
        """The body ended: a last [DONE] counts even where the blank line after it is missing."""
        if self._rest.strip() == b"data: " + _DONE:
            self.done = True

    def usage(self) -> dict[str, Any]:
        """The last usage the server reported; empty where there was none."""
        if self._usage is None:
            return {}
        usage = _parsed(self._usage).get("usage")
        return usage if isinstance(usage, dict) else {}

    def text(self) -> str:
        """The answer's text; parsed now, and empty if texts are not kept."""
        return "".join(text_of(_parsed(data)) for data in self._kept or ())

    def _event(self, event: bytes, now: float) -> None:
        data = _data(event)
        if not data:
            return
        if data == _DONE:
            self.done = True
            return
        if b'"error"' in data and self.error is None:
            message = _parsed(data)
            self.error, self.error_is_object = error_message(message), is_error_object(message)
        if self.first_event is None and self.error is None:
            self.first_event = now
        if content := _CONTENT.search(data):
            self.events += 1
            if self._kept is not None:
                self._kept.append(data)
            elif content.group()[-2:-1] == _QUOTE:
                text_at = event.index(content.group()) + len(content.group()) - 1
                end = event.find(_QUOTE, text_at)
                if end > text_at and b"\\" not in event[text_at:end]:
                    self._opening, self._closing = event[:text_at], event[end:]
        if _USAGE.search(data):
            self._usage = data


_DELTA = re.compile(rb'"delta"\s*:\s*(?:"[^"]|\{)')
_LAST = re.compile(rb'"type"\s*:\s*"response\.(completed|incomplete|failed)"')


class ResponseWatch(StreamWatch):
    """The same for a stream of the Responses API: its last event has the usage, and there is no [DONE]."""

    __slots__ = ()

    def _event(self, event: bytes, now: float) -> None:
        data = _data(event)
        if not data or data == _DONE:
            return
        if (last := _LAST.search(data)) is not None:
            response = _parsed(data).get("response")
            response = response if isinstance(response, dict) else {}
            self._usage = orjson.dumps({"usage": response.get("usage")})
            if last.group(1) == b"failed":
                self.error = error_message(response) or "the response failed"
                self.error_is_object = is_error_object(response)
            self.done = True
        elif b'"type":"error"' in data.replace(b" ", b""):
            found = _parsed(data)
            self.error = error_message(found) or str(found.get("message") or "error")
            self.error_is_object = is_error_object(found)
        else:
            self.first_event = now if self.first_event is None else self.first_event
            if _DELTA.search(data):
                self.events += 1
                if self._kept is not None:
                    self._kept.append(data)


def text_of(answer: dict[str, Any]) -> str:
    """The text of the first choice of an answer or of an event of one."""
    if isinstance(answer.get("delta"), str):
        return str(answer["delta"]) if answer.get("type") == "response.output_text.delta" else ""
    if isinstance(output := answer.get("output"), list):
        parts = [part for item in output if isinstance(item, dict) for part in item.get("content") or ()]
        return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return ""
    message = choice.get("delta") or choice.get("message") or {}
    text = choice.get("text") or (message.get("content") if isinstance(message, dict) else None)
    return text if isinstance(text, str) else ""


def error_message(answer: dict[str, Any]) -> str | None:
    """The message of an OpenAI-shaped error body or event; None where it holds no error."""
    error = answer.get("error")
    if not error:
        return None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or error)


def is_error_object(answer: dict[str, Any]) -> bool:
    """Whether it is an error as OpenAI's clients read it: an object with a message."""
    error = answer.get("error")
    return isinstance(error, dict) and isinstance(error.get("message"), str)


def _data(event: bytes) -> bytes:
    """The data of an event; comments (keep-alives) and other fields have none."""
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].strip()
    return b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        answer = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return answer if isinstance(answer, dict) else {}


_DETAIL_CHARS = 240
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}
# Between two slices of reads that are looked into, the loop takes new ones.
_READS_OF_A_SLICE = 256
_MOST_ANSWER_BYTES = 2**28


def open_session(plan: Plan, clock: Callable[[], float] = time.monotonic) -> Connections:
    """Connections without any limit of their own: no cap on their number, no total timeout, no decompression."""
    headers = {"accept-encoding": "identity", "user-agent": "loadtest"}
    return Connections(headers | dict(plan.access.headers), clock, plan.access.tls)


@dataclass(slots=True)
class Answer:
    """The times of content, and its texts if kept."""

    read_times: Sequence[float]
    text: str = ""

    def say(self, text: str) -> None:
        self.text = text


class Client:
    """Sends a plan's requests over one session; `clock` gives seconds from the start of the run."""

    def __init__(self, plan: Plan, session: Connections, clock: Callable[[], float]) -> None:
        self._session = session
        self._clock = clock
        self._url = plan.url
        self._usual = Call(plan.endpoint, plan.stream and plan.endpoint.streams, plan.keeps_text)
        self._timeout_seconds = plan.timeout_seconds

    async def send(self, record: Record, body: bytes, call: Call | None = None) -> Answer:
        """Fills in `record`. Cancellation is recorded, then raised. `call`: if it is not as the plan has it."""
        call = call or self._usual
        kind = ResponseWatch if call.endpoint is Endpoint.RESPONSES else StreamWatch
        watch = kind(keeps_text=call.keeps_text)
        answer = Answer(watch.read_times)
        ended, at = RequestEnd(INTERRUPTED), None
        record.begin(self._clock())
        try:
            async with asyncio.timeout(self._timeout_seconds):
                ended, at = await self._exchange(record, body, call, watch=watch, answer=answer)
        except asyncio.CancelledError:
            ended = RequestEnd(INTERRUPTED)
            raise
        except TimeoutError:
            ended = RequestEnd(TIMEOUT, f"no whole answer in {self._timeout_seconds:g} s", NOTHING)
        except OSError as error:
            # A server that cannot continue a stream may send the reason, and then break it off.
            ended = _error_event(watch) or RequestEnd(_broken(record, call, error), _shown(error), CONNECTION)
        except Exception as error:
            # Any answer of a server is at most a failure of that request, and never of the run.
            ended = RequestEnd(BAD_BODY, _shown(error), OTHER_ANSWER)
        finally:
            first_token = watch.first_content if call.stream else None
            end = self._clock() if at is None else at
            record.finish(ended, end, first_token, read_times=watch.read_times, events=watch.events)
        return answer

    async def _exchange(
        self, record: Record, body: bytes, call: Call, watch: StreamWatch, answer: Answer
    ) -> tuple[RequestEnd, float | None]:
        """Its outcome, and the time of its last byte."""
        endpoint = call.endpoint
        async with self._session.post(
            self._url, endpoint.path, body, clock=self._clock, content_type=endpoint.content_type
        ) as received:
            whole: list[bytes] = []
            try:
                while not received.is_over:
                    await received.more()
                    await self._read(received, call, watch, whole)
            finally:
                if received.status is not None:
                    record.note_headers(received.status, received.headers)
                take = _taker(received, call, watch, whole)
                for at, data in received.take():
                    take(data, at)
            return _judged(
                record, received, call=call, watch=watch, body=b"".join(whole), answer=answer
            ), received.ended_at

    async def _read(self, received: Received, call: Call, watch: StreamWatch, whole: list[bytes]) -> None:
        """Parses the received bytes in slices: the reads of other streams must not wait for all of it."""
        take = _taker(received, call, watch, whole)
        for number, (at, data) in enumerate(received.take(), 1):
            take(data, at)
            if number % _READS_OF_A_SLICE == 0:
                await asyncio.sleep(0)
        if sum(map(len, whole)) > _MOST_ANSWER_BYTES:
            raise ValueError(f"an answer of more than {_MOST_ANSWER_BYTES >> 20} MiB")


def _broken(record: Record, call: Call, error: Exception) -> str:
    if record.status is None:
        return _network_outcome(error)
    return STREAM_CUT if call.stream else BODY_CUT


def _taker(received: Received, call: Call, watch: StreamWatch, whole: list[bytes]) -> Callable[[bytes, float], None]:
    if call.stream and received.status == 200 and _is_stream(received):
        return watch.feed
    return lambda data, _: whole.append(data)


def _judged(
    record: Record, received: Received, call: Call, watch: StreamWatch, body: bytes, answer: Answer
) -> RequestEnd:
    assert received.status is not None
    if received.status != 200:
        return _refusal(received.status, body)
    if not call.stream:
        return _whole(record, call, body, answer)
    if not _is_stream(received):
        kind = received.headers.get("content-type", "").partition(";")[0]
        return RequestEnd(NOT_A_STREAM, f"content-type {written(kind)}", OTHER_ANSWER)
    watch.finish()
    record.note_usage(watch.usage())
    answer.say(watch.text())
    if (broken := _error_event(watch)) is not None:
        return broken
    if watch.done:
        return RequestEnd(OK)
    return RequestEnd(STREAM_CUT, f"ended after {watch.events} events", SILENT_END)


def _is_stream(received: Received) -> bool:
    return received.headers.get("content-type", "").partition(";")[0].strip().lower() == "text/event-stream"


def _error_event(watch: StreamWatch) -> RequestEnd | None:
    """How the stream ended, if by an error event."""
    if watch.error is None:
        return None
    return RequestEnd(
        STREAM_ERROR, watch.error[:_DETAIL_CHARS], ERROR_OBJECT if watch.error_is_object else OTHER_ANSWER
    )


# Where chats and completions, embeddings and scores, responses, and reranks have what was asked for.
_ANSWERS = ("choices", "data", "output", "results")


def _whole(record: Record, call: Call, body: bytes, answer: Answer) -> RequestEnd:
    """Of an answer that came in one piece. What was heard may be silence, and its text empty."""
    found = _parsed(body)
    is_answer = isinstance(found.get("text"), str) if call.endpoint.takes_audio else any(map(found.get, _ANSWERS))
    if not is_answer:
        return RequestEnd(BAD_BODY, body[:_DETAIL_CHARS].decode("utf-8", "replace"), OTHER_ANSWER)
    record.note_usage(found.get("usage") or {})
    answer.say(text_of(found))
    return RequestEnd(OK)


def _refusal(status: int, body: bytes) -> RequestEnd:
    found = _parsed(body)
    message = error_message(found) or body.decode("utf-8", "replace")
    shown_as = ERROR_OBJECT if is_error_object(found) else OTHER_ANSWER
    return RequestEnd(http_outcome(status), message[:_DETAIL_CHARS], shown_as)


def _network_outcome(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in _OUT_OF_RESOURCES:
        return CLIENT_LIMIT
    if isinstance(error, NoConnection):
        return CONNECT
    return DISCONNECTED


def _shown(error: Exception) -> str:
    return written(f"{type(error).__name__}: {error}"[:_DETAIL_CHARS])
