"""Two gateways in front of one engine, with a real Redis or Valkey: the engine never gets more than its cap."""

import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fault.counting_engine import CountingEngine, Load, more, until
from tests.fault.gateway_process import GatewayProcess, gateway_process
from tests.redis_server import RedisServer, redis_server

pytest.importorskip("hiredis")
pytestmark = pytest.mark.timeout(150)
CAP = 6


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
