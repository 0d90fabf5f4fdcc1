"""Sources come and go at a reload, and those that stay are not disturbed."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from gateway.config import HealthConfig
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.membership import Membership
from gateway.core.backends.settings import BackendConfig
from gateway.core.supervisor import Supervisor
from gateway.features.discovery.follow import Discovery
from gateway.features.discovery.settings import DiscoveryConfig


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def listing(folder: Path, name: str) -> str:
    file = folder / f"{name}.yaml"
    file.write_text(f"- {{name: {name}, url: 'http://10.0.0.{len(name)}:1'}}\n")
    return str(file)


async def test_sources_follow_a_reload_and_backends_of_those_that_go_leave(tmp_path: Path) -> None:
    one, two = listing(tmp_path, "a"), listing(tmp_path, "bb")
    static = [BackendConfig(url="http://10.1.0.1:1", name="static")]
    fleet = Fleet(static, HealthConfig(), clock=time.monotonic, random=Random(1))
    before = asyncio.all_tasks()
    async with Discovery(
        DiscoveryConfig(), Membership(fleet), Supervisor(time.monotonic), random=Random(1)
    ) as discovery:
        discovery.apply(DiscoveryConfig(file=one))
        await until(lambda: "a" in fleet.by_name)
        backend = fleet.by_name["a"]
        discovery.apply(DiscoveryConfig(file=one))
        await asyncio.sleep(0.05)
        assert fleet.by_name["a"] is backend
        discovery.apply(DiscoveryConfig(file=two))
        assert [*fleet.by_name] == ["static"]
        await until(lambda: "bb" in fleet.by_name)
        discovery.apply(DiscoveryConfig())
        assert [*fleet.by_name] == ["static"]
        await asyncio.sleep(0.05)
    assert asyncio.all_tasks() == before
