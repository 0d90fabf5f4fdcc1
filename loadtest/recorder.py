"""A proxy that keeps requests which can be sent again: `loadtest record --from URL`.

It forwards everything to one server, and writes a line for each answered request with a JSON body. No header is kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, BinaryIO

import aiohttp
import orjson
from aiohttp import web

from loadtest.access import Access
from loadtest.workloads.bodies import MOST_LINE_BYTES, parsed_line

_MOST_SESSIONS = 10_000
_HOP_BY_HOP = (
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization"),
    *("te", "trailer", "transfer-encoding", "upgrade", "host"),
)


@dataclass(frozen=True, slots=True)
class LastAnswer:
    """Where a conversation stands: its number, and when its last answer ended."""

    session: int
    ended_at: float


class Sessions:
    """Finds conversations: a chat whose messages begin with those of an earlier one and an answer continues it.

    Above 10,000, the longest silent ones are forgotten.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, LastAnswer] = OrderedDict()
        self._count = 0

    def turn(self, messages: Sequence[Any], at: float) -> tuple[int, float | None, bytes]:
        """Session, seconds since its last answer (None for a first turn), and the key to report the answer with."""
        digest = hashlib.sha256()
        keys = []
        for message in messages:
            keys.append(digest.digest())
            digest.update(orjson.dumps(message, option=orjson.OPT_SORT_KEYS) + b"\n")
        for place in range(len(messages) - 1, 0, -1):
            message = messages[place]
            if not (isinstance(message, dict) and message.get("role") == "assistant"):
                continue
            if (said := self._known.get(keys[place])) is not None:
                return said.session, max(0.0, at - said.ended_at), digest.digest()
        self._count += 1
        return self._count, None, digest.digest()

    def answered(self, key: bytes, session: int, at: float) -> None:
        self._known[key] = LastAnswer(session, at)
        self._known.move_to_end(key)
        while len(self._known) > _MOST_SESSIONS:
            self._known.popitem(last=False)


@dataclass(slots=True)
class Recorder:
    """Writes lines in the order in which answers end; counts omitted requests by reason."""

    sink: BinaryIO
    clock: Callable[[], float]
    _: KW_ONLY
    recorded: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    _sessions: Sessions = field(default_factory=Sessions)

    def arrived(self, method: str, path: str, body: bytes) -> dict[str, Any] | None:
        """The line of a request; None, and counted, if it cannot be sent again."""
        if method != "POST":
            return None
        try:
            line: dict[str, Any] = {"timestamp": round(self.clock() * 1e3), "url": path, "body": orjson.loads(body)}
            parsed_line(orjson.dumps(line))
        except ValueError:
            self.left_out["of another form or endpoint"] += 1
            return None
        return line

    def answered(self, line: dict[str, Any], arrived_at: float, status: int) -> None:
        if status != 200:
            self.left_out[f"answered with {status}"] += 1
            return
        messages = line["body"].get("messages")
        if isinstance(messages, list):
            session, think, key = self._sessions.turn(messages, arrived_at)
            line["session_id"] = session
            if think is not None:
                line["think_s"] = round(think, 3)
            self._sessions.answered(key, session, self.clock())
        self.sink.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        self.sink.flush()
        self.recorded += 1


class RecordingProxy:
    """The proxy's handler; `session` is for the server, and `url` its base."""

    def __init__(self, url: str, recorder: Recorder, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._recorder = recorder
        self._session = session

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MOST_LINE_BYTES)
        app.router.add_route("*", "/{path:.*}", self.forward)
        return app

    async def forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        arrived_at = self._recorder.clock()
        line = self._recorder.arrived(request.method, request.path, body)
        answer: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method,
                self._url + request.raw_path,
                data=body or None,
                headers=_passed_on(request.headers),
                allow_redirects=False,
            ) as received:
                answer = web.StreamResponse(status=received.status, headers=_passed_on(received.headers))
                await answer.prepare(request)
                async for data in received.content.iter_any():
                    await answer.write(data)
                await answer.write_eof()
                return answer
        except aiohttp.ClientError as error:
            if answer is not None:
                raise  # the client sees its connection break, as this one did
            return _unreachable(self._url, error)
        finally:
            if line is not None:
                self._recorder.answered(line, arrived_at, 502 if answer is None else answer.status)


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP_BY_HOP}


def _unreachable(url: str, error: Exception) -> web.Response:
    message = f"loadtest record cannot reach {url}: {error or type(error).__name__}"
    return web.json_response({"error": {"message": message, "type": "bad_gateway", "code": 502}}, status=502)


async def record_requests(
    url: str, access: Access, host: str, port: int, sink: BinaryIO, on_start: Callable[[str], None]
) -> Recorder:
    """Listens until SIGINT or SIGTERM; `on_start` gets the URL that clients use. Raises OSError."""
    origin = time.monotonic()
    recorder = Recorder(sink, lambda: time.monotonic() - origin)
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    connector = aiohttp.TCPConnector(limit=0, ssl=access.tls())
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("accept", "accept-encoding", "user-agent", "content-type"),
    ) as session:
        runner = web.AppRunner(RecordingProxy(url, recorder, session).app(), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
            on_start(f"http://{host}:{runner.addresses[0][1]}")
            await over.wait()
        finally:
            await runner.cleanup()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
    return recorder
