"""Tokens told by the gateway beside those of the engines: the same for vLLM, refused for an engine that has others."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gateway.config import HealthConfig
from gateway.core.backends.backend import Backend
from gateway.core.backends.facts import Facts, ModelCard
from gateway.core.backends.fleet import Fleet as Backends
from gateway.core.backends.settings import BackendConfig
from gateway.core.backends.vllm_api import ControlClient
from gateway.features.exact.conversation import PromptFeature
from gateway.features.exact.tokenization import DEFAULT_LIMITS, Tokenization, TokenizerLimits
from gateway.features.exact.tokenizer import ModelTokenizer
from gateway.features.models.settings import ModelConfig, ModelsConfig
from tests.integration.conftest import engine_kind
from tests.integration.fleet import CHAT_MODEL, MODELS, Fleet
from tests.unit.exact.models import STRING_TEMPLATE, byte_level, saved

DEADLINE_SECONDS = 60.0
LIMITS = TokenizerLimits(prompts=DEFAULT_LIMITS.prompts._replace(wait_seconds=DEADLINE_SECONDS))
PIECES = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "user\n",
    " ",
    "\n\n",
    "\t",
    "e\u0301",
    "日本",
    "🧑\u200d🚀",
    "x ** 2",
]


@asynccontextmanager
async def tokenizing(fleet: Fleet, tokenizer: str) -> AsyncIterator[tuple[Tokenization, list[Backend], ControlClient]]:
    """The tokenization of the fleet's chat engines, all of them judged."""
    configs = [BackendConfig(url=url) for url in fleet.chat_urls]
    backends = Backends(configs, HealthConfig(), clock=time.monotonic, random=Random(1))
    for backend in backends.backends:
        backends.learned(backend, Facts(models=(ModelCard(CHAT_MODEL),)))
    models = ModelsConfig(**{CHAT_MODEL: ModelConfig(tokenizer=tokenizer)})
    async with (
        asyncio.timeout(DEADLINE_SECONDS),
        ControlClient(DEADLINE_SECONDS, time.monotonic) as client,
        Tokenization(models, backends, time.monotonic, limits=LIMITS) as tokenization,
    ):
        while len(states(tokenization)) < len(configs):
            await asyncio.sleep(0.05)
        yield tokenization, list(backends.backends), client


def states(tokenization: Tokenization) -> dict[str, str]:
    """Each judged backend's state."""
    [model] = tokenization._models.values()
    return {name: verdict.state for name, verdict in model.verdicts.items() if verdict.state != "pending"}


def conversations(random: Random, count: int) -> list[dict[str, Any]]:
    """Chats of random texts and lengths, each of a few turns."""

    def text() -> str:
        return "".join(random.choice([*PIECES, chr(random.randrange(32, 1500))]) for _ in range(random.randrange(40)))

    def content() -> Any:
        if random.random() < 0.7:
            return text()
        return [{"type": "text", "text": text()} for _ in range(random.randrange(1, 4))]

    roles = ("system", "user", "assistant")
    return [
        {"messages": [{"role": random.choice(roles), "content": content()} for _ in range(random.randrange(1, 6))]}
        for _ in range(count)
    ]


async def test_vllm_makes_the_tokens_that_are_told(fleet: Fleet, request: pytest.FixtureRequest) -> None:
    if engine_kind(request.config) != "vllm":
        pytest.skip("simulated engines have no model's tokenizer")
    async with tokenizing(fleet, str(MODELS / CHAT_MODEL)) as (tokenization, backends, client):
        assert set(states(tokenization).values()) == {"verified"}
        assert tokenization._models[CHAT_MODEL].features == set(PromptFeature)
        for document in conversations(Random(20), 25):
            told = await tokenization.token_bytes(CHAT_MODEL, document, "chat", 10000)
            assert told is not None, tokenization.totals
            asked = {"model": CHAT_MODEL, "max_tokens": 1, "return_token_ids": True, **document}
            answer = await client.ask(backends[0].config, "/v1/chat/completions", asked)
            assert array("I", told).tolist() == answer["prompt_token_ids"]
        text = "".join(PIECES) * 20
        told = await tokenization.token_bytes(CHAT_MODEL, {"prompt": text}, "completions", len(text))
        assert told is not None, tokenization.totals
        answer = await client.ask(backends[0].config, "/tokenize", {"model": CHAT_MODEL, "prompt": text})
        assert array("I", told).tolist() == answer["tokens"]


async def test_an_engine_with_other_tokens_is_refused_for_all_to_see(
    fleet: Fleet, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Simulated engines have tokens of four bytes; to vLLM, another model's tokenizer is offered."""
    tokenizer = saved(byte_level(), tmp_path, STRING_TEMPLATE)
    async with tokenizing(fleet, tokenizer) as (tokenization, backends, _):
        assert set(states(tokenization).values()) == {"refused"}
        reasons = [tokenization.verdicts(backend.name)[CHAT_MODEL]["reason"] for backend in backends]
        assert all("from token" in reason for reason in reasons)
        assert not any(tokenization.accepted(CHAT_MODEL, backend.name) for backend in backends)
        document = {"messages": [{"role": "user", "content": "Hi"}]}
        assert await tokenization.token_bytes(CHAT_MODEL, document, "chat", 100) is None


@pytest.mark.parametrize("model", ["tiny", "smollm2", "minilm"])
def test_a_real_tokenizers_pieces_add_up_to_the_whole(model: str, request: pytest.FixtureRequest) -> None:
    if engine_kind(request.config) != "vllm":
        pytest.skip("the models are there only beside vLLM")
    tokenizer = ModelTokenizer(str(MODELS / model), 1 << 20)
    random = Random(21)
    for _ in range(300):
        text = "".join(random.choice([*PIECES, chr(random.randrange(32, 70000))]) for _ in range(60))
        text = text.encode("utf-8", "ignore").decode()
        told = tokenizer.tokens("completions", {"prompt": text}, "string", list(PromptFeature))
        assert array("I", told).tolist() == tokenizer._tokenizer(text)["input_ids"]
