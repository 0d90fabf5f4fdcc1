"""The rank of an engine is sent to its backend, and to no other."""

import asyncio
from random import Random

import pytest

from gateway.config import HealthConfig, UpstreamConfig
from gateway.core.backends.facts import Facts, ModelCard
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.settings import BackendConfig
from gateway.core.relay.relay import Relay
from gateway.core.request import Demand, InferenceRequest, Kind
from gateway.core.resources import MemoryBudget
from tests.scripted import ScriptedBackend
from tests.unit.relay.peers import FakeSink

DEADLINE_SECONDS = 5.0


async def header_of(kind: Kind, rank: int | None) -> bytes | None:
    """The rank header that the backend gets."""
    loop = asyncio.get_running_loop()
    async with ScriptedBackend() as backend, asyncio.timeout(DEADLINE_SECONDS):
        config = BackendConfig(url=backend.url, name="a")
        fleet = Fleet([config], HealthConfig(), clock=loop.time, random=Random(1))
        fleet.learned(fleet.backends[0], Facts(models=(ModelCard("m"),), engines=2))
        relay, sink = Relay(fleet, UpstreamConfig(), clock=loop.time, memory=MemoryBudget(1 << 30)), FakeSink()
        request = InferenceRequest(
            "chat",
            kind,
            b"POST",
            b"/v1/chat/completions",
            Demand("m"),
            "id-1",
            b"{}",
            headers=b"x-request-id: id-1\r\n",
        )
        with relay.watching():
            answer = await relay.send(request, fleet.backends[0], sink, lambda: None, lambda _: 1000, rank=rank)
        assert (answer.status, backend.malformed) == (200, [])
        [seen] = backend.ledger
        assert seen.request_id == "id-1"
        return seen.header(b"x-data-parallel-rank")


@pytest.mark.parametrize("rank", [0, 1, 15])
async def test_a_request_that_was_placed_on_one_of_several_engines_says_on_which(rank: int) -> None:
    assert await header_of(Kind.GENERATE, rank) == b"%d" % rank


async def test_where_a_backend_is_one_engine_nothing_is_said() -> None:
    assert await header_of(Kind.GENERATE, None) is None


@pytest.mark.parametrize("kind", [Kind.POOL, Kind.LIGHT])
async def test_requests_that_are_not_generation_are_the_backends_to_distribute(kind: Kind) -> None:
    assert await header_of(kind, 1) is None
