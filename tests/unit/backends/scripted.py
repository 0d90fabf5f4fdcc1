"""A backend that answers the control plane's requests by a test's script."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from aiohttp import web

METRICS = """\
process_start_time_seconds {start}
vllm:num_requests_running{{engine="0",model_name="m"}} 3.0
vllm:num_requests_waiting{{engine="0",model_name="m"}} 1.0
vllm:cache_config_info{{block_size="16",enable_prefix_caching="True",engine="0",kv_cache_size_tokens="4096"}} 1.0
"""

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_answer(document: Any, status: int = 200) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(document, status=status)

    return answer


def text_answer(text: str, status: int = 200) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, status=status)

    return answer


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("never reached")


async def pour(request: web.Request) -> web.StreamResponse:
    """An endless page."""
    response = web.StreamResponse()
    await response.prepare(request)
    line = b'vllm:other_total{engine="0"} 1.0\n' * 2000
    while True:
        await response.write(line)


class Scripted:
    """Serves inside its `async with` block; `answers` may be changed at any time."""

    def __init__(self, port: int = 0, start: float = 1.0, model: str = "m") -> None:
        self.port = port
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.answers: dict[str, Answer] = {
            "/health": text_answer(""),
            "/version": json_answer({"version": "0.32.0"}),
            "/v1/models": json_answer({"data": [{"id": model, "max_model_len": 4096}]}),
            "/metrics": text_answer(METRICS.format(start=start)),
            "/kv_event_sources": json_answer({}),
        }
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        self.headers.append(dict(request.headers))
        return await self.answers.get(request.path, json_answer({"detail": "Not Found"}, 404))(request)

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None
        await self._runner.cleanup()
