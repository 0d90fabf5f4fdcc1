"""Backends that are discovered while requests run."""

import asyncio
from pathlib import Path
from typing import Any

import dns.rcode
import pytest
import yaml

from tests.clients import chat
from tests.dns import NameServer
from tests.fault.rig import BACKEND_KEY, UnderTest, holds, running
from tests.scripted import ScriptedBackend
from tests.scripts import hang, json_answer

STREAM = chat(stream=True)


def port_of(engine: ScriptedBackend) -> str:
    return engine.url.rpartition(":")[2]


def lists(server: NameServer, *engines: ScriptedBackend) -> None:
    """The name server's answer has these."""
    server.records = {
        ("engines.example", "SRV"): [f"0 0 {port_of(each)} host.example." for each in engines],
        ("host.example", "A"): ["127.0.0.1"],
    }


def discovery(server: NameServer) -> dict[str, Any]:
    name = {"name": "engines.example", "record": "srv", "nameserver": server.address}
    return {"discovery": {"dns": [name], "backend": {"api_key": BACKEND_KEY}}}


async def serves(under_test: UnderTest, engine: ScriptedBackend) -> None:
    fleet = under_test.gateway.core.fleet
    await holds(lambda: any(each.config.url == engine.url for each in fleet.backends), "it is found")
    await holds(lambda: under_test.state(engine) == "up", "it is up")


async def test_a_name_in_dns_brings_backends_and_takes_them_away(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    for each in (backend, other):
        each.plays(*json_answer())
    async with NameServer() as server:
        lists(server, backend)
        async with running(sections=discovery(server)) as under_test:
            assert (await under_test.ask()).status == 200  # it was held until the first backend came
            backend.plays(hang())
            stream = asyncio.create_task(under_test.ask(STREAM))
            await holds(lambda: len(backend.ledger) == 2, "it runs")
            lists(server, backend, other)
            await serves(under_test, other)
            lists(server, other)
            await holds(lambda: len(under_test.gateway.core.fleet.backends) == 1, "the first is gone")
            assert [(await under_test.ask()).status for _ in range(3)] == [200] * 3
            assert (len(backend.ledger), backend.ledger[-1].peer_left_at) == (2, None)  # its stream goes on
            server.rcode = dns.rcode.SERVFAIL
            await holds(lambda: any(each["event"] == "discovery_failed" for each in under_test.events), "it is said")
            assert (await under_test.ask()).status == 200
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)


@pytest.mark.parametrize("count", [1, 2])
async def test_a_watched_file_does_the_same(
    count: int, tmp_path: Path, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    for each in (backend, other):
        each.plays(*json_answer())
    file = tmp_path / "backends.yaml"
    entries = [{"url": each.url, "api_key": BACKEND_KEY} for each in (backend, other)]
    file.write_text(yaml.safe_dump(entries[:count]))
    async with running(sections={"discovery": {"file": str(file)}}) as under_test:
        assert (await under_test.ask()).status == 200
        file.write_text("- nonsense")
        await holds(lambda: any(each["event"] == "discovery_failed" for each in under_test.events), "it is said")
        assert (await under_test.ask()).status == 200
        file.write_text(yaml.safe_dump(entries[1:]))
        await holds(
            lambda: [each.config.url for each in under_test.gateway.core.fleet.backends] == [other.url], "changed"
        )
        assert (await under_test.ask()).status == 200
        assert other.ledger
