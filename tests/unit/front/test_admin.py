from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from gateway.config import Listen
from gateway.errors import ModelNotFound
from gateway.front.admin import admin_app, admin_listening
from gateway.observe.metrics import Metrics


async def no_route(body: bytes, path: str) -> dict[str, Any]:
    raise AssertionError(f"{path} was asked for")


async def test_metrics_and_backends_are_served_on_a_port_of_their_own() -> None:
    registry, metrics = CollectorRegistry(), Metrics()
    registry.register(metrics)
    metrics.attempts.add(("a", "ok"))
    app = admin_app(registry, lambda: [{"name": "a", "state": "up"}], no_route, lambda: {"waiting": 3})
    async with admin_listening(app, Listen(port=0)) as port, aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/metrics") as response:
            assert response.headers["content-type"].startswith("text/plain")
            assert 'gateway_upstream_attempts_total{backend="a",result="ok"} 1.0' in await response.text()
        async with session.get(f"http://127.0.0.1:{port}/admin/backends") as response:
            assert await response.json() == {"backends": [{"name": "a", "state": "up"}]}
        async with session.get(f"http://127.0.0.1:{port}/admin/queue") as response:
            assert await response.json() == {"waiting": 3}
        async with session.get(f"http://127.0.0.1:{port}/v1/models") as response:
            assert response.status == 404


async def test_open_metrics_are_given_to_who_asks_for_them() -> None:
    registry = CollectorRegistry()
    registry.register(Metrics())
    headers = {"accept": "application/openmetrics-text; version=1.0.0"}
    async with (
        admin_listening(admin_app(registry, list, no_route, dict), Listen(port=0)) as port,
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/metrics", headers=headers) as response,
    ):
        assert (await response.text()).endswith("# EOF\n")


async def test_it_can_be_switched_off() -> None:
    async with admin_listening(admin_app(CollectorRegistry(), list, no_route, dict), None) as port:
        assert port is None


@pytest.mark.parametrize(("query", "path"), [("", ""), ("?path=/v1/completions", "/v1/completions")])
async def test_a_dry_run_tells_where_a_body_would_go(query: str, path: str) -> None:
    asked: list[tuple[bytes, str]] = []

    async def route(body: bytes, path: str) -> dict[str, Any]:
        asked.append((body, path))
        return {"chosen": "a"}

    app = admin_app(CollectorRegistry(), list, route, dict)
    async with (
        admin_listening(app, Listen(port=0)) as port,
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{port}/admin/route{query}", data=b"{}") as response,
    ):
        assert (response.status, await response.json()) == (200, {"chosen": "a"})
    assert asked == [(b"{}", path)]


async def test_a_dry_run_of_what_would_be_refused_says_why() -> None:
    async def route(body: bytes, path: str) -> dict[str, Any]:
        raise ModelNotFound("The model 'x' does not exist here.", param="model")

    app = admin_app(CollectorRegistry(), list, route, dict)
    async with (
        admin_listening(app, Listen(port=0)) as port,
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{port}/admin/route", data=b"{}") as response,
    ):
        assert response.status == 404
        assert (await response.json())["error"]["param"] == "model"
