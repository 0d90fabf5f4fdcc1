"""What servers say of themselves, over real sockets."""

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loadtest.access import Access
from loadtest.checkpoint.document import Role
from loadtest.checkpoint.questions import open_asker
from loadtest.checkpoint.servers import cache_labels, gateway_configuration, look, neighbours
from loadtest.engine import EngineConfig, SimulatedEngine

_FILE = """
backends:
  - {url: "http://a:8000", name: a, api_key: "${BACKEND_KEY}"}
auth: {keys: [{name: team, key: "${TEAM_KEY:-t0p}"}], cache_salt_secret: salty}
"""


@pytest.fixture
async def engine() -> AsyncIterator[SimulatedEngine]:
    """A server that reports everything."""
    async with SimulatedEngine(EngineConfig(model="sim", time_scale=0, dev_mode=True), seed=1) as running:
        yield running


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with open_asker(Access()) as asker:
        yield asker


async def test_an_engine_reports_its_version_models_cache_and_settings(
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


async def test_engines_behind_a_gateway_are_reported_by_its_admin_port(engine: SimulatedEngine) -> None:
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
        found = await neighbours({"": url}, {}, admin_url, Access())
        twice = await neighbours({"": url, "direct": engine.url}, {"again": engine.url}, admin_url, Access())
    assert set(found.servers) == {"", "gpu-1"}
    assert found.servers[""].backends == [{"name": "gpu-1", "url": engine.url, "limit_upper": 4}]
    assert found.pages_behind("") == {"gpu-1": f"{engine.url}/metrics", "gateway": f"{admin_url}/metrics"}
    assert not found.servers["gpu-1"].named
    assert set(twice.servers) == {"", "direct"}
    assert [(server.name, server.driven) for server in twice.around("direct")] == [("direct", True)]
    assert [(server.name, server.driven) for server in twice.around("")] == [("", True), ("direct", False)]


def test_the_configuration_is_read_as_the_gateway_reads_it_and_its_secrets_are_not_reported(tmp_path: Path) -> None:
    (tmp_path / "gw.yaml").write_text(_FILE)
    words = ["python", "gateway", "serve", "-c", "gw.yaml"]
    found = gateway_configuration(words, tmp_path, {"BACKEND_KEY": "s3cr3t"})
    assert found["backends"][0]["name"] == "a"
    assert found["backends"][0]["api_key"] == "***"
    assert found["auth"]["keys"][0]["key"] == "***"
    assert found["routing"]["policy"] == "prefix"
    for secret in ("s3cr3t", "t0p", "salty"):
        assert secret not in str(found)


def test_backends_of_the_command_line_stand_for_a_file(tmp_path: Path) -> None:
    words = ["gateway", "serve", "--backend", "http://a:8000", "--backend=http://b:8000"]
    found = gateway_configuration(words, tmp_path, {})
    assert [backend["name"] for backend in found["backends"]] == ["a:8000", "b:8000"]


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "gw.yaml").write_text(_FILE)
    assert "BACKEND_KEY is not set" in gateway_configuration(["gateway", "serve", "-c", "gw.yaml"], tmp_path, {})
    assert "gone.yaml" in gateway_configuration(["gateway", "serve", "--config=gone.yaml"], tmp_path, {})
    assert gateway_configuration(["nginx"], tmp_path, {}) == "its command is not `gateway serve`"
