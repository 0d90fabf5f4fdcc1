"""Engines and clients for the server tests."""

from collections.abc import AsyncIterator

import aiohttp
import pytest
from openai import AsyncOpenAI

from loadtest.engine import EngineConfig, Limits, SimulatedEngine

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=2048, block_size=16, num_blocks=2000)


@pytest.fixture
async def engine() -> AsyncIterator[SimulatedEngine]:
    """A fast engine with a ledger."""
    config = EngineConfig(model="sim", limits=LIMITS, time_scale=0, max_model_len=4096, control=True)
    async with SimulatedEngine(config, seed=1) as running:
        yield running


@pytest.fixture
async def slow_engine() -> AsyncIterator[SimulatedEngine]:
    """An engine in real time: 8 ms a token."""
    config = EngineConfig(model="sim", limits=LIMITS, max_model_len=4096, control=True)
    async with SimulatedEngine(config, seed=1) as running:
        yield running


@pytest.fixture
async def embedder() -> AsyncIterator[SimulatedEngine]:
    """An engine with an embedding model."""
    config = EngineConfig(model="emb", limits=LIMITS, time_scale=0, max_model_len=256, embedding=True, control=True)
    async with SimulatedEngine(config, seed=1) as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client that knows nothing of OpenAI."""
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def client(engine: SimulatedEngine) -> AsyncIterator[AsyncOpenAI]:
    """The real client, without retries."""
    async with AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="unused", max_retries=0) as running:
        yield running
