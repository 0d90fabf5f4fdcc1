import aiohttp
from prometheus_client import CollectorRegistry

from gateway.config import Listen
from gateway.front.admin import admin_app, admin_listening
from gateway.observe.metrics import Metrics


async def test_metrics_and_backends_are_served_on_a_port_of_their_own() -> None:
    registry, metrics = CollectorRegistry(), Metrics()
    registry.register(metrics)
    metrics.attempts.add(("a", "ok"))
    app = admin_app(registry, lambda: [{"name": "a", "state": "up"}])
    async with admin_listening(app, Listen(port=0)) as port, aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/metrics") as response:
            assert response.headers["content-type"].startswith("text/plain")
            assert 'gateway_upstream_attempts_total{backend="a",result="ok"} 1.0' in await response.text()
        async with session.get(f"http://127.0.0.1:{port}/admin/backends") as response:
            assert await response.json() == {"backends": [{"name": "a", "state": "up"}]}
        async with session.get(f"http://127.0.0.1:{port}/v1/models") as response:
            assert response.status == 404


async def test_open_metrics_are_given_to_who_asks_for_them() -> None:
    registry = CollectorRegistry()
    registry.register(Metrics())
    headers = {"accept": "application/openmetrics-text; version=1.0.0"}
    async with (
        admin_listening(admin_app(registry, list), Listen(port=0)) as port,
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/metrics", headers=headers) as response,
    ):
        assert (await response.text()).endswith("# EOF\n")


async def test_it_can_be_switched_off() -> None:
    async with admin_listening(admin_app(CollectorRegistry(), list), None) as port:
        assert port is None
