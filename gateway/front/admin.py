"""The admin port: metrics, and what is going on, for operators only. Never on the main port."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from gateway.config import Listen
from gateway.errors import GatewayError
from gateway.front.reply import render

_MAX_BODY_BYTES = 33554432


def admin_app(
    registry: CollectorRegistry,
    backends: Callable[[], list[dict[str, Any]]],
    route: Callable[[bytes, str], Awaitable[dict[str, Any]]],
    queue: Callable[[], dict[str, Any]],
) -> web.Application:
    """The routes of the admin port. `route` makes a dry run of a body and its endpoint; it may raise a GatewayError."""

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return web.Response(body=encode(registry), headers={"content-type": content_type})

    async def show_backends(_: web.Request) -> web.Response:
        return as_json({"backends": backends()})

    async def show_queue(_: web.Request) -> web.Response:
        return as_json(queue())

    async def show_route(request: web.Request) -> web.Response:
        try:
            return as_json(await route(await request.read(), request.query.get("path", "")))
        except GatewayError as error:
            return web.Response(body=render(error), status=error.status, content_type="application/json")

    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/admin/backends", show_backends)
    app.router.add_get("/admin/queue", show_queue)
    app.router.add_post("/admin/route", show_route)
    return app


def as_json(document: Any) -> web.Response:
    """An answer to an operator."""
    return web.Response(body=orjson.dumps(document), content_type="application/json")


@asynccontextmanager
async def admin_listening(app: web.Application, listen: Listen | None) -> AsyncIterator[int | None]:
    """Serve the admin port while the block runs; gives the port, or None if it is switched off."""
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
