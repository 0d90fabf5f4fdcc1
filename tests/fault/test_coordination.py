"""Two gateways in front of one engine, with a real Redis or Valkey: the engine never gets more than its cap."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.clients import Client, request
from tests.fault.gateway_process import GatewayProcess, gateway_process
from tests.redis_server import RedisServer, redis_server

pytest.importorskip("hiredis")
pytestmark = pytest.mark.timeout(150)
CAP = 6
CLIENTS = 8  # of each gateway
_DEADLINE_SECONDS = 40.0
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}'
ANSWER = {
    "id": "1", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
}  # fmt: skip


class CountingEngine:
    """An engine that counts what it has in flight; a request whose connection closes is aborted."""

    def __init__(self) -> None:
        self.url = ""
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
            await asyncio.sleep(0.3)
            self.answered += 1
            return web.json_response(ANSWER)
        finally:
            self.in_flight -= 1


class Load:
    """Clients that ask one gateway again and again. `failed`: statuses other than 200."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self._gateway = gateway
        self.answered = 0
        self.failed: list[Any] = []
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(CLIENTS)]

    async def _ask(self) -> None:
        while True:
            async with await Client.connect(self._gateway.port) as client:
                await client.send(request(BODY, target=b"/v1/chat/completions"))
                answer = await client.answer()
                if answer.status == 200:
                    self.answered += 1
                else:
                    self.failed.append((answer.status, answer.body[:200]))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def until(true: Callable[[], Awaitable[bool]], what: str) -> float:
    """Wait for it; how long that took."""
    began = time.monotonic()
    while not await true():
        assert time.monotonic() - began < _DEADLINE_SECONDS, what
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def more(load: Load, count: int = 12) -> None:
    before = load.answered

    async def came() -> bool:
        return load.answered >= before + count

    await until(came, f"{count} more answers; failed: {load.failed[:3]}")


def metric_is(gateway: GatewayProcess, name: str, value: float) -> Callable[[], Awaitable[bool]]:
    async def is_so() -> bool:
        return await gateway.metric(name) == value

    return is_so


@asynccontextmanager
async def two_gateways(
    folder: Path, server: RedisServer, engine: CountingEngine
) -> AsyncIterator[tuple[list[GatewayProcess], list[Load]]]:
    sections = {
        "coordination": {"url": server.url},
        "health": {"slow_start_seconds": 0, "probe_interval_seconds": 0.3},
        "admission": {"adaptive": False},
    }
    async with AsyncExitStack() as stack:
        gateways = []
        for name in "ab":
            (folder / name).mkdir()
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            backend: Any = engine
            own = {**sections, "backends": [{"url": engine.url, "max_in_flight": CAP}]}
            process = gateway_process(folder / name, backend, stderr=log, sections=own)
            gateways.append(await stack.enter_async_context(process))
        for gateway in gateways:
            await until(metric_is(gateway, "gateway_replicas", 2), "they know of each other")
        loads = [Load(gateway) for gateway in gateways]
        try:
            for load in loads:
                await more(load)
            yield gateways, loads
        finally:
            for load in loads:
                await load.stop()


async def test_the_slots_of_a_gateway_that_is_killed_are_used_again_and_nothing_else_fails(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        async with CountingEngine().running() as engine, two_gateways(tmp_path, server, engine) as (gateways, loads):
            assert 1 < await gateways[1].metric("gateway_backend_in_flight") < CAP
            await loads[0].stop()
            gateways[0].process.kill()
            took = await until(metric_is(gateways[1], "gateway_backend_in_flight", CAP), "the whole engine is used")
            (tmp_path / "took").write_text(f"{took:.1f}")  # for whoever wants to know
            assert (engine.peak, loads[1].failed) == (CAP, [])
            await until(metric_is(gateways[1], "gateway_replicas", 1), "it is alone")


@pytest.mark.parametrize("keeps", [False, True])
async def test_while_redis_is_gone_requests_go_on_and_no_cap_is_exceeded(tmp_path: Path, keeps: bool) -> None:
    with redis_server(tmp_path, keeps=keeps) as server:
        async with CountingEngine().running() as engine, two_gateways(tmp_path, server, engine) as (gateways, loads):
            server.stop()
            for gateway, load in zip(gateways, loads, strict=True):
                await until(metric_is(gateway, "gateway_coordination_up", 0), "the blocks lapse")
                await more(load)
            server.start()
            for gateway, load in zip(gateways, loads, strict=True):
                await until(metric_is(gateway, "gateway_coordination_up", 1), "they are renewed")
                await until(metric_is(gateway, "gateway_replicas", 2), "they know of each other")
                await more(load, 60)
            assert (engine.peak, loads[0].failed, loads[1].failed) == (CAP, [], [])
        assert b"coordination_lost" in (tmp_path / "a.log").read_bytes()
        assert b"coordination_restored" in (tmp_path / "a.log").read_bytes()


async def test_a_gateway_that_is_paused_exceeds_nothing_when_it_goes_on(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        async with CountingEngine().running() as engine, two_gateways(tmp_path, server, engine) as (gateways, loads):
            gateways[0].process.send_signal(signal.SIGSTOP)
            try:
                await until(metric_is(gateways[1], "gateway_silent_replicas", 1), "its silence is noticed")
                await more(loads[1], 30)
            finally:
                gateways[0].process.send_signal(signal.SIGCONT)
            await until(metric_is(gateways[1], "gateway_silent_replicas", 0), "it is back")
            for load in loads:
                await more(load, 30)
            assert (engine.peak, loads[0].failed, loads[1].failed) == (CAP, [], [])


async def test_redis_that_hangs_delays_no_request(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        async with CountingEngine().running() as engine, two_gateways(tmp_path, server, engine) as (gateways, loads):
            server.signal(signal.SIGSTOP)
            for gateway, load in zip(gateways, loads, strict=True):
                await until(metric_is(gateway, "gateway_coordination_up", 0), "the blocks lapse")
                await more(load)
            server.signal(signal.SIGCONT)
            for gateway, load in zip(gateways, loads, strict=True):
                await until(metric_is(gateway, "gateway_coordination_up", 1), "they are renewed")
                await more(load, 30)
            assert (engine.peak, loads[0].failed, loads[1].failed) == (CAP, [], [])
