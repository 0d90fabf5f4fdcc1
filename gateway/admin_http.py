"""The ports for operators, admin and metrics: which requests they accept, their bodies, and their answers.

A page in an operator's browser may give its own name the address of such a port (DNS rebinding), and then read what it
answers: the browser takes both for one origin. Such a request has the page's name in its `Host` header, so only
known names are accepted. Addresses and loopback names cannot be taken over like that. A page may also send requests
under the port's own address, whose answers it cannot read; browsers add `Origin` to those that change something. The
port's own page has the port's own origin, and may send what `OWN_PAGE_MAY_SEND` lists. A token, if one is configured,
keeps everyone else out; the files of the page need none.
"""

import asyncio
import hmac
import socket
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.config import AdminConfig, Listen
from gateway.errors import (
    BodyTooLarge,
    Draining,
    GatewayError,
    HostNotAllowed,
    OriginNotAllowed,
    RequestTimeout,
    Unauthorized,
)
from gateway.front.reply import render
from gateway.listeners import bind

MAX_BODY_BYTES = 1048576  # parsed in a few milliseconds
_BODY_SECONDS = 10.0
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
OWN_PAGE_MAY_SEND: Final = ("/admin/route", "/admin/dashboard/playground")


class OperatorPort:
    """A port for operators. `section`: its key in the configuration; None there = disabled."""

    def __init__(self, section: str, listen: Listen | None, open_files: Collection[str] = ()) -> None:
        """`open_files`: paths that need no token, because what they serve is no secret."""
        self._section = section
        self._listen = listen
        self._open_files = open_files
        self._sites: list[web.SockSite] = []

    def follow(self, listen: Listen | None) -> None:
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
        runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await runner.setup()
        try:
            for each in sockets or await bind(self._listen.host, self._listen.port):
                self._sites.append(web.SockSite(runner, each))
                await self._sites[-1].start()
            address = runner.addresses[0]
            yield None if isinstance(address, str) else int(address[1])  # a worker's is a path
        finally:
            await runner.cleanup()

    async def stop_listening(self) -> None:
        """Accept no more connections. Those that are there are closed after their next answer."""
        while self._sites:
            await self._sites.pop().stop()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer errors, and refuse requests under other host names than those of the port, or without its token."""
        try:
            check_sender(request, own_hosts(self._listen), self._section)
            check_token(request, self._listen, self._open_files)
            if not self._sites and request.method not in SAFE_METHODS:
                raise Draining("Another process serves now. Connect again.", retry_after_seconds=1.0)
            answer = await handler(request)
        except GatewayError as error:
            answer = web.Response(body=render(error), status=error.status, content_type="application/json")
            if isinstance(error, Unauthorized):
                answer.headers["www-authenticate"] = "Bearer"
        if not self._sites:
            answer.force_close()
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
    """Raises HostNotAllowed or OriginNotAllowed for what a web page in a browser may have sent."""
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
    """Names that the port is known by, as far as it is configured."""
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
    except web.HTTPRequestEntityTooLarge as error:
        raise BodyTooLarge(f"The body exceeds {MAX_BODY_BYTES} bytes, the limit on the admin port.") from error


def as_json(document: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(document), status=status, content_type="application/json")
