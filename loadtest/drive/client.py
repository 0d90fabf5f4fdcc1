"""Sends one request and says what came of it. Refusals, breaks and timeouts are results, never exceptions."""

from __future__ import annotations

import asyncio
import errno
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
from loadtest.drive.sse import StreamWatch, error_message, is_error_object, text_of

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
    """Whether the stream told an error."""
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
