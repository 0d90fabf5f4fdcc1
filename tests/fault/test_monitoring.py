"""Every expression of the alerts and of the dashboard, asked of a Prometheus that watched a gateway under faults."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.clients import chat
from tests.fault.rig import UnderTest, holds, running
from tests.prometheus import Prometheus, alerts, expressions, graphs, prometheus
from tests.scripted import ScriptedBackend
from tests.scripts import chunk, event, last_chunk, raw, reset, stream, tokens, until, whole

STREAM = chat(stream=True)
PAGE = (
    b'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_waiting{engine="0"} 0\n'
    b'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
    b'vllm:cache_config_info{engine="0",kv_cache_size_tokens="100000"} 1\n'
)
SECTIONS = {
    "server": {"admin": {"port": 0}},
    "admission": {"max_queued_requests": 2, "adaptive": False},
    "upstream": {"retry_budget_min": 100},
}
PROVOKED = {"BackendDown", "RequestsFail", "RequestsRefused", "RequestsQueue", "AttemptsFail"}
WITHOUT_SERIES = {"Adaptive limits"}  # no limit was changed
WATCHED_SECONDS = 20.0


async def scraped(watching: Prometheus, times: int = 2) -> None:
    """Wait until the gateway was scraped that often."""
    seen = await watching.scrapes()
    async with asyncio.timeout(WATCHED_SECONDS):
        while await watching.scrapes() < seen + times:
            await asyncio.sleep(0.05)


async def shows(watching: Prometheus, expression: str) -> None:
    """Wait until the expression has series: those of a scrape that was too late are none."""
    async with asyncio.timeout(WATCHED_SECONDS):
        while not await watching.query(expression):
            await asyncio.sleep(0.05)


@asynccontextmanager
async def crowd(under_test: UnderTest, *backends: ScriptedBackend) -> AsyncIterator[None]:
    """Four streams run, two wait, and two are refused, while the block runs."""
    go = asyncio.Event()
    for backend in backends:
        backend.plays(*tokens(1), until(go), chunk(event("", "stop")), chunk(b"data: [DONE]\n\n"), last_chunk())
    tasks = [asyncio.create_task(under_test.ask(STREAM)) for _ in range(8)]
    await holds(lambda: sum(task.done() for task in tasks) == 2, "two are refused")
    try:
        yield
    finally:
        go.set()
        statuses = [one.status for one in await asyncio.gather(*tasks)]
        assert sorted(statuses) == [200] * 6 + [429] * 2


async def one_round(under_test: UnderTest, watching: Prometheus, *backends: ScriptedBackend) -> None:
    """Streams that succeed, one that breaks off, attempts that are refused, and a crowd; scraped in between."""
    for backend in backends:
        backend.plays(*stream(3, 0.01))
    for _ in range(6):
        assert (await under_test.ask(STREAM)).is_done
    for backend in backends:
        backend.plays_once(*tokens(2), reset())
    assert not (await under_test.ask(STREAM)).is_done
    for backend in backends:
        backend._once.clear()
        backend.plays(raw(whole(503, b'{"error":{"message":"busy"}}')))
    assert (await under_test.ask(STREAM)).status == 503
    async with crowd(under_test, *backends):
        await shows(watching, alerts()["RequestsQueue"])


@pytest.mark.timeout(240)
async def test_every_expression_has_series_where_it_should(
    backend: ScriptedBackend, other: ScriptedBackend, tmp_path: Path
) -> None:
    for each in (backend, other):
        each.control[b"/metrics"] = raw(whole(200, PAGE, kind=b"text/plain"))
    gone = ScriptedBackend(port=9)
    engines = (backend, other)
    async with running(*engines, gone, sections=SECTIONS, per_backend={"max_in_flight": 2}, wait=False) as under_test:
        await holds(lambda: [under_test.state(each) for each in engines] == ["up", "up"], "two of three are up")
        assert under_test.admin_port is not None
        async with prometheus(tmp_path, under_test.admin_port) as watching:
            await scraped(watching)
            for _ in range(3):
                await one_round(under_test, watching, *engines)
            await scraped(watching)
            found = {name: await watching.query(expression) for name, expression in alerts().items()}
            assert {name for name in PROVOKED - {"RequestsQueue"} if not found[name]} == set()
            assert found["GatewayDown"] == found["NoBackendServes"] == found["BackgroundErrors"] == []
            assert [one["metric"]["backend"] for one in found["BackendDown"]] == ["127.0.0.1:9"]
            rules = (await watching.get("rules"))["groups"][0]["rules"]
            assert [rule["name"] for rule in rules if rule["health"] == "err"] == []
            asked = [(graph["title"], expression) for graph in graphs() for expression in expressions(graph)]
            assert {title for title, each in asked if not await watching.query(each)} == WITHOUT_SERIES


@pytest.mark.timeout(240)
async def test_a_gateway_without_backends_and_one_that_is_gone_are_noticed(tmp_path: Path) -> None:
    async with running(ScriptedBackend(port=9), sections=SECTIONS, wait=False) as under_test:
        assert under_test.admin_port is not None
        async with prometheus(tmp_path, under_test.admin_port) as watching:
            await shows(watching, alerts()["NoBackendServes"])
            assert not await watching.query(alerts()["GatewayDown"])
            under_test.gateway.operators.admin_port.acceptor.pause()
            await shows(watching, alerts()["GatewayDown"])
