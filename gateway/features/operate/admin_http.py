"""The admin and metrics ports: checks of requests, their bodies, and their answers.

A page in an operator's browser may give its own name the address of such a port (DNS rebinding), and then read its
answers: for the browser both are one origin. Such a request has the page's name in its `Host` header, so only known
names are accepted. Addresses and loopback names cannot be taken over like that. A page may also send requests under the
port's own address, whose answers it cannot read; browsers add `Origin` to requests that change something. The port's
own page has the port's own origin, and may send the requests in `OWN_PAGE_MAY_SEND`. A token, if one is configured,
keeps everyone else out; the files of the page need none.

Connections are bounded here for every path: their number, the time for a head to arrive, and the time that an answer
may stay unread.
"""

import asyncio
import hmac
import socket
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, Final, cast
from urllib.parse import urlsplit

import orjson
import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from gateway.config import AdminConfig, Listen
from gateway.core.errors import (
    BodyTooLarge,
    Draining,
    GatewayError,
    HostNotAllowed,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    OriginNotAllowed,
    RequestTimeout,
    RouteNotFound,
    Unauthorized,
)
from gateway.core.front.reply import render
from gateway.core.listeners import Acceptor, bind
from gateway.core.resources import operator_connections
from gateway.core.supervisor import LogThrottle, running

MAX_BODY_BYTES = 1048576  # parsed in a few milliseconds
_BODY_SECONDS = 10.0
_HEAD_SECONDS: Final = 10.0  # from the start of a connection, or from the first byte of its next request
_IDLE_SECONDS: Final = 75.0
_SHUTDOWN_SECONDS: Final = 60.0
_UNREAD_SECONDS: Final = 20.0  # in which the client must have read all output, at least once
_LINGER_SECONDS: Final = 2.0  # for the rest of a body that was not needed
_LOOK_SECONDS: Final = 1.0
_MOST_SHOWN: Final = 200  # of a path, in an error
_CLIENTS_FAULT: Final = (ConnectionError, HttpProcessingError, web.RequestPayloadError)  # it left, or sends no HTTP
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
OWN_PAGE_MAY_SEND: Final = ("/admin/route", "/admin/dashboard/playground")


class OperatorPort:
    """A port for operators. `section`: its key in the configuration; None there = disabled."""

    def __init__(self, section: str, listen: Listen | None, open_files: Collection[str] = ()) -> None:
        """`open_files`: paths that need no token, because their content is public."""
        self._section = section
        self._listen = listen
        self._open_files = open_files
        self._server: OperatorServer | None = None  # while it listens

    def apply(self, listen: Listen | None) -> None:
        """Take over the names that the port is known by, and its token; where it listens stays."""
        self._listen = listen

    @asynccontextmanager
    async def listening(
        self, routes: Sequence[web.RouteDef], sockets: Sequence[socket.socket] = ()
    ) -> AsyncIterator[int | None]:
        """Serve at these bound sockets while the block runs; yields the port, or None if it is disabled."""
        if self._listen is None:
            yield None
            return
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.router.add_routes(routes)
        server = self._server = OperatorServer(app, sockets or await bind(self._listen.host, self._listen.port))
        async with server.serving() as port:
            yield port

    @property
    def acceptor(self) -> Acceptor | None:
        """None = the port is disabled. While it does not accept, connections are closed after their next answer."""
        return None if self._server is None else self._server.acceptor

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer errors, and refuse requests with an unknown host name or without the port's token."""
        try:
            check_sender(request, own_hosts(self._listen), self._section)
            check_token(request, self._listen, self._open_files)
            if not self._is_listening and request.method not in SAFE_METHODS:
                raise Draining("Another process serves now. Connect again.", retry_after_seconds=1.0)
            answer = await handler(request)
        except GatewayError as error:
            answer = as_answer(error)
        if not self._is_listening:
            answer.force_close()
        return answer

    @property
    def _is_listening(self) -> bool:
        return self.acceptor is not None and self.acceptor.is_accepting


class OperatorServer:
    """Serves an application at bound sockets, which become its own, to a bounded number of connections."""

    def __init__(
        self, app: web.Application, sockets: Iterable[socket.socket], shutdown_seconds: float = _SHUTDOWN_SECONDS
    ) -> None:
        """`shutdown_seconds`: for answers that are not complete at the end of `serving`."""
        app.middlewares.insert(0, _timed)
        self._runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=shutdown_seconds)
        self.acceptor = Acceptor([*sockets], self._connection)
        self._most_connections = operator_connections()
        self.open: set[OperatorConnection] = set()
        self.throttle = LogThrottle(asyncio.get_running_loop().time)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[int | None]:
        """Accept connections while the block runs; yields the port, or None if it is a worker's, which has a path."""
        try:
            await self._runner.setup()
            async with running(self._watch()):
                await self.acceptor.accept()
                address = self.acceptor.address
                yield None if isinstance(address, str) else int(address[1])
        finally:
            self.acceptor.stop()
            await self._runner.cleanup()

    def _connection(self, _: int) -> "OperatorConnection":
        assert self._runner.server is not None
        return OperatorConnection(self, self._runner.server)

    def connected(self, connection: "OperatorConnection") -> bool:
        """Whether there is a place for one more."""
        if len(self.open) >= self._most_connections:
            return False
        self.open.add(connection)
        return True

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for connection in [*self.open]:
                connection.look(loop.time())


class OperatorConnection(web.RequestHandler):
    """One connection of aiohttp's server, with deadlines; its errors have the shape of all errors of the port."""

    __slots__ = ("_head_since", "_is_answering", "_operators", "_socket", "_unread_since")

    def __init__(self, operators: OperatorServer, manager: web.Server) -> None:
        loop = asyncio.get_running_loop()
        seconds = {"keepalive_timeout": _IDLE_SECONDS, "lingering_time": _LINGER_SECONDS}
        super().__init__(manager, loop=loop, access_log=None, **seconds)  # type: ignore[arg-type]
        self._operators = operators
        self._socket: asyncio.Transport
        self._is_answering = False
        self._head_since: float | None = loop.time()  # None = none is expected yet
        self._unread_since: float | None = None  # None = the client has taken everything

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast(asyncio.Transport, transport)
        if self._operators.connected(self):
            super().connection_made(transport)
        else:
            self._socket.abort()

    def connection_lost(self, _: BaseException | None) -> None:
        self._operators.open.discard(self)
        super().connection_lost(None)  # a waiting frame would keep an error, with all the error's frames

    def data_received(self, data: bytes) -> None:
        if self._head_since is None and not self._is_answering:
            self._head_since = self._loop.time()
        super().data_received(data)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """No head is expected while the block runs."""
        self._is_answering, self._head_since = True, None
        try:
            yield
        finally:
            self._is_answering = False

    def look(self, now: float) -> None:
        """Close the connection if its client has been too slow."""
        if not self._socket.get_write_buffer_size():
            self._unread_since = None
        elif self._unread_since is None:
            self._unread_since = now
        deadlines = ((self._head_since, _HEAD_SECONDS), (self._unread_since, _UNREAD_SECONDS))
        if any(since is not None and now - since > most_seconds for since, most_seconds in deadlines):
            self._socket.abort()

    async def finish_response(self, request: Any, resp: web.StreamResponse, start_time: float | None) -> Any:
        """Errors of aiohttp get the shape of the others."""
        if isinstance(resp, web.HTTPException):
            resp = _as_error(request, resp)
        return await super().finish_response(request, resp, start_time)

    def handle_error(self, request: Any, _: int = 500, exc: Any = None, *__: Any) -> web.StreamResponse:
        """The answer to malformed HTTP, or to a request with a failed handler."""
        if isinstance(exc, _CLIENTS_FAULT):
            error: GatewayError = InvalidRequest("Malformed HTTP.")
        else:
            self.log_exception(exc_info=exc)
            error = InternalError("The gateway failed to answer this request. Its reasons are in the gateway's log.")
        if request.writer.output_size:  # a part of another answer
            raise ConnectionError from exc
        answer = as_answer(error)
        answer.force_close()
        return answer

    def log_exception(self, *_: Any, exc_info: Any = None, **__: Any) -> None:
        """Log a defect, a line a minute for each kind; client errors are not logged."""
        if not isinstance(exc_info, _CLIENTS_FAULT) and self._operators.throttle.allows(repr(type(exc_info))):
            structlog.get_logger("gateway").error("operator_request_failed", exc_info=exc_info)


@web.middleware
async def _timed(request: web.Request, handler: Handler) -> web.StreamResponse:
    connection = request.protocol
    assert isinstance(connection, OperatorConnection)
    with connection.answering():
        return await handler(request)


def as_answer(error: GatewayError) -> web.Response:
    """An error as the port answers it."""
    answer = web.Response(body=render(error), status=error.status, content_type="application/json")
    if isinstance(error, Unauthorized):
        answer.headers["www-authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        answer.headers["allow"] = error.allow
    return answer


def _as_error(request: web.BaseRequest, refusal: web.HTTPException) -> web.Response:
    shown = f"{request.method} {request.path[:_MOST_SHOWN]}"
    if isinstance(refusal, web.HTTPMethodNotAllowed):
        allow = ", ".join(sorted(refusal.allowed_methods))
        return as_answer(MethodNotAllowed(f"The method of {shown} is not allowed; use {allow}.", allow=allow))
    if refusal.status == HTTPStatus.NOT_FOUND:
        return as_answer(RouteNotFound(f"Unknown request URL: {shown}."))
    answer = as_answer(InvalidRequest(f"{refusal.reason}: {shown}."))
    answer.set_status(refusal.status)
    return answer


def check_token(request: web.Request, listen: Listen | None, open_files: Collection[str] = ()) -> None:
    """Raises Unauthorized without the token of the admin port, where its path needs one."""
    if not isinstance(listen, AdminConfig) or not listen.token:
        return
    if request.path in listen.open_paths or request.path in open_files:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    given_bytes = given.strip().encode("utf-8", "surrogateescape")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given_bytes, listen.token.encode()):
        raise Unauthorized(
            "The admin port needs its token (server.admin.token): send it as `Authorization: Bearer ...`; the commands"
            " of `gateway` read it from GATEWAY_ADMIN_TOKEN."
        )


def check_sender(request: web.Request, names: Collection[str], section: str) -> None:
    """Raises HostNotAllowed or OriginNotAllowed for a request that may come from a foreign web page."""
    for host in request.headers.getall("host", ()):
        if not is_own_host(host, names):
            raise HostNotAllowed(
                f"The host {host[:256]!r} is not allowed on this port. Use an IP address, or add the name to"
                f" {section}.allowed_hosts."
            )
    if request.method not in SAFE_METHODS and "origin" in request.headers and not is_own_page(request):
        raise OriginNotAllowed("Requests from web pages are not allowed on the admin port.")


def is_own_page(request: web.Request) -> bool:
    """Whether this port's own page sends this, and may. A proxy before the port may use another scheme than the port.

    The `Host` header has been checked before, so no other page has its name.
    """
    hosts, origins = request.headers.getall("host", []), request.headers.getall("origin", [])
    if request.path not in OWN_PAGE_MAY_SEND or len(hosts) != 1 or len(origins) != 1:
        return False
    try:
        origin = urlsplit(origins[0])
    except ValueError:
        return False
    return origin.scheme in ("http", "https") and origin.netloc.lower() == hosts[0].strip().lower()


def own_hosts(listen: Listen | None) -> frozenset[str]:
    """The known host names of the port, from the configuration."""
    return frozenset() if listen is None else frozenset((listen.host.lower(), *listen.allowed_hosts)) - {""}


def is_own_host(header: str, names: Collection[str]) -> bool:
    """Whether a header is an IP address, a loopback name, or one of these names, with any port."""
    host = header.strip().lower()
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif (parts := host.partition(":"))[2].isdigit() or not parts[2]:
        host = parts[0]
    host = host.removesuffix(".")
    if host == "localhost" or host.endswith(".localhost") or host in names:
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


async def body_of(request: web.Request) -> bytes:
    """The body of a request. Raises RequestTimeout or BodyTooLarge."""
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            return await request.read()
    except TimeoutError as error:
        raise RequestTimeout(f"Timeout: the request body did not arrive within {_BODY_SECONDS:g} s.") from error
    except web.RequestPayloadError as error:
        raise InvalidRequest("Malformed HTTP: the framing of the body is invalid.") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise BodyTooLarge(f"The body exceeds {MAX_BODY_BYTES} bytes, the limit on the admin port.") from error


def as_json(document: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(document), status=status, content_type="application/json")
