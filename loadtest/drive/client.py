"""Sends one request and measures its answer. Refusals, breaks and timeouts are results, never exceptions.

`StreamWatch` finds the moments of a token stream and the few events that matter, and parses no JSON while it runs.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
    http_outcome,
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
        record.sent = self._clock()
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await self._exchange(record, body, watch, answer)
        except asyncio.CancelledError:
            record.outcome = INTERRUPTED
            raise
        except TimeoutError:
            record.outcome, record.detail = TIMEOUT, f"no whole answer in {self._timeout_seconds:g} s"
            record.shown_as = NOTHING
        except (aiohttp.ClientError, OSError) as error:
            # Who cannot go on with a stream may say why, and then break it off.
            if not _note_error_event(record, watch):
                record.outcome, record.detail = self._broken(record, error), _shown(error)
                record.shown_as = CONNECTION
        except Exception as error:
            # Whatever a server answers is a failure of that request, and never of the run.
            record.outcome, record.detail, record.shown_as = BAD_BODY, _shown(error), OTHER_ANSWER
        finally:
            record.end = self._clock()
            record.first_token = watch.first_content if self._stream else None
            record.events, record.reads = watch.events, len(watch.read_times)
            record.quiet_from, record.quiet_until = _quiet((record.sent, *watch.read_times, record.end))
        return answer

    def _broken(self, record: Record, error: Exception) -> str:
        if record.status is None:
            return _network_outcome(error)
        return STREAM_CUT if self._stream else BODY_CUT

    async def _exchange(self, record: Record, body: bytes, watch: StreamWatch, answer: Answer) -> None:
        async with self._session.post(self._url, data=body, allow_redirects=False) as response:
            record.status = response.status
            _note_headers(record, response)
            if response.status != 200:
                record.outcome = http_outcome(response.status)
                record.detail, record.shown_as = _refusal(await response.read())
            elif not self._stream:
                answer.text = _take_answer(record, await response.read())
            elif response.content_type != "text/event-stream":
                record.outcome, record.detail = NOT_A_STREAM, f"content-type {_written(response.content_type)}"
                record.shown_as = OTHER_ANSWER
            else:
                await self._follow(record, response, watch)
                answer.text = watch.text()

    async def _follow(self, record: Record, response: aiohttp.ClientResponse, watch: StreamWatch) -> None:
        clock = self._clock
        async for data in response.content.iter_any():
            watch.feed(data, clock())
        watch.finish()
        _note_usage(record, watch.usage())
        if _note_error_event(record, watch):
            return
        if not watch.done:
            record.outcome, record.detail = STREAM_CUT, f"ended after {watch.events} events"
            record.shown_as = SILENT_END
        else:
            record.outcome = OK


def _note_error_event(record: Record, watch: StreamWatch) -> bool:
    """Whether the stream had an error event."""
    if watch.error is None:
        return False
    record.outcome, record.detail = STREAM_ERROR, watch.error[:_DETAIL_CHARS]
    record.shown_as = ERROR_OBJECT if watch.error_is_object else OTHER_ANSWER
    return True


def _quiet(moments: Sequence[float]) -> tuple[float, float]:
    """The longest stretch between moments that follow each other."""
    return max(pairwise(moments), key=lambda stretch: stretch[1] - stretch[0])


def _take_answer(record: Record, body: bytes) -> str:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict) or not (answer.get("choices") or answer.get("data")):
        record.outcome, record.detail = BAD_BODY, body[:_DETAIL_CHARS].decode("utf-8", "replace")
        record.shown_as = OTHER_ANSWER
        return ""
    _note_usage(record, answer.get("usage") or {})
    record.outcome = OK
    return text_of(answer)


def _note_headers(record: Record, response: aiohttp.ClientResponse) -> None:
    headers = response.headers
    backend = headers.get("x-gateway-backend")
    record.backend = None if backend is None else _written(backend)
    predicted = _number(headers.get("x-gateway-prefix-tokens"))
    record.predicted_tokens = None if predicted is None else round(predicted)
    queue_ms = _number(headers.get("x-gateway-queue-ms"))
    record.queue_seconds = None if queue_ms is None else queue_ms / 1e3


def _written(header: str) -> str:
    """As a file can hold it: aiohttp reads bytes that are not UTF-8 as surrogates."""
    return header.encode("utf-8", "replace").decode()


def _note_usage(record: Record, usage: dict[str, Any]) -> None:
    record.prompt_tokens = _count(usage.get("prompt_tokens"))
    record.completion_tokens = _count(usage.get("completion_tokens"))
    details = usage.get("prompt_tokens_details")
    record.cached_tokens = _count(details.get("cached_tokens")) if isinstance(details, dict) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _refusal(body: bytes) -> tuple[str, str]:
    """What it says, and how it says it."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        answer = None
    message = error_message(answer) if isinstance(answer, dict) else None
    shown_as = ERROR_OBJECT if isinstance(answer, dict) and is_error_object(answer) else OTHER_ANSWER
    return (message or body.decode("utf-8", "replace"))[:_DETAIL_CHARS], shown_as


def _network_outcome(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in _OUT_OF_RESOURCES:
        return CLIENT_LIMIT
    if isinstance(error, aiohttp.ClientConnectorError):
        return CONNECT
    return DISCONNECTED


def _shown(error: Exception) -> str:
    return _written(f"{type(error).__name__}: {error}"[:_DETAIL_CHARS])
