"""What servers say of themselves, over real sockets."""

from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loadtest.checkpoint.asking import open_asker
from loadtest.checkpoint.document import Role
from loadtest.checkpoint.neighbours import neighbours
from loadtest.checkpoint.serving import cache_labels, look
from loadtest.engine import EngineConfig, SimulatedEngine


@pytest.fixture
async def engine() -> AsyncIterator[SimulatedEngine]:
    """One that tells everything."""
    async with SimulatedEngine(EngineConfig(model="sim", time_scale=0, dev_mode=True), seed=1) as running:
        yield running


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with open_asker(None) as asker:
        yield asker


async def test_an_engine_tells_its_version_models_cache_and_settings(
    engine: SimulatedEngine, session: aiohttp.ClientSession
) -> None:
    found = await look(session, "a", engine.url, driven=False, named=True)
    assert (found.role, found.version, found.unreachable, found.refused) == (Role.ENGINE, "0.33.0", "", "")
    assert [card.id for card in found.models] == ["sim"]
    assert found.cache_config[0]["block_size"] == "16"
    assert found.server_info["vllm_config"]["scheduler_config"]["max_num_seqs"] == 256
    assert found.process is not None, found.process_unknown


async def test_a_server_that_is_gone_or_closed_says_so(session: aiohttp.ClientSession) -> None:
    gone = await look(session, "a", "http://127.0.0.1:1", driven=False, named=True)
    assert "127.0.0.1:1" in gone.unreachable
    async with SimulatedEngine(EngineConfig(model="sim", api_key="k"), seed=1) as closed:
        found = await look(session, "a", closed.url, driven=False, named=True)
    assert (found.refused, found.models) == ("/v1/models answers 401", [])


async def test_labels_are_read_by_rank() -> None:
    page = 'x 1\nvllm:cache_config_info{engine="0",block_size="16"} 1.0\nvllm:cache_config_info{engine="1"} 1.0\n'
    assert cache_labels(page) == [{"block_size": "16", "engine": "0"}, {"engine": "1"}]
    assert cache_labels("") == []


async def test_engines_behind_a_gateway_are_told_by_its_admin_port(engine: SimulatedEngine) -> None:
    shown = {"backends": [{"name": "gpu-1", "url": engine.url, "limit_upper": 4, "in_flight": 3}]}

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "sim"}]})

    async def backends(_: web.Request) -> web.Response:
        return web.json_response(shown)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text="gateway_backend_in_flight 0\n")

    front, admin = web.Application(), web.Application()
    front.router.add_get("/v1/models", models)
    admin.router.add_get("/admin/backends", backends)
    admin.router.add_get("/metrics", metrics)
    async with TestServer(front) as main, TestServer(admin) as port:
        url, admin_url = (str(server.make_url("")).rstrip("/") for server in (main, port))
        found = await neighbours({"": url}, {}, admin_url, None)
        twice = await neighbours({"": url, "direct": engine.url}, {"again": engine.url}, admin_url, None)
    assert set(found.servers) == {"", "gpu-1"}
    assert found.servers[""].backends == [{"name": "gpu-1", "url": engine.url, "limit_upper": 4}]
    assert found.pages_behind("") == {"gpu-1": f"{engine.url}/metrics", "gateway": f"{admin_url}/metrics"}
    assert not found.servers["gpu-1"].named
    assert set(twice.servers) == {"", "direct"}
    assert [(server.name, server.driven) for server in twice.around("direct")] == [("direct", True)]
    assert [(server.name, server.driven) for server in twice.around("")] == [("", True), ("direct", False)]
