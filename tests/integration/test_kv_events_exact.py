"""What an engine's KV events say it holds is what it then reports to have used; simulated engines and real ones."""

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from random import Random

import aiohttp
import pytest

from gateway.config import HealthConfig
from gateway.core.backends.backend import Backend
from gateway.core.backends.facts import Facts
from gateway.core.backends.settings import BackendConfig
from gateway.core.backends.vllm_api import KV_EVENT_SOURCES_PATH, read_kv_event_sources
from gateway.features.exact.endpoints import plan
from gateway.features.exact.feed import KvEvents
from gateway.features.exact.index import packed, token_keys, token_seed
from loadtest.servers.processes import free_ports
from loadtest.vllm_cpu.process import VllmOptions, VllmProcess
from tests.integration.conftest import engine_kind
from tests.integration.fleet import CHAT_MODEL, MODELS, print_progress, simulated_engine
from tests.unit.exact.listener import Listener

BLOCK_TOKENS = 32
CACHE_BLOCKS = 33  # a real engine never gives out the first one
CONTEXT_TOKENS = 512
VOCABULARY = range(100, 400)


@contextmanager
def real_engine(logs: Path) -> Iterator[str]:
    """vLLM with a small cache and its development endpoints."""
    options = VllmOptions(
        MODELS / CHAT_MODEL,
        block_size_tokens=BLOCK_TOKENS,
        max_model_len_tokens=CONTEXT_TOKENS,
        flags=("--num-gpu-blocks-override", str(CACHE_BLOCKS)),
        environment={"VLLM_SERVER_DEV_MODE": "1"},
    )
    with VllmProcess(options, logs / "vllm-events.log", print_progress) as engine:
        yield engine.url


@contextmanager
def simulated(logs: Path) -> Iterator[str]:
    """The simulated engine of the same shape."""
    events, replay = free_ports(2)
    flags = ["--model", CHAT_MODEL, "--max-model-len", str(CONTEXT_TOKENS), "--block-size", str(BLOCK_TOKENS)]
    flags += ["--kv-tokens", str((CACHE_BLOCKS - 1) * BLOCK_TOKENS), "--dev-mode", "--kv-events-topic", "kv@sim"]
    flags += ["--kv-events-endpoint", f"tcp://*:{events}", "--kv-events-replay-endpoint", f"tcp://*:{replay}"]
    with simulated_engine(logs, *flags) as engine:
        yield engine.url


@pytest.fixture(scope="module")
def engine_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine that publishes its events."""
    start = {"sim": simulated, "vllm": real_engine}[engine_kind(request.config)]
    with start(tmp_path_factory.mktemp("events")) as url:
        yield url


class Engine:
    """The engine, asked as a client asks, and its events, followed as the gateway follows them."""

    def __init__(self, url: str, session: aiohttp.ClientSession, listener: Listener, events: KvEvents) -> None:
        self._url = url
        self._session = session
        self.listener = listener
        self.events = events

    def predicted(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Tokens of the prompt that it holds; it always computes the last one."""
        keys = token_keys(packed(tokens), BLOCK_TOKENS, token_seed(None, salt))
        [depth] = self.listener.index.depths(keys)
        return min(depth, (len(tokens) - 1) // BLOCK_TOKENS) * BLOCK_TOKENS

    async def cached(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Send the prompt, wait for what it stores, and tell how much of it was cached."""
        body = {"model": CHAT_MODEL, "prompt": list(tokens), "max_tokens": 1, "temperature": 0}
        if salt is not None:
            body["cache_salt"] = salt
        async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
            document = await answer.json()
            assert answer.status == 200, document
        whole = (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        await self.listener.until(lambda: self.predicted(tokens, salt) == whole)
        cached = document["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert isinstance(cached, int)
        return cached

    async def reset(self) -> None:
        """Drop the whole prefix cache."""
        async with self._session.post(f"{self._url}/reset_prefix_cache") as answer:
            assert answer.status == 200


@asynccontextmanager
async def following(url: str) -> AsyncIterator[Engine]:
    """From the engine's address to a view that is whole."""
    listener = Listener()
    config = BackendConfig(url=url)
    backend = Backend(0, config, health=HealthConfig(), random=Random(0))
    async with aiohttp.ClientSession() as session, KvEvents(listener, lambda *_: 0, time.monotonic) as events:
        async with session.get(url + KV_EVENT_SOURCES_PATH) as answer:
            backend.learn(Facts(kv_event_sources=read_kv_event_sources(await answer.json())))
        assert plan(backend).problem is None
        events.subscribe(backend.name, plan(backend).sources)
        await listener.until_live(whole=True)
        yield Engine(url, session, listener, events)


@pytest.fixture
async def engine(engine_url: str) -> AsyncIterator[Engine]:
    """The engine with its events followed."""
    async with following(engine_url) as engine:
        yield engine


def prompt(random: Random, blocks: int, more: int = 8) -> list[int]:
    """So many whole blocks of random tokens, and a part of one."""
    return random.choices(VOCABULARY, k=blocks * BLOCK_TOKENS + more)


async def test_the_predicted_hit_is_the_reported_one(engine: Engine) -> None:
    random = Random(1)
    system = prompt(random, 4, more=0)
    first, second = system + prompt(random, 2), system + prompt(random, 3)
    expected = [(first, 0), (first, 6), (second, 4), (first[:140], 4), (second, 7), (system, 3)]
    for tokens, blocks in expected:
        predicted = engine.predicted(tokens)
        assert (predicted, await engine.cached(tokens)) == (blocks * BLOCK_TOKENS, blocks * BLOCK_TOKENS)


async def test_evictions_are_followed_block_by_block(engine: Engine) -> None:
    random = Random(2)
    systems = [prompt(random, blocks, more=0) for blocks in (1, 3, 5)]
    prompts = [random.choice(systems) + prompt(random, random.randint(0, 5), random.randint(1, 30)) for _ in range(12)]
    hits = []
    for _ in range(80):
        tokens = random.choice(prompts)
        predicted = engine.predicted(tokens)
        hits.append(await engine.cached(tokens))
        assert predicted == hits[-1]
    whole = [(len(tokens) - 1) // BLOCK_TOKENS for tokens in prompts]
    assert sum(whole) > CACHE_BLOCKS  # they do not fit together
    assert 0 in hits
    assert len(set(hits)) > 5
    [status] = engine.events.status()
    assert status["resident_blocks"] <= CACHE_BLOCKS
    assert (status["gaps"], status["malformed"], status["orphans"], status["ignored_events"]) == (0, 0, 0, 0)


async def test_a_salted_prompt_shares_with_the_same_salt_alone(engine: Engine) -> None:
    tokens = prompt(Random(3), 3)
    for salt, blocks in ((None, 0), ("pepper", 0), ("pepper", 3), ("curry", 0), (None, 3)):
        predicted = engine.predicted(tokens, salt)
        assert (predicted, await engine.cached(tokens, salt)) == (blocks * BLOCK_TOKENS, blocks * BLOCK_TOKENS)


async def test_a_reset_is_followed(engine: Engine) -> None:
    random = Random(4)
    tokens = prompt(random, 5)
    await engine.cached(tokens)
    assert engine.predicted(tokens) == 5 * BLOCK_TOKENS
    await engine.reset()
    await engine.cached(prompt(random, 1))  # a real engine tells of a reset with its next step
    assert engine.predicted(tokens) == 0
    assert engine.listener.clears == [0]
    assert await engine.cached(tokens) == 0


async def test_who_comes_late_knows_the_same(engine: Engine, engine_url: str) -> None:
    random = Random(5)
    prompts = [prompt(random, blocks) for blocks in (2, 3, 4)]
    for tokens in prompts:
        await engine.cached(tokens)
    async with following(engine_url) as late:
        assert [late.predicted(tokens) for tokens in prompts] == [64, 96, 128]
        assert len(late.listener.index) == len(engine.listener.index)
