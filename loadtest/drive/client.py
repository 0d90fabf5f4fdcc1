"""Sends one request and measures its answer. Refusals, breaks and timeouts are results, never exceptions.

`StreamWatch` finds the moments of a token stream and the few events that matter, and parses no JSON while it runs.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

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

# A key in front of its colon cannot occur inside a JSON string, where the quotes would be escaped.
_CONTENT = re.compile(
    rb'"(?:content|text|reasoning_content|reasoning|refusal)"\s*:\s*"[^"]|"tool_calls"\s*:\s*\[\s*\{|"token_ids"\s*:\s*\[\s*\d'
)
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_DONE = b"[DONE]"


class StreamWatch:
    """Fed with the reads of one response; knows when content came, the last usage, an error event, and the end."""

    __slots__ = ("_kept", "_rest", "_usage", "done", "error", "error_is_object", "events", "first_event", "read_times")

    def __init__(self, *, keeps_text: bool = False) -> None:
        self._rest = b""
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
        """When the first content came; for a stream that had none, its first event but an error."""
        return self.read_times[0] if self.read_times else self.first_event

    def feed(self, data: bytes, now: float) -> None:
        """Takes one read that arrived at `now`; events may be cut anywhere."""
        data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *whole, self._rest = data.split(b"\n\n")
        before = self.events
        for event in whole:
            self._event(event, now)
        if self.events > before:
            self.read_times.append(now)

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
        """What the answer said; parsed now, and empty if it was not to be kept."""
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
        if _CONTENT.search(data):
            self.events += 1
            if self._kept is not None:
                self._kept.append(data)
        if _USAGE.search(data):
            self._usage = data


def text_of(answer: dict[str, Any]) -> str:
    """The text of the first choice of an answer or of an event of one."""
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


# A long answer outruns aiohttp's default of 64 KiB and then the reader, not the server, sets the pace.
_READ_BUFFER_BYTES = 2**20
# Below the 5 s after which vLLM's server closes an idle connection, so that we do not send into a closing one.
_KEEPALIVE_SECONDS = 3.0
_DETAIL_CHARS = 240
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}


def open_session(plan: Plan) -> aiohttp.ClientSession:
    """A session without any limit of its own: no connection cap, no total timeout, no decompression."""
    headers = {"content-type": "application/json", "accept-encoding": "identity", "user-agent": "loadtest"}
    if plan.api_key:
        headers["authorization"] = f"Bearer {plan.api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS, ttl_dns_cache=None),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        read_bufsize=_READ_BUFFER_BYTES,
        headers=headers,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


@dataclass(slots=True)
class Answer:
    """When content was read, and what it said, where that is kept."""

    read_times: Sequence[float]
    text: str = ""

    def say(self, text: str) -> None:
        self.text = text


class Client:
    """Sends a plan's requests over one session; `clock` gives seconds from the start of the run."""

    def __init__(self, plan: Plan, session: aiohttp.ClientSession, clock: Callable[[], float]) -> None:
        self._session = session
        self._clock = clock
        self._url = plan.url + plan.endpoint.path
        self._stream = plan.stream
        self._keeps_text = plan.keeps_text
        self._timeout_seconds = plan.timeout_seconds

    async def send(self, record: Record, body: bytes) -> Answer:
        """Fills in `record`. Cancellation is recorded, then raised."""
        watch = StreamWatch(keeps_text=self._keeps_text)
        answer = Answer(watch.read_times)
        ended = RequestEnd(INTERRUPTED)
        record.begin(self._clock())
        try:
            async with asyncio.timeout(self._timeout_seconds):
                ended = await self._exchange(record, body, watch, answer)
        except asyncio.CancelledError:
            ended = RequestEnd(INTERRUPTED)
            raise
        except TimeoutError:
            ended = RequestEnd(TIMEOUT, f"no whole answer in {self._timeout_seconds:g} s", NOTHING)
        except (aiohttp.ClientError, OSError) as error:
            # Who cannot go on with a stream may say why, and then break it off.
            ended = _error_event(watch) or RequestEnd(self._broken(record, error), _shown(error), CONNECTION)
        except Exception as error:
            # Whatever a server answers is a failure of that request, and never of the run.
            ended = RequestEnd(BAD_BODY, _shown(error), OTHER_ANSWER)
        finally:
            first_token = watch.first_content if self._stream else None
            record.finish(ended, self._clock(), first_token, watch.read_times, watch.events)
        return answer

    def _broken(self, record: Record, error: Exception) -> str:
        if record.status is None:
            return _network_outcome(error)
        return STREAM_CUT if self._stream else BODY_CUT

    async def _exchange(self, record: Record, body: bytes, watch: StreamWatch, answer: Answer) -> RequestEnd:
        async with self._session.post(self._url, data=body, allow_redirects=False) as response:
            record.note_headers(response.status, response.headers)
            if response.status != 200:
                return _refusal(response.status, await response.read())
            if not self._stream:
                return _whole(record, await response.read(), answer)
            if response.content_type != "text/event-stream":
                return RequestEnd(NOT_A_STREAM, f"content-type {written(response.content_type)}", OTHER_ANSWER)
            ended = await self._follow(record, response, watch)
            answer.say(watch.text())
            return ended

    async def _follow(self, record: Record, response: aiohttp.ClientResponse, watch: StreamWatch) -> RequestEnd:
        clock = self._clock
        async for data in response.content.iter_any():
            watch.feed(data, clock())
        watch.finish()
        record.note_usage(watch.usage())
        if (broken := _error_event(watch)) is not None:
            return broken
        if watch.done:
            return RequestEnd(OK)
        return RequestEnd(STREAM_CUT, f"ended after {watch.events} events", SILENT_END)


def _error_event(watch: StreamWatch) -> RequestEnd | None:
    """How the stream ended, if by an error event."""
    if watch.error is None:
        return None
    return RequestEnd(
        STREAM_ERROR, watch.error[:_DETAIL_CHARS], ERROR_OBJECT if watch.error_is_object else OTHER_ANSWER
    )


def _whole(record: Record, body: bytes, answer: Answer) -> RequestEnd:
    """Of an answer that came in one piece."""
    found = _parsed(body)
    if not (found.get("choices") or found.get("data")):
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
    if isinstance(error, aiohttp.ClientConnectorError):
        return CONNECT
    return DISCONNECTED


def _shown(error: Exception) -> str:
    return written(f"{type(error).__name__}: {error}"[:_DETAIL_CHARS])
