"""The dashboard's paths on the admin port: its files, the stream, and data that views load when opened.

The files are the same for everyone and need no token; all data does. The policy allows scripts and styles of these
files alone, and connections to this port alone.
"""

from collections.abc import Awaitable, Callable
from hashlib import blake2b
from importlib.resources import files
from traceback import clear_frames
from typing import Any, Final

from aiohttp import web

from gateway.config import Config, ConfigError, masked
from gateway.core.errors import InvalidRequest, RouteNotFound
from gateway.features.operate.admin_http import as_json
from gateway.features.page.broadcast import Broadcast
from gateway.features.page.decisions import ENGINES_PER_SECOND, Decisions
from gateway.features.page.playground import Playground

STATIC: Final = {
    "/": "index.html",
    **{
        f"/dashboard/{name}": name
        for name in (
            *("page.css", "icon.svg", "main.js", "dom.js", "charts.js", "connection.js", "fleet.js", "queue.js"),
            *("requests.js", "saved.js", "timeline.js", "gateway.js", "configuration.js", "playground.js"),
            *("uplot/uPlot.iife.min.js", "uplot/uPlot.min.css"),
        )
    },
}
_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
SECURITY_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class DashboardPages:
    """Serves the dashboard. `config`: in force; `port`: of clients; `preview`: the changes of a reload, which may raise
    ConfigError."""

    def __init__(
        self,
        stream: Broadcast,
        decisions: Decisions,
        config: Callable[[], Config],
        *,
        port: Callable[[], int],
        preview: Callable[[], Awaitable[dict[str, Any]]],
    ) -> None:
        self._stream = stream
        self._decisions = decisions
        self._playground = Playground(lambda: config().server, port)
        self._config = config
        self._preview = preview
        self._files: dict[str, tuple[bytes, str]] = {}  # content and tag, once read

    def routes(self) -> list[web.RouteDef]:
        """Its routes on the admin port."""
        return [
            *(web.get(path, self._file) for path in STATIC),
            web.get("/admin/dashboard/stream", self._streamed),
            web.get("/admin/dashboard/decisions/{request_id}", self._decision),
            web.get("/admin/dashboard/config", self._configuration),
            web.get("/admin/dashboard/reload", self._reload_preview),
            web.post("/admin/dashboard/playground", self._playground.send),
        ]

    async def _file(self, request: web.Request) -> web.Response:
        name = STATIC[request.path]
        if name not in self._files:
            content = files("gateway.features.page").joinpath("static", *name.split("/")).read_bytes()
            self._files[name] = content, f'"{blake2b(content, digest_size=12).hexdigest()}"'
        content, tag = self._files[name]
        headers = SECURITY_HEADERS | {"etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return web.Response(status=304, headers=headers)
        content_type = _TYPES[name.rpartition(".")[2]]
        return web.Response(body=content, headers=headers, content_type=content_type, charset="utf-8")

    async def _streamed(self, request: web.Request) -> web.StreamResponse:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no", "x-content-type-options": "nosniff"}
        with self._stream.watching() as messages:
            response = web.StreamResponse(headers=headers | {"content-type": "text/event-stream"})
            try:
                await response.prepare(request)
                while (message := await messages.get()) is not None:
                    await response.write(message)
                await response.write_eof()
            except ConnectionError as error:  # the page was closed
                clear_frames(error.__traceback__)  # aiohttp keeps the error in a future that its frames hold
            return response

    async def _decision(self, request: web.Request) -> web.Response:
        decision = self._decisions.of(request.match_info["request_id"])
        if decision is None:
            raise RouteNotFound(
                "No decision was recorded for this request: they are recorded while a page is open, for up to"
                f" {ENGINES_PER_SECOND} engines a second, and the last ones are kept."
            )
        return as_json(decision)

    async def _configuration(self, _: web.Request) -> web.Response:
        return as_json(masked(self._config().model_dump(mode="json")))

    async def _reload_preview(self, _: web.Request) -> web.Response:
        try:
            return as_json(await self._preview())
        except ConfigError as error:
            raise InvalidRequest(f"A reload would be refused. {error}") from error
