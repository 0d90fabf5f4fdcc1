"""Two gateways before one fleet, through a real Redis or Valkey: what one of them has sent, both know."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.integration.conftest import whole_fleet_is_up
from tests.integration.fleet import CHAT_MODEL, Fleet
from tests.integration.gateway_process import Gateway, config_for, running_gateway
from tests.integration.observed import eventually, read
from tests.integration.predictions import complete
from tests.integration.prompts import fresh, long_prefix
from tests.redis_server import RedisServer, redis_server

pytest.importorskip("hiredis")
KEYS = [{"name": name, "key": f"sk-{name}", "isolate_cache": True} for name in ("ann", "bob")]


@contextmanager
def two_gateways(fleet: Fleet, folder: Path, server: RedisServer, sections: dict[str, Any]) -> Iterator[list[Gateway]]:
    config = config_for(fleet, {"coordination": {"url": server.url}, **sections}, {})
    with ExitStack() as stack:
        yield [stack.enter_context(running_gateway(folder, config)) for _ in range(2)]


async def know_each_other(gateways: list[Gateway], fleet: Fleet) -> None:
    for gateway in gateways:
        await whole_fleet_is_up(gateway, fleet)

        async def knows(gateway: Gateway = gateway) -> bool:
            return await read(gateway.admin_url, "gateway_replicas") == 2

        await eventually(knows, "it knows the other gateway")
        await until_heard(gateway)


@asynccontextmanager
async def clients_of(gateways: list[Gateway], api_key: str = "none") -> AsyncIterator[list[AsyncOpenAI]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(gateway.client(api_key)) for gateway in gateways]


async def used(gateway: Gateway) -> float:
    return await read(gateway.admin_url, "gateway_cache_updates_total", result="used")


async def snapshots_used(gateway: Gateway) -> float:
    return await read(gateway.admin_url, "gateway_cache_updates_total", result="snapshots_used")


async def until_heard(gateway: Gateway) -> None:
    """Whatever the other gateway knew until now has come."""
    before = await used(gateway)

    async def heard() -> bool:
        return await used(gateway) >= before + 2

    await eventually(heard, "two more updates came")


async def test_a_prefix_that_was_sent_through_one_gateway_is_a_hit_through_the_other(
    fleet: Fleet, tmp_path: Path
) -> None:
    with redis_server(tmp_path) as server, two_gateways(fleet, tmp_path, server, {}) as gateways:
        await know_each_other(gateways, fleet)
        async with clients_of(gateways) as (first, second):
            for _ in range(6):  # by chance, half of them would be hits
                prefix = long_prefix()
                await complete(first, prefix + fresh())
                await until_heard(gateways[1])
                answer = await complete(second, prefix + fresh())
                assert answer.cached > 0
                assert answer.predicted > 0


@pytest.mark.simulated("gateways tell each other the same of real engines")
async def test_isolated_caches_are_those_of_one_key_at_every_gateway(fleet: Fleet, tmp_path: Path) -> None:
    auth = {"auth": {"keys": KEYS}}
    with redis_server(tmp_path) as server, two_gateways(fleet, tmp_path, server, auth) as gateways:
        await know_each_other(gateways, fleet)
        async with clients_of(gateways, "sk-ann") as ann, clients_of(gateways, "sk-bob") as bob:
            prefix = long_prefix()
            await complete(ann[0], prefix + fresh())
            await until_heard(gateways[1])
            assert (await complete(bob[1], prefix + fresh())).cached == 0
            assert (await complete(ann[1], prefix + fresh())).cached > 0


@pytest.mark.simulated("gateways tell each other the same of real engines")
async def test_requests_go_on_without_the_server_and_gateways_find_each_other_again(
    fleet: Fleet, tmp_path: Path
) -> None:
    with redis_server(tmp_path) as server, two_gateways(fleet, tmp_path, server, {}) as gateways:
        await know_each_other(gateways, fleet)
        async with clients_of(gateways) as (first, second):
            server.stop()
            prefix = long_prefix()
            await complete(first, prefix + fresh())
            await complete(second, long_prefix())
            for gateway in gateways:

                async def is_lost(gateway: Gateway = gateway) -> bool:
                    return await read(gateway.admin_url, "gateway_coordination_up") == 0

                await eventually(is_lost, "the server is missed")
            before = await snapshots_used(gateways[1])  # the one at its start may not have come before the stop
            server.start()
            await know_each_other(gateways, fleet)

            async def made_up() -> bool:
                return await snapshots_used(gateways[1]) > before

            await eventually(made_up, "what was missed meanwhile came in a snapshot")
            assert (await complete(second, prefix + fresh())).cached > 0


@pytest.mark.simulated("gateways tell each other the same of real engines")
async def test_a_stored_response_is_continued_and_retrieved_through_the_other_gateway(
    fleet: Fleet, tmp_path: Path
) -> None:
    with redis_server(tmp_path) as server, two_gateways(fleet, tmp_path, server, {}) as gateways:
        await know_each_other(gateways, fleet)
        async with clients_of(gateways) as (first, second):
            for _ in range(4):
                made = await first.responses.create(model=CHAT_MODEL, input="hello", max_output_tokens=16)
                await until_heard(gateways[1])
                assert (await second.responses.retrieve(made.id)).id == made.id
                more = await second.responses.create(
                    model=CHAT_MODEL, input="and", max_output_tokens=16, previous_response_id=made.id
                )
                assert more.previous_response_id == made.id
