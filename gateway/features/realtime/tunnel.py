"""WebSocket sessions: the upgrade on a backend, then bytes in both directions until one side closes.

A session holds its lease from the upgrade to its end. Frames are not changed; they are only followed, to know whether
the backend closed the session or broke it off.
"""

import asyncio
import base64
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

import httptools

from gateway.config import RealtimeConfig
from gateway.core.backends.backend import Backend
from gateway.core.errors import (
    BackendBusy,
    BackendError,
    BackendFault,
    BackendProtocolError,
    BackendRefusesKey,
    EndpointNotOffered,
    FirstByteTimeout,
    FreshConnectionClosed,
    GatewayError,
    SessionExpired,
    StreamInterrupted,
    unwrapped,
)
from gateway.core.relay.relay import Relay
from gateway.core.relay.upstream import read_usage
from gateway.core.request import Demand, InferenceRequest, Sink, Tunnel, UpstreamResult, Usage
from gateway.core.turns import SLICE_BYTES, Intake
from gateway.features.realtime.websocket import FrameScanner, accept_of, first_frame_bytes

_HANDSHAKE_SECONDS = 10.0
_CLOSING_SECONDS = 2.0  # between a backend's close frame and the end of its connection
_MAX_HEAD_BYTES = 16384
_MAX_FIRST_BYTES = 65536  # of the frame with which a backend opens a session
_SWITCHED = 101
_BUFFER_BYTES = 65536
_USAGE, _DELTA = b'"usage"', b'.delta"'  # of events: the field, and the end of the type of output events
_REPORT = re.compile(rb'"usage"\s*:\s*\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}')
_MAX_REPORT_BYTES = 4096
_AUDIO_BYTES_A_TOKEN = 3413  # 80 ms, the step of streaming models: 16 bits at 16 kHz in base64


class SessionUsage:
    """The total tokens of one session: from reports in its backend's events, and an estimate since the last report.

    Reports are found in the passing bytes, regardless of the event's type: generated text has its quotes escaped, and
    engines put an event into one frame. A missed report leaves the estimate.
    """

    def __init__(self, demand: Demand, context_tokens: int | None) -> None:
        self._demand = demand
        self._context_tokens = context_tokens
        self._prompt_tokens = self._completion_tokens = 0  # as reported
        self._audio_bytes = self._events = 0  # since the last report
        self._rest = b""  # of the backend, which may be the beginning of a report

    @property
    def prompt_tokens(self) -> int:
        return self._prompt_tokens + self._audio_bytes // _AUDIO_BYTES_A_TOKEN

    @property
    def completion_tokens(self) -> int:
        return self._completion_tokens + self._events

    def heard(self, size_bytes: int) -> None:
        """Add bytes of the client, nearly all of them audio."""
        self._audio_bytes += size_bytes

    def passed(self, data: bytes) -> None:
        self._events += data.count(_DELTA)
        data = self._rest + data
        at = data.find(_USAGE)
        end = 0
        while at >= 0:
            if (found := _REPORT.match(data, at)) is not None:
                end = found.end()
                self._reported(read_usage(found[0] + b"}"))
            at = data.find(_USAGE, at + 1)
        last = data.rfind(_USAGE, end)
        rest = data[last:] if last >= 0 else data[max(end, len(data) - len(_USAGE)) :]
        self._rest = rest if len(rest) <= _MAX_REPORT_BYTES else b""

    def _reported(self, usage: Usage | None) -> None:
        found = UpstreamResult(200, usage, None)
        found.limit_usage(self._demand, self._context_tokens)
        if found.usage is not None:
            self._prompt_tokens += found.usage.prompt_tokens
            self._completion_tokens += found.usage.completion_tokens
            self._audio_bytes = self._events = 0


class BackendSocket(asyncio.Protocol):
    """The backend's end of one session: the answer to the upgrade, then bytes of frames.

    `failure`: why the gateway ends the session.
    """

    def __init__(self, usage: SessionUsage) -> None:
        self.failure: GatewayError | None = None
        self._usage = usage
        self.handshake: asyncio.Future[int | GatewayError] = asyncio.get_running_loop().create_future()
        self.headers: dict[bytes, bytes] = {}
        self.ended = asyncio.Event()
        self.active_seconds = 0.0
        self.frames = FrameScanner()
        self.transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._intake = Intake()
        self._parser: Any = None  # while there is a transport
        self._head_bytes = 0
        self._early = bytearray()  # frames received before the session is open
        self._swallows = False  # the first frame is still to be dropped
        self._tunnel: Tunnel | None = None
        self._on_tokens: Callable[[int], int] = _no_tokens

    def open(self, tunnel: Tunnel, on_tokens: Callable[[int], int]) -> None:
        """Pass on bytes from now on. `on_tokens` gets the number of the backend's frames."""
        self._tunnel, self._on_tokens = tunnel, on_tokens
        self._swallows = tunnel.is_greeted
        self.active_seconds = self._loop.time()
        tunnel.open(self.send)
        early, self._early = bytes(self._early), bytearray()
        if early:
            self.data_received(early)
        if not tunnel.blocked:
            self._intake.go_on()

    def send(self, data: bytes) -> None:
        self.active_seconds = self._loop.time()
        try:
            data = self._tunnel.checked(data) if self._tunnel is not None else data
        except GatewayError as error:
            self.failure = error.again()
            self.ended.set()
        if self.failure is not None:
            return
        self._usage.heard(len(data))
        self._spend()
        if self.transport is not None:
            self.transport.write(data)

    def abort(self) -> None:
        self._intake.drop()
        if self.transport is not None:
            self.transport.abort()

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        self._intake.begin(self.transport, self.data_received)
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        """The head of the answer, then frames."""
        if len(data) > SLICE_BYTES:
            self._intake.cut(data)
            return
        if self._tunnel is not None:
            self._pass_on(data)
            return
        if self.handshake.done():
            self._early += data
            return
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._early += data[upgrade.args[0] :]
            self._intake.hold()  # until the client's side is open
            self._answered()
        except httptools.HttpParserError as error:
            self._refused(BackendProtocolError(f"The backend's response is not valid HTTP: {error}."))
        if self._head_bytes > _MAX_HEAD_BYTES:
            self._refused(BackendProtocolError("The headers of the backend's response are too large."))

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """The backend closed the connection, or it was aborted here."""
        self._intake.end()
        self.transport = None
        self._refused(FreshConnectionClosed("The backend closed the connection before it answered the upgrade."))
        if self._tunnel is not None:
            self._tunnel.resume_reading()
        self._parser = None
        self.ended.set()

    def pause_writing(self) -> None:
        """Backpressure: the backend reads more slowly than the client sends."""
        if self._tunnel is not None:
            self._tunnel.pause_reading()

    def resume_writing(self) -> None:
        if self._tunnel is not None:
            self._tunnel.resume_reading()

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """A head without an upgrade is a refusal; its body is of no use."""
        if self._parser.get_status_code() != _SWITCHED:
            self._answered()

    def _answered(self) -> None:
        if not self.handshake.done():
            self.handshake.set_result(self._parser.get_status_code())

    def _refused(self, error: BackendError) -> None:
        if not self.handshake.done():
            self.handshake.set_result(error)
            self.abort()

    def _pass_on(self, data: bytes) -> None:
        tunnel = self._tunnel
        assert tunnel is not None
        self.active_seconds = self._loop.time()
        if self._swallows:
            self._early += data
            size = first_frame_bytes(self._early)
            if not size and len(self._early) <= _MAX_FIRST_BYTES:
                return
            data, self._early, self._swallows = bytes(self._early[size:]), bytearray(), False
            if not data:
                return
        before = self.frames.frames
        self.frames.scan(data)
        if tunnel.write(data):
            self._intake.hold()
            tunnel.when_writable(self._intake.go_on)
        if count := self.frames.frames - before:
            self._on_tokens(count)
        self._usage.passed(data)
        self._spend()
        if self.frames.closed:
            self._loop.call_later(_CLOSING_SECONDS, self.ended.set)

    def _spend(self) -> None:
        """Charge the session's usage until now; end it if its API key has no tokens left."""
        tunnel = self._tunnel
        assert tunnel is not None
        try:
            tunnel.spend(self._usage.prompt_tokens, self._usage.completion_tokens)
        except GatewayError as error:
            self.failure = error.again()
            self.ended.set()


class Tunnels:
    """Owner of the WebSocket sessions on backends. `random_key`: 16 random bytes for each handshake."""

    def __init__(
        self, relay: Relay, config: RealtimeConfig, clock: Callable[[], float], *, random_key: Callable[[], bytes]
    ) -> None:
        self._relay = relay
        self._config = config
        self._clock = clock
        self._random_key = random_key
        self._open = 0

    def __repr__(self) -> str:
        return f"<Tunnels {self._open} open>"

    def __len__(self) -> int:
        return self._open

    def apply(self, config: RealtimeConfig) -> None:
        """Take over other limits, also for open sessions."""
        self._config = config

    async def send(
        self,
        request: InferenceRequest,
        backend: Backend,
        sink: Sink,  # noqa: ARG002
        first_token: Callable[[], None],
        on_tokens: Callable[[int], int],
        *,
        rank: int | None = None,  # noqa: ARG002
        fresh: bool = False,  # noqa: ARG002
        last: bool = False,  # noqa: ARG002
    ) -> UpstreamResult:
        """Open the request's session on the backend and pass bytes on until it ends. The signature is that of `Send`.

        Raises a BackendError, SessionExpired or QuotaExceeded. When cancelled, the backend's connection is closed, by
        which it aborts the session.
        """
        tunnel = request.tunnel
        assert tunnel is not None
        usage = SessionUsage(request.demand, backend.context_tokens.get(request.demand.model))
        socket = await self._relay.connect(backend, partial(BackendSocket, usage))
        self._open += 1
        try:
            await self._upgrade(request, backend, socket)
            first_token()
            started = self._clock()
            socket.open(tunnel, on_tokens)
            await self._until_ended(socket, started)
            if socket.failure is not None:
                raise socket.failure.again()
            if not socket.frames.closed:
                raise StreamInterrupted("The backend closed the connection in the middle of the session.")
        except asyncio.CancelledError:
            if not socket.frames.closed:
                raise  # else the client has left after the end of the session
        finally:
            self._open -= 1
            tunnel.when_writable(None)
            socket.abort()
        return UpstreamResult(_SWITCHED, None, None)

    async def _upgrade(self, request: InferenceRequest, backend: Backend, socket: BackendSocket) -> None:
        """Ask for the upgrade. Raises a BackendError if the backend refuses it."""
        key = base64.b64encode(self._random_key())
        assert socket.transport is not None
        socket.transport.write(
            b"GET %b%bconnection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
            b"sec-websocket-key: %b\r\n%b\r\n"
            % (request.target, self._relay.constant_head(backend), key, request.headers)
        )
        try:
            async with asyncio.timeout(_HANDSHAKE_SECONDS):
                status = unwrapped(await socket.handshake)
        except TimeoutError as error:
            message = f"Timeout: the backend did not answer the upgrade within {_HANDSHAKE_SECONDS:g} s."
            raise FirstByteTimeout(message) from error
        if status != _SWITCHED:
            raise _refusal(status)
        if socket.headers.get(b"sec-websocket-accept") != accept_of(key):
            raise BackendProtocolError("The backend's answer to the upgrade is not that of a WebSocket server.")

    async def _until_ended(self, socket: BackendSocket, started: float) -> None:
        """Wait for the end of the session. Raises SessionExpired at a limit."""
        while not socket.ended.is_set():
            config, now = self._config, self._clock()
            idle = socket.active_seconds + config.idle_timeout_seconds - now
            left = started + config.max_session_seconds - now
            if left <= 0:
                raise SessionExpired(f"The session has reached its limit of {config.max_session_seconds:g} s.")
            if idle <= 0:
                raise SessionExpired(f"No data for {config.idle_timeout_seconds:g} s.")
            with suppress(TimeoutError):
                async with asyncio.timeout(min(idle, left)):
                    await socket.ended.wait()


def _no_tokens(tokens: int) -> int:  # noqa: ARG001
    return 0


def _refusal(status: int) -> BackendError:
    """The error for a backend that answered the upgrade with this status."""
    if status == 401:
        return BackendRefusesKey("The backend rejected the gateway's API key: set its api_key in the configuration.")
    if status in (429, 503):
        return BackendBusy(f"The backend returned {status}.")
    if status >= 500:
        return BackendFault(f"The backend returned {status}.")
    return EndpointNotOffered(f"The backend of this model does not offer the realtime API (it answered {status}).")
