"""The admin port: metrics and state, for operators only; never on the main port.

A page in an operator's browser may give its own name the address of this port (DNS rebinding), and then read what the
port answers: the browser takes both for one origin. Such a request has the page's name in its `Host` header, so only
known names are accepted. Addresses and loopback names cannot be taken over like that.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from gateway.config import Listen
from gateway.errors import BodyTooLarge, GatewayError, HostNotAllowed, RequestTimeout
from gateway.front.reply import render

_MAX_BODY_BYTES = 1048576  # of a dry run: parsed in a few milliseconds
_BODY_SECONDS = 10.0
_BREATH_SECONDS = 0.001


class Breather:
    """Releases the interpreter lock every millisecond; otherwise the event loop waits 5 ms at every turn."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._since = clock()

    def __call__(self) -> None:
        """Rest, if it has been a while."""
        if self._clock() - self._since >= _BREATH_SECONDS:
            self._sleep(_BREATH_SECONDS)
            self._since = self._clock()


def admin_app(
    snapshot: Callable[[Breather], Collector],
    backends: Callable[[], list[dict[str, Any]]],
    route: Callable[[bytes, str], Awaitable[dict[str, Any]]],
    queue: Callable[[], Awaitable[dict[str, Any]]],
    hosts: Collection[str] = (),
) -> web.Application:
    """The routes of the admin port. `route` makes a dry run of a body and its endpoint; it may raise a GatewayError.

    `snapshot` copies the current metrics; they are rendered in a thread, which may take seconds with many models.
    `hosts`: the accepted host names.
    """
    one_at_a_time = asyncio.Lock()

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        async with one_at_a_time:
            body = await asyncio.to_thread(encode, snapshot(Breather()))
        return web.Response(body=body, headers={"content-type": content_type})

    async def show_backends(_: web.Request) -> web.Response:
        return as_json({"backends": backends()})

    async def show_queue(_: web.Request) -> web.Response:
        return as_json(await queue())

    async def show_route(request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                body = await request.read()
        except TimeoutError as error:
            raise RequestTimeout(f"Timeout: the request body did not arrive within {_BODY_SECONDS:g} s.") from error
        except web.HTTPRequestEntityTooLarge as error:
            raise BodyTooLarge(f"The body exceeds {_MAX_BODY_BYTES} bytes, the limit for a dry run.") from error
        return as_json(await route(body, request.query.get("path", "")))

    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_guarded(frozenset(hosts))])
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/admin/backends", show_backends)
    app.router.add_get("/admin/queue", show_queue)
    app.router.add_post("/admin/route", show_route)
    return app


def _guarded(names: Collection[str]) -> Middleware:
    """Answers errors, and refuses requests under other host names than these."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            for host in request.headers.getall("host", ()):
                if not is_own_host(host, names):
                    raise HostNotAllowed(
                        f"The host {host[:256]!r} is not allowed on the admin port. Use an IP address, or add the name"
                        " to server.admin.allowed_hosts."
                    )
            return await handler(request)
        except GatewayError as error:
            return web.Response(body=render(error), status=error.status, content_type="application/json")

    return guard


def own_hosts(listen: Listen | None) -> frozenset[str]:
    """Names that the port is known by, as far as it is configured."""
    return frozenset() if listen is None else frozenset((listen.host.lower(), *listen.allowed_hosts)) - {""}


def as_json(document: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(document), status=status, content_type="application/json")


@asynccontextmanager
async def admin_listening(app: web.Application, listen: Listen | None) -> AsyncIterator[int | None]:
    """Serve the admin port while the block runs; yields the port, or None if it is disabled."""
    if listen is None:
        yield None
        return
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    try:
        site = web.TCPSite(runner, listen.host, listen.port)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


def add_prefix_routes(
    app: web.Application, prepare: Callable[[float | None], Callable[[Breather], dict[str, Any]]] | None
) -> None:
    """Serve the prefix report. `prepare` runs on the event loop and copies the samples of these last seconds (None =
    all); the function that it returns makes the report in a thread. Without `prepare` the report is disabled: 404.
    """
    one_at_a_time = asyncio.Lock()

    async def show(request: web.Request) -> web.Response:
        if prepare is None:
            return as_json({"error": "The prefix report is disabled: set prefix_report.enabled to true."}, 404)
        try:
            minutes = float(request.query.get("minutes", "0"))
        except ValueError:
            minutes = -1.0
        if not 0 <= minutes < 1e6:
            return as_json({"error": "The parameter minutes must be a number of at least 0."}, 400)
        async with one_at_a_time:
            document = await asyncio.to_thread(prepare(minutes * 60 or None), Breather())
        return as_json(document)

    app.router.add_get("/admin/prefixes", show)


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
