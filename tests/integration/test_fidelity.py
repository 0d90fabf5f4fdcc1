"""How near the own record's predictions come to what engines report, without tokens or events."""

from itertools import pairwise
from random import Random

import pytest
from openai import AsyncOpenAI

from tests.integration.conftest import engine_kind
from tests.integration.fleet import CHAT_MODEL, Fleet
from tests.integration.gateway_process import Gateway
from tests.integration.observed import samples
from tests.integration.predictions import BLOCK_TOKENS, WORDS, Answered, Message, complete, error, hit_share, talk, text
from tests.integration.prompts import fresh
from tests.integration.publishing import post

MOST_WRONG = 0.1  # of the prompts' tokens; 0.03 where bytes per token were learned from such texts alone
MOST_WRONG_OF_ONE_KIND = 0.15
ANSWER_TOKENS = 48  # more than a block


@pytest.fixture(scope="module")
def random() -> Random:
    return Random(51)


@pytest.fixture
async def plain_words(fleet: Fleet, request: pytest.FixtureRequest) -> dict[str, list[int]]:
    """Lets a model of noise answer in words: text that has the same tokens when it comes back."""
    if engine_kind(request.config) == "sim":
        return {}
    ids: list[int] = []
    for word in sorted(set(WORDS)):
        told = await post(f"{fleet.chat_urls[0]}/tokenize", {"model": CHAT_MODEL, "prompt": f" {word}"})
        ids += told["tokens"] if told["count"] == 1 else []
    assert len(ids) > 5
    return {"allowed_token_ids": ids}


async def test_the_turns_of_a_conversation_find_all_that_was_said_before(
    client: AsyncOpenAI, gateway: Gateway, random: Random, plain_words: dict[str, list[int]]
) -> None:
    for _ in range(3):
        said: list[Message] = [{"role": "system", "content": text(random, 1500)}]
        turns: list[Answered] = []
        for _ in range(3):
            said.append({"role": "user", "content": text(random, 300)})
            turns.append(await talk(client, said, ANSWER_TOKENS, extra_body=plain_words))
            said.append({"role": "assistant", "content": turns[-1].text})
            await samples(gateway.admin_url)  # what answers teach is learned by now, if it has not been before
        assert len({turn.backend for turn in turns}) == 1
        assert turns[0].cached == turns[0].predicted == 0
        for before, turn in pairwise(turns):
            assert turn.is_right
            assert turn.cached > before.prompt_tokens + ANSWER_TOKENS - 2 * BLOCK_TOKENS  # the answer too


async def of_a_shared_system_prompt(client: AsyncOpenAI, random: Random) -> list[Answered]:
    answers = []
    for size_bytes in (1200, 4000, 9000):
        system: Message = {"role": "system", "content": text(random, size_bytes)}
        for _ in range(6):
            question: Message = {"role": "user", "content": text(random, random.randrange(40, 800))}
            answers.append(await talk(client, [system, question]))
    return answers


async def of_prompts_that_share_nothing(client: AsyncOpenAI, random: Random) -> list[Answered]:
    return [await talk(client, [{"role": "user", "content": text(random, 2500)}]) for _ in range(8)]


async def of_texts_that_part_somewhere(client: AsyncOpenAI, random: Random) -> list[Answered]:
    answers = []
    for size_bytes in (3000, 9000):
        document = text(random, size_bytes)
        answers.append(await complete(client, document))
        for _ in range(8):
            shared = document[: random.randrange(size_bytes // 4, size_bytes)]
            answers.append(await complete(client, shared + fresh(" and now for something else")))
    return answers


async def test_predictions_are_near_what_engines_report(client: AsyncOpenAI, random: Random) -> None:
    alike = await of_a_shared_system_prompt(client, random)
    unlike = await of_prompts_that_share_nothing(client, random)
    parting = await of_texts_that_part_somewhere(client, random)
    assert error([*alike, *unlike, *parting], "all prompts") <= MOST_WRONG
    assert error(alike, "a shared system prompt") <= MOST_WRONG_OF_ONE_KIND
    assert error(parting, "texts that part") <= MOST_WRONG_OF_ONE_KIND
    assert error(unlike, "prompts that share nothing") == 0
    assert min(hit_share(alike), hit_share(parting)) > 0.5
    assert hit_share(unlike) == 0


async def test_the_same_prompts_again(client: AsyncOpenAI, random: Random) -> None:
    prompts = [text(random, random.randrange(600, 6000)) for _ in range(6)]
    for prompt in prompts:
        await complete(client, prompt)
    answers = [await complete(client, prompt) for prompt in prompts]
    assert all(answer.is_right for answer in answers)
    assert hit_share(answers) > 0.9
