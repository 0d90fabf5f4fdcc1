from array import array
from collections.abc import Collection
from random import Random
from typing import Any

import pytest

from gateway.config import HealthConfig
from gateway.core.backends.facts import Facts, ModelCard
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.health import ProbeResult
from gateway.core.backends.settings import BackendConfig
from gateway.core.request import Demand, InferenceRequest, Kind
from gateway.features.exact.conversation import PromptFeature
from gateway.features.exact.index import MOST_TOKENS, ExactIndex, packed, token_keys, token_seed
from gateway.features.exact.prompts import ExactPrompts, given_tokens
from gateway.features.exact.tokenization import Tokenization, TokenizerVerdict
from gateway.features.models.settings import ModelConfig, ModelsConfig

IDS = list(range(100, 170))
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": IDS}


class FixedTokens(Tokenization):
    """Gives these tokens for any prompt."""

    def __init__(self, fleet: Fleet, tokens: bytes | None, accepted: Collection[str]) -> None:
        super().__init__(ModelsConfig(m=ModelConfig(tokenizer="x")), fleet, lambda: 0.0)
        self._tokens = tokens
        for backend in accepted:
            self._models["m"].judged(backend, TokenizerVerdict("verified", features=frozenset((PromptFeature.CHAT,))))
        self.asked: list[tuple[str, str, int]] = []

    async def token_bytes(self, model: str, document: dict[str, Any], endpoint: str, size_bytes: int) -> bytes | None:
        self.asked.append((model, endpoint, size_bytes))
        return self._tokens


class Scene:
    """Backends a and b with the model m; b also has the adapter `poet`. b reports what it holds."""

    def __init__(
        self, tokens: bytes | None = None, accepted: Collection[str] = "ab", sizes: tuple[int, int] = (16, 16)
    ):
        configs = [BackendConfig(url=f"http://10.0.0.{number}:1", name="ab"[number]) for number in range(2)]
        self.fleet = Fleet(configs, HealthConfig(), clock=lambda: 0.0, random=Random(1))
        cards = (ModelCard("m"),), (ModelCard("m"), ModelCard("poet", parent="m"))
        for backend, models, size in zip(self.fleet.backends, cards, sizes, strict=True):
            self.fleet.learned(backend, Facts(models=models, block_size_tokens=size))
            self.fleet.probed(backend, ProbeResult.OK)
        self.exact = ExactIndex()
        self.exact.set_live(1, True)
        self.tokenizer = FixedTokens(self.fleet, tokens, accepted)
        self.prompts = ExactPrompts(self.fleet, self.exact, self.tokenizer)

    async def completed(
        self, document: dict[str, Any] | None, endpoint: str = "chat", model: str = "m", salt: str = ""
    ) -> Demand:
        ask = Demand(model, keys=(1, 2), edges=(200, 400), prompt_size=400, prompt_tokens=90)
        body = b"x" * 500
        made = InferenceRequest(endpoint, Kind.GENERATE, b"POST", b"/x", ask, "id", body, document=document, salt=salt)
        made = await self.prompts.complete(made)
        assert made.document is None
        return made.demand


def keys(tokens: list[int], block_tokens: int = 16, lora: str | None = None, salt: str = "") -> tuple[int, ...]:
    return token_keys(packed(tokens), block_tokens, token_seed(lora, salt))


async def test_token_ids_that_a_client_gave_are_the_prompts_tokens() -> None:
    scene = Scene()
    ask = await scene.completed(COMPLETION, "completions")
    assert (ask.prompt_tokens, ask.anchor_tokens, ask.anchor_size) == (70, 70, 400)
    assert ask.token_keys == keys(IDS)
    assert len(ask.token_keys) == 4
    assert scene.tokenizer.asked == []


async def test_otherwise_they_come_from_the_tokenizer() -> None:
    scene = Scene(packed(IDS))
    ask = await scene.completed(CHAT)
    assert (ask.prompt_tokens, ask.token_keys) == (70, keys(IDS))
    assert scene.tokenizer.asked == [("m", "chat", 500)]


async def test_lengths_are_exact_even_if_no_engine_reports_its_blocks() -> None:
    scene = Scene(packed(IDS))
    scene.exact.set_live(1, False)
    ask = await scene.completed(CHAT)
    assert (ask.prompt_tokens, ask.tokens_of(1), ask.token_keys) == (70, 35, ())


async def test_an_adapter_and_a_salt_make_other_blocks() -> None:
    scene = Scene()
    assert (await scene.completed(COMPLETION, "completions", "poet")).token_keys == keys(IDS, lora="poet")
    assert (await scene.completed(COMPLETION, "completions", salt="pepper")).token_keys == keys(IDS, salt="pepper")
    assert len({keys(IDS), keys(IDS, lora="poet"), keys(IDS, salt="pepper")}) == 3


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16)])
async def test_engines_with_blocks_of_several_sizes_share_no_keys(sizes: tuple[int, int]) -> None:
    ask = await Scene(sizes=sizes).completed(COMPLETION, "completions")
    assert (ask.prompt_tokens, ask.token_keys) == (70, ())


async def test_blocks_are_as_large_as_the_engines() -> None:
    ask = await Scene(sizes=(32, 32)).completed(COMPLETION, "completions")
    assert ask.token_keys == keys(IDS, 32)


@pytest.mark.parametrize(
    ("document", "model", "accepted"),
    [(CHAT, "m", "a"), (CHAT, "m", ""), (None, "m", "ab"), (CHAT, "unserved", "ab")],
    ids=["one of two backends is not verified", "none is", "the prompt is not kept", "no backend serves the model"],
)
async def test_otherwise_the_tokenizer_is_not_called_and_nothing_is_known(
    document: dict[str, Any] | None, model: str, accepted: str
) -> None:
    scene = Scene(packed(IDS), accepted)
    ask = await scene.completed(document, model=model)
    assert (ask.prompt_tokens, ask.anchor_tokens, ask.token_keys) == (90, 0, ())
    assert scene.tokenizer.asked == []


@pytest.mark.parametrize("tokens", [None, b""])
async def test_without_tokens_the_estimate_stays(tokens: bytes | None) -> None:
    scene = Scene(tokens)
    ask = await scene.completed(CHAT)
    assert (ask.prompt_tokens, ask.anchor_tokens, ask.token_keys) == (90, 0, ())
    assert len(scene.tokenizer.asked) == 1


def test_an_engine_is_covered_while_it_reports_its_blocks_and_its_prompts_are_tokenized() -> None:
    assert [Scene().prompts.covers(engine) for engine in (0, 1)] == [False, False], "the adapter is not tokenized"
    scene = Scene()
    scene.fleet.learned(scene.fleet.backends[1], Facts(models=(ModelCard("m"),)))
    assert [scene.prompts.covers(engine) for engine in (0, 1)] == [False, True]
    scene.exact.set_live(1, False)
    assert not scene.prompts.covers(1)
    scene.exact.set_live(1, True)
    assert not ExactPrompts(scene.fleet, scene.exact).covers(1)


def test_tokens_are_wanted_of_models_with_a_tokenizer() -> None:
    scene = Scene()
    assert "m" in scene.tokenizer
    assert "other" not in scene.tokenizer


@pytest.mark.parametrize("prompt", [[1, 2, 70000], [[1, 2, 70000]]])
def test_a_completions_own_token_ids_are_its_tokens(prompt: list[Any]) -> None:
    assert given_tokens({"prompt": prompt}, "completions") == array("I", [1, 2, 70000]).tobytes()


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"prompt": "text"},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": ["1", "2"]},
        {"prompt": [1, True]},
        {"prompt": [1, 2.0]},
        {"prompt": [-1]},
        {"prompt": [1 << 32]},
        {"prompt": [[1], [2]]},
        {"prompt": [1] * (MOST_TOKENS + 1)},
        {"prompt": [1, 2], "truncate_prompt_tokens": 1},
        {"prompt": [1, 2], "prompt_embeds": "x"},
        {"prompt": [1, 2], "suffix": "x"},
    ],
)
def test_what_is_not_one_list_of_ids_as_it_is_gives_none(document: dict[str, Any]) -> None:
    assert given_tokens(document, "completions") is None


def test_other_endpoints_give_no_ids() -> None:
    assert given_tokens({"prompt": [1, 2]}, "chat") is None
