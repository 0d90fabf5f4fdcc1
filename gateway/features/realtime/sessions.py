"""The realtime API: a client's WebSocket, from the upgrade to the tunnel of bytes. One session = one lease.

The model is in the query (`?model=`), or it is the only one of the fleet. Otherwise it is in the client's first event
`session.update`, which the client sends after the event `session.created`. So the gateway accepts such a session
itself, and drops that event of the backend.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol
from urllib.parse import parse_qs

import orjson

from gateway.core.backends.fleet import Fleet
from gateway.core.errors import (
    Draining,
    GatewayError,
    InvalidRequest,
    OriginNotAllowed,
    SessionExpired,
    WebSocketRequired,
    unwrapped,
)
from gateway.core.front.connection import ClientConnection
from gateway.core.front.http_request import HttpRequest
from gateway.core.front.origin import ORIGIN, WebPages
from gateway.core.front.read import RequestReader, permitted, upstream_headers
from gateway.core.front.reply import ClientResponse
from gateway.core.front.routes import Route
from gateway.core.observe.record import Record
from gateway.core.request import Demand, InferenceRequest, Kind, ModelChoice, Sink, Tunnel, UpstreamResult
from gateway.core.routing.prompt_blocks import seed
from gateway.features.realtime.session_events import SessionEvents
from gateway.features.realtime.websocket import (
    GOING_AWAY,
    POLICY,
    SERVER_ERROR,
    FrameScanner,
    accept_of,
    close_frame,
    messages_of,
    text_frame,
)

_KEY = re.compile(rb"[A-Za-z0-9+/]{22}==")
REALTIME: Final = "realtime"
REALTIME_ROUTES = {
    (b"GET", b"/v1/realtime"): Route("realtime", Kind.GENERATE, b"/v1/realtime", source=REALTIME, upgrades=True)
}
_PROTOCOL = b"realtime"  # offered by OpenAI's clients in browsers, with their key
_MAX_MODEL_CHARACTERS = 1024
_FIRST_EVENTS_SECONDS = 10.0
_MAX_FIRST_BYTES = 8192


class ClientTunnel(Tunnel):
    """The client's side of one session. `begun`: the client has bytes of the backend."""

    chunked = False

    def __init__(self, connection: ClientConnection, reply: ClientResponse, incoming: HttpRequest) -> None:
        self.begun = False
        self.is_greeted = False
        self._connection = connection
        self._reply = reply
        self._is_open = False
        self._frames = FrameScanner()
        self._first = bytearray()  # bytes of a greeted client until its model was known
        self._unread = bytearray()  # the end of these bytes, not yet searched for the model
        self._model: asyncio.Future[str | GatewayError] | None = None
        self._spend: Callable[[int, int], None] = _spend_nothing
        self._events: SessionEvents | None = None
        offered = {each.strip() for each in incoming.headers.get(b"sec-websocket-protocol", b"").split(b",")}
        protocol = b"sec-websocket-protocol: realtime\r\n" if _PROTOCOL in offered else b""
        accept = accept_of(incoming.headers[b"sec-websocket-key"])
        self._head = b"upgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-accept: %b\r\n%b" % (accept, protocol)

    @property
    def blocked(self) -> bool:
        return self._reply.blocked

    def greet(self, session_id: str, unix_seconds: int) -> None:
        """Accept the session before its backend is known."""
        self._switch()
        self.is_greeted = True
        created = {"type": "session.created", "id": f"sess-{session_id}", "created": unix_seconds}
        self._send(text_frame(orjson.dumps(created)))

    async def model(self) -> str:
        """The model in the client's first event session.update. Raises InvalidRequest or SessionExpired."""
        self._model = asyncio.get_running_loop().create_future()
        self._connection.open_tunnel(self._look_for_model)
        try:
            async with asyncio.timeout(_FIRST_EVENTS_SECONDS):
                return unwrapped(await self._model)
        except TimeoutError as error:
            raise SessionExpired(
                f"No event session.update with a model within {_FIRST_EVENTS_SECONDS:g} s. The fleet serves several"
                " models: name one there, or in the query (?model=)."
            ) from error

    def _look_for_model(self, data: bytes) -> None:
        self._unread += data[: max(0, _MAX_FIRST_BYTES - len(self._first))]
        self._first += data
        model = self._model
        if model is None or model.done():
            return
        name = _model_in(self._unread)
        if name:
            self.pause_reading()  # until a backend has the session
            model.set_result(name)
        elif len(self._first) > _MAX_FIRST_BYTES:
            model.set_result(InvalidRequest("The client's first events have to be session.update with a model."))

    def open(self, receive: Callable[[bytes], None]) -> None:
        self._switch()
        first, self._first = bytes(self._first), bytearray()
        if first:
            receive(first)
        self._connection.open_tunnel(receive)

    def check(self, events: SessionEvents) -> None:
        """Let these check the client's bytes, from the beginning."""
        self._events = events

    def checked(self, data: bytes) -> bytes:
        return data if self._events is None else self._events.passed(data)

    def pause_reading(self) -> None:
        self._connection.read_more(False)

    def resume_reading(self) -> None:
        self._connection.read_more(True)

    def when_spent(self, spend: Callable[[int, int], None]) -> None:
        """Call this with the tokens of prompt and output that the session has used so far."""
        self._spend = spend

    def spend(self, prompt_tokens: int, completion_tokens: int) -> None:
        self._spend(prompt_tokens, completion_tokens)

    def write(self, data: bytes, framed: bool = False) -> bool:  # noqa: ARG002
        self.begun = True
        return self._send(data)

    def set_backend_headers(self, lines: bytes) -> None:
        self._reply.set_backend_headers(lines)

    def when_writable(self, resume: Callable[[], None] | None) -> None:
        self._reply.when_writable(resume)

    def _switch(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._reply.switch(self._head, partial(_farewell, self._frames))  # not of this: a cycle would keep both

    def _send(self, data: bytes) -> bool:
        self._frames.scan(data)
        return self._reply.write(data)

    # Methods of a sink that sessions do not use.

    def send(self, status: int, content_type: bytes, extra: bytes, body: bytes) -> None: ...

    def begin(self, status: int, content_type: bytes, extra: bytes) -> None: ...

    def comment(self, blank_line: bool = True) -> None: ...

    def end(self) -> None: ...


class SessionDispatcher(Protocol):
    """The dispatcher whose `send` opens sessions."""

    async def dispatch(self, request: InferenceRequest, reply: Sink, record: Record) -> UpstreamResult: ...


class RealtimeSessions:
    """Reads and dispatches the requests that open a session."""

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: SessionDispatcher,
        *,
        new_id: Callable[[], str],
        unix_seconds: Callable[[], float],
        spend: Callable[[Record, int, int], None],
        cors_origins: Sequence[str],
    ) -> None:
        """`spend` gets the tokens that a session has used so far, and may raise QuotaExceeded."""
        self._spend = spend
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._new_id = new_id
        self._unix_seconds = unix_seconds
        self._pages = WebPages(cors_origins)

    def apply(self, cors_origins: Sequence[str]) -> None:
        """Take over the web pages that may connect, in addition to the gateway's own host."""
        self._pages = WebPages(cors_origins)

    async def read(
        self,
        incoming: HttpRequest,
        route: Route,
        connection: ClientConnection,
        reply: ClientResponse,
        reader: RequestReader,
    ) -> InferenceRequest:
        """The request for a session. Raises a GatewayError, also after the client's side is open."""
        headers, key = incoming.headers, incoming.key
        _check_upgrade(incoming)
        if key is None:
            self._check_page(headers)
        tenant, weight, batch, deadline_seconds = reader.scheduling.read(incoming, streams=False)
        tunnel = ClientTunnel(connection, reply, incoming)
        model = _queried_model(incoming.path) or self._fleet.only_model()
        if model is None:
            tunnel.greet(self._new_id(), int(self._unix_seconds()))
            model = await tunnel.model()
        name, resolved = model, partial(_resolved, reader, incoming, route)
        model = resolved(name)
        tunnel.check(SessionEvents(model, resolved))
        client = key.name if key is not None else ""
        session = headers.get(b"x-session-id", b"").decode("latin-1")[:1024]
        return InferenceRequest(
            route.endpoint,
            Kind.GENERATE,
            method=b"GET",
            target=route.target,
            demand=Demand(
                model,
                tenant=tenant,
                weight=weight,
                batch=batch,
                deadline_seconds=deadline_seconds,
                hint=seed(client, session) if session else 0,
            ),
            request_id=reply.request_id,
            headers=upstream_headers(incoming, reply.request_id),
            dispatcher=REALTIME,
            tunnel=tunnel,
            model_choice=ModelChoice(name) if name != model else None,
        )

    async def dispatch(self, request: InferenceRequest, reply: ClientResponse, record: Record) -> UpstreamResult:  # noqa: ARG002
        """Hold the session until it ends. Raises a GatewayError."""
        tunnel = request.tunnel
        assert isinstance(tunnel, ClientTunnel)
        tunnel.when_spent(partial(self._spend, record))
        tunnel.spend(0, 0)
        return await self._dispatcher.dispatch(request, tunnel, record)

    def _check_page(self, headers: Mapping[bytes, bytes]) -> None:
        """Without API keys, refuse pages of other sites: browsers let any page open a WebSocket."""
        origin = headers.get(ORIGIN)
        if origin is None or origin.partition(b"://")[2] == headers.get(b"host"):
            return
        if not self._pages.allow(origin):
            raise OriginNotAllowed("This web page may not connect: its origin is not in server.cors_origins.")


def _farewell(frames: FrameScanner, error: GatewayError) -> bytes:
    """The last frames of a session that the gateway ends: vLLM's event for an error, and a close frame."""
    if not frames.is_between_frames:
        return b""
    event = orjson.dumps({"type": "error", "error": error.message, "code": error.code})
    if isinstance(error, Draining | SessionExpired):
        code = GOING_AWAY
    else:
        code = SERVER_ERROR if error.status >= 500 else POLICY
    return text_frame(event) + close_frame(code, error.message)


def _spend_nothing(prompt_tokens: int, completion_tokens: int) -> None: ...


def _resolved(reader: RequestReader, incoming: HttpRequest, route: Route, name: str) -> str:
    """The model of a client's name. Raises ModelNotAllowed."""
    return reader.model_of(permitted(name, incoming.key), incoming, route.kind, {})


def _check_upgrade(incoming: HttpRequest) -> None:
    """Raises WebSocketRequired or InvalidRequest, if it is no upgrade to a WebSocket."""
    headers = incoming.headers
    if not incoming.upgrades or headers.get(b"upgrade", b"").lower() != b"websocket":
        raise WebSocketRequired("/v1/realtime is a WebSocket: connect with a WebSocket client (ws:// or wss://).")
    if headers.get(b"sec-websocket-version") != b"13":
        raise WebSocketRequired("Unsupported WebSocket version; use 13.")
    if not _KEY.fullmatch(headers.get(b"sec-websocket-key", b"")):
        raise InvalidRequest("The header Sec-WebSocket-Key is missing or invalid.")


def _queried_model(path: bytes) -> str | None:
    """The model in the query, if there is one. Raises InvalidRequest."""
    found = parse_qs(path.partition(b"?")[2].decode("latin-1"), max_num_fields=64).get("model")
    if not found:
        return None
    if len(found[-1]) > _MAX_MODEL_CHARACTERS:
        raise InvalidRequest(f"The model exceeds the limit of {_MAX_MODEL_CHARACTERS} characters.", param="model")
    return found[-1]


def _model_in(unread: bytearray) -> str:
    """The model in the first event that names a model; empty = no event does so far. Read bytes are removed."""
    for message in messages_of(unread):
        try:
            event = orjson.loads(message)
        except orjson.JSONDecodeError:
            continue
        if isinstance(event, dict) and event.get("type") == "session.update":
            model = event.get("model")
            if isinstance(model, str) and model:
                return model
    return ""
