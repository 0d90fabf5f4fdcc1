"""One backend that runs two engines: each has its own cache, and requests are kept on theirs."""

from collections.abc import AsyncIterator, Iterator
from random import Random

import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.integration.gateway_process import Gateway, running_gateway
from tests.integration.observed import eventually, samples
from tests.integration.predictions import BLOCK_TOKENS, Answered, Message, complete, error, hit_share, talk, text
from tests.integration.publishing import SimOptions, Simulated, followed, get, in_front_of, simulated_engines

pytestmark = pytest.mark.simulated("two engines behind one server are more than this CPU bears")
RANKS = 2


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    options = SimOptions(ranks=RANKS, cache_blocks=400)
    with simulated_engines(tmp_path_factory.mktemp("ranks"), options) as [engine]:
        yield engine


@pytest.fixture(scope="module")
def ranked(engine: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway in front of it."""
    with running_gateway(tmp_path_factory.mktemp("ranked"), in_front_of([engine])) as gateway:
        yield gateway


@pytest.fixture
async def sdk(ranked: Gateway) -> AsyncIterator[AsyncOpenAI]:
    """A client of the gateway, which knows what both engines hold."""
    await followed(ranked, RANKS)
    async with ranked.client() as client:
        yield client


async def finished_by_rank(engine: Simulated) -> list[int]:
    """Prompt tokens that each of the engines was asked for."""
    found = await samples(engine.url)
    queries = [one for one in found if one.name == "vllm:prefix_cache_queries_total"]
    return [int(one.value) for one in sorted(queries, key=lambda one: one.labels["engine"])]


async def test_both_engines_are_shown(sdk: AsyncOpenAI, ranked: Gateway, engine: Simulated) -> None:
    [shown] = (await get(f"{ranked.admin_url}/admin/backends"))["backends"]
    assert (shown["name"], shown["engines"], shown["kv_cache_tokens"]) == (engine.name, 2, 2 * 400 * BLOCK_TOKENS)
    assert [(stream["rank"], stream["used"]) for stream in shown["kv_events"]] == [(0, True), (1, True)]


async def test_conversations_are_kept_on_their_engines(sdk: AsyncOpenAI, ranked: Gateway, engine: Simulated) -> None:
    random, before = Random(71), await finished_by_rank(engine)
    talks: list[list[Message]] = [[{"role": "system", "content": text(random, 3000)}] for _ in range(2)]
    answers: list[list[Answered]] = [[], []]
    for _ in range(4):
        for said, answered in zip(talks, answers, strict=True):
            said.append({"role": "user", "content": text(random, 400)})
            answered.append(await talk(sdk, said, 20))
            said.append({"role": "assistant", "content": answered[-1].text})
            await samples(ranked.admin_url)  # what answers teach is learned by now, if it has not been before
    for answered in answers:
        assert all(answer.is_right for answer in answered)
        assert (answered[0].predicted, answered[0].cached) == (0, 0)
        assert hit_share(answered[1:]) > 0.7
    asked = [now - then for now, then in zip(await finished_by_rank(engine), before, strict=True)]
    assert min(asked) > 0.4 * sum(asked)  # each had one of them


async def test_hits_of_token_ids_are_known_on_each_engine(sdk: AsyncOpenAI) -> None:
    random = Random(72)
    systems = [random.choices(range(100, 400), k=8 * BLOCK_TOKENS) for _ in range(4)]
    answers = [await complete(sdk, systems[turn % 4] + random.choices(range(100, 400), k=40)) for turn in range(16)]
    assert error(answers, "token ids, two ranks") <= 0.01
    assert hit_share(answers) > 0.5


async def test_the_engine_that_a_client_asks_for_is_taken(sdk: AsyncOpenAI) -> None:
    prompt = Random(73).choices(range(100, 400), k=8 * BLOCK_TOKENS + 1)

    async def on_rank(rank: int) -> tuple[int, int]:
        answer = await complete(sdk, prompt, extra_headers={"X-data-parallel-rank": str(rank)})
        return answer.predicted, answer.cached

    whole = (8 * BLOCK_TOKENS, 8 * BLOCK_TOKENS)
    assert [await on_rank(rank) for rank in (1, 1, 0, 0, 1)] == [(0, 0), whole, (0, 0), whole, whole]


async def test_an_engine_that_does_not_exist_is_refused_in_the_backends_words(sdk: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError) as refused:
        await complete(sdk, "Hello", extra_headers={"X-data-parallel-rank": "7"})
    assert "data_parallel_rank 7 is out of range [0, 2)" in refused.value.message
    for nonsense in ("x", "-1", "1.5", ""):
        assert (await complete(sdk, "Hello", extra_headers={"X-data-parallel-rank": nonsense})).prompt_tokens > 0


async def test_an_explanation_names_the_engines(sdk: AsyncOpenAI, engine: Simulated) -> None:
    answer = await complete(sdk, "Hello there", extra_headers={"X-Gateway-Explain": "1"})
    assert answer.explained is not None
    names = sorted(part.partition(";")[0] for part in answer.explained.split(", "))
    assert names == [f"{engine.name}#0", f"{engine.name}#1"]


async def test_both_engines_are_back_after_a_restart(sdk: AsyncOpenAI, ranked: Gateway, engine: Simulated) -> None:
    prompts = [Random(seed).choices(range(100, 400), k=8 * BLOCK_TOKENS + 1) for seed in range(4)]
    for prompt in prompts:
        await complete(sdk, prompt)
    await engine.restart()
    for prompt in prompts:
        await complete(sdk, prompt)  # whatever is predicted now, it is answered

    async def is_exact() -> bool:
        answers = [await complete(sdk, prompt) for prompt in prompts]
        return all(answer.predicted == answer.cached == 8 * BLOCK_TOKENS for answer in answers)

    await eventually(is_exact, "hits are known again")
    await followed(ranked, RANKS)
