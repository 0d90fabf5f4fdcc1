"""An engine that counts what it has in flight, and clients that keep a gateway busy."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.clients import Client, EndOfConnection, request
from tests.fault.gateway_process import GatewayProcess

CLIENTS = 8  # of each gateway
_DEADLINE_SECONDS = 40.0
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}'
ANSWER = {
    "id": "1", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
}  # fmt: skip


class CountingEngine:
    """An engine that counts what it has in flight; a request whose connection closes is aborted. `answer_seconds`: how
    long it takes to answer."""

    def __init__(self, answer_seconds: float = 0.3) -> None:
        self.url = ""
        self._answer_seconds = answer_seconds
        self.in_flight = self.peak = self.answered = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator["CountingEngine"]:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def _chat(self, request: web.Request) -> web.Response:
        await request.read()
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            await asyncio.sleep(self._answer_seconds)
            self.answered += 1
            return web.json_response(ANSWER)
        finally:
            self.in_flight -= 1


class Load:
    """Clients that ask one gateway again and again. `failed`: statuses other than 200; `cut`: connections that ended
    before their answer."""

    def __init__(self, gateway: GatewayProcess, clients: int = CLIENTS) -> None:
        self._gateway = gateway
        self.answered = self.cut = 0
        self.failed: list[Any] = []
        self._is_ending = False
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(clients)]

    async def _ask(self) -> None:
        while not self._is_ending:
            try:
                async with await Client.connect(self._gateway.port) as client:
                    await client.send(request(BODY, target=b"/v1/chat/completions"))
                    answer = await client.answer()
            except (EndOfConnection, ConnectionError):
                self.cut += 1
                await asyncio.sleep(0.05)
                continue
            if answer.status == 200:
                self.answered += 1
            else:
                self.failed.append((answer.status, answer.body[:200]))

    async def finish(self) -> None:
        """End with the answers that are on their way: the engine sees no client leave."""
        self._is_ending = True
        async with asyncio.timeout(_DEADLINE_SECONDS):
            await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def until(true: Callable[[], Awaitable[bool]], what: str, seconds: float = _DEADLINE_SECONDS) -> float:
    """Wait for it; how long that took."""
    began = time.monotonic()
    while not await true():
        assert time.monotonic() - began < seconds, what
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def more(load: Load, count: int = 12) -> None:
    before = load.answered

    async def came() -> bool:
        return load.answered >= before + count

    await until(came, f"{count} more answers; failed: {load.failed[:3]}")
