"""The real OpenAI client gets what it expects."""

import asyncio
import base64
from array import array
from math import sqrt

import openai
import pytest
from openai import AsyncOpenAI

from loadtest.engine import SimulatedEngine
from tests.unit.loadtest.engine.support import idle


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def test_a_chat_is_answered(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="sim", messages=user("hi nonce:n1"), max_tokens=12)
    assert answer.choices[0].message.content.startswith("nonce:n1 ")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_streamed_chat_says_the_same_as_a_whole_one(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="sim", messages=user("same"))
    stream = await client.chat.completions.create(
        model="sim", messages=user("same"), stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    # One role chunk, one chunk a token, one with the usage.
    assert len(chunks) == whole.usage.completion_tokens + 2


async def test_several_choices_are_streamed_side_by_side(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="sim", messages=user("two"), n=2, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    texts, usage = {0: "", 1: ""}, None
    async for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert len(texts[0]) == len(texts[1]) == 20
    assert texts[0] != texts[1]
    assert usage is not None
    assert usage.completion_tokens == 10


async def test_completions_take_strings_lists_and_token_ids(client: AsyncOpenAI) -> None:
    one = await client.completions.create(model="sim", prompt="abcdefgh", max_tokens=4)
    ids = [int.from_bytes(b"abcd", "little"), int.from_bytes(b"efgh", "little")]
    same = await client.completions.create(model="sim", prompt=ids, max_tokens=4)
    several = await client.completions.create(model="sim", prompt=["abcdefgh", "other"], max_tokens=4, n=2)
    assert one.choices[0].text == same.choices[0].text == several.choices[0].text
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.usage.prompt_tokens == 2 + 2
    assert several.usage.completion_tokens == 16


async def test_a_completion_may_echo_its_prompt(client: AsyncOpenAI) -> None:
    prompt = "ʇxǝʇ 漢字 🙂 nonce:x"
    answer = await client.completions.create(model="sim", prompt=prompt, max_tokens=3, echo=True)
    assert answer.choices[0].text.startswith(prompt)
    stream = await client.completions.create(model="sim", prompt=prompt, max_tokens=3, echo=True, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == answer.choices[0].text


async def test_log_probabilities_cover_every_token(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="sim", messages=user("x"), max_tokens=3, logprobs=True, top_logprobs=2
    )
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    assert [len(token.top_logprobs) for token in tokens] == [2, 2, 2]


async def test_the_next_turn_reports_the_cached_tokens(client: AsyncOpenAI) -> None:
    turns = user("A question that is long enough to fill several blocks of the cache. " * 4)
    first = await client.chat.completions.create(model="sim", messages=turns, max_tokens=40)
    turns += [{"role": "assistant", "content": first.choices[0].message.content}, *user("go on")]
    second = await client.chat.completions.create(model="sim", messages=turns, max_tokens=4)
    known = first.usage.total_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens == known // 16 * 16


async def test_a_cache_salt_keeps_conversations_apart(client: AsyncOpenAI) -> None:
    turns = user("secret " * 40)
    for salt in ("a", "b"):
        answer = await client.chat.completions.create(
            model="sim", messages=turns, max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
    again = await client.chat.completions.create(
        model="sim", messages=turns, max_tokens=1, extra_body={"cache_salt": "a"}
    )
    assert again.usage.prompt_tokens_details.cached_tokens > 0


async def test_the_request_id_is_part_of_the_answers_id(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="sim", messages=user("x"), max_tokens=1, extra_headers={"X-Request-Id": "abc-1"}
    )
    assert answer.id == "chatcmpl-abc-1"


async def test_responses_are_answered_and_streamed(client: AsyncOpenAI) -> None:
    whole = await client.responses.create(model="sim", input="hi nonce:r", max_output_tokens=20)
    assert whole.output_text.startswith("nonce:r")
    assert whole.status == "incomplete"
    text, final = "", None
    stream = await client.responses.create(model="sim", input="hi nonce:r", max_output_tokens=20, stream=True)
    async for event in stream:
        if event.type == "response.output_text.delta":
            text += event.delta
        if event.type == "response.completed":
            final = event.response
    assert text == whole.output_text
    assert final is not None
    assert final.usage.output_tokens == 20


async def test_models_are_listed(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["sim"]


async def test_an_unknown_model_is_not_found(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="The model `other` does not exist"):
        await client.chat.completions.create(model="other", messages=user("x"))


async def test_a_prompt_longer_than_the_context_is_a_bad_request(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens") as caught:
        await client.chat.completions.create(model="sim", messages=user("long " * 5000))
    assert caught.value.body["param"] == "input_tokens"


async def test_answers_never_mix_up_under_concurrency(client: AsyncOpenAI, engine: SimulatedEngine) -> None:
    async def ask(number: int) -> None:
        answer = await client.chat.completions.create(
            model="sim", messages=user(f"nonce:n{number}x"), max_tokens=3 + number % 5
        )
        assert answer.choices[0].message.content.startswith(f"nonce:n{number}x")

    await asyncio.gather(*[ask(number) for number in range(100)])
    assert engine.service.engine.ranks[0].scheduler.counters.peak_running == 8
    assert idle(engine)


async def test_embeddings_are_unit_vectors_that_depend_on_the_text(embedder: SimulatedEngine) -> None:
    async with AsyncOpenAI(base_url=f"{embedder.url}/v1", api_key="x", max_retries=0) as client:
        answer = await client.embeddings.create(model="emb", input=["a cat", "a dog", "a cat"])
        raw = await client.embeddings.create(model="emb", input="a cat", encoding_format="base64")
        with pytest.raises(openai.BadRequestError, match="does not support Matryoshka"):
            await client.embeddings.create(model="emb", input="a cat", dimensions=8)
    vectors = [item.embedding for item in answer.data]
    assert vectors[0] == vectors[2] != vectors[1]
    assert [len(vector) for vector in vectors] == [384, 384, 384]
    assert sqrt(sum(value * value for value in vectors[1])) == pytest.approx(1)
    assert array("f", base64.b64decode(raw.data[0].embedding)).tolist() == pytest.approx(vectors[0])
    assert answer.usage.prompt_tokens == 6
