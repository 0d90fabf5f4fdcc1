"""Chat completions through the gateway, with the OpenAI SDK."""

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionChunk

from tests.integration.fleet import Fleet
from tests.integration.prompts import chat, fresh, text_of


async def collect(client: AsyncOpenAI, **request: object) -> list[ChatCompletionChunk]:
    """All chunks of a streamed chat."""
    stream = await client.chat.completions.create(**request, stream=True)  # type: ignore[call-overload]
    return [chunk async for chunk in stream]


async def test_a_chat_is_answered_with_text_and_usage(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**chat(tokens=8))
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


async def test_a_stream_carries_the_same_text_as_the_plain_answer(client: AsyncOpenAI) -> None:
    request = chat(fresh(), tokens=12)
    plain = await client.chat.completions.create(**request)
    assert text_of(await collect(client, **request)) == plain.choices[0].message.content


async def test_a_stream_with_usage_ends_with_one_usage_chunk(client: AsyncOpenAI) -> None:
    chunks = await collect(client, **chat(tokens=9), stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9
    assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])
    assert chunks[-2].choices[0].finish_reason == "length"


async def test_a_stream_that_asked_for_no_usage_shows_none(client: AsyncOpenAI) -> None:
    chunks = await collect(client, **chat(tokens=9))
    assert all(chunk.usage is None for chunk in chunks)
    assert all(chunk.choices for chunk in chunks), "a usage chunk has no choices"
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_a_client_that_asks_for_usage_false_sees_none_either(client: AsyncOpenAI) -> None:
    chunks = await collect(client, **chat(tokens=5), stream_options={"include_usage": False})
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


async def test_continuous_usage_passes_through(client: AsyncOpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await collect(client, **chat(tokens=6), stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[-1] == 6


async def test_two_choices_come_back_as_two(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**{**chat(tokens=4), "n": 2, "temperature": 1})
    assert sorted(choice.index for choice in answer.choices) == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


async def test_fields_that_only_vllm_knows_reach_it(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**chat(tokens=5, extra_body={"return_token_ids": True}))
    assert len((answer.choices[0].model_extra or {})["token_ids"]) == 5


async def test_the_answer_names_the_backend_and_the_wait(client: AsyncOpenAI, fleet: Fleet) -> None:
    answer = await client.chat.completions.with_raw_response.create(**chat())
    assert answer.headers["x-gateway-backend"] in fleet.chat_names
    assert float(answer.headers["x-gateway-queue-ms"]) >= 0
    assert int(answer.headers["x-gateway-prefix-tokens"]) >= 0


async def test_a_clients_request_id_comes_back_and_goes_upstream(client: AsyncOpenAI) -> None:
    headers = {"X-Request-Id": "order-4711"}
    answer = await client.chat.completions.with_raw_response.create(**chat(), extra_headers=headers)
    assert answer.headers["x-request-id"] == "order-4711"
    assert answer.parse().id == "chatcmpl-order-4711", "engines name their answer after the id they were sent"


async def test_without_a_request_id_every_answer_gets_its_own(client: AsyncOpenAI) -> None:
    first, second = [await client.chat.completions.with_raw_response.create(**chat()) for _ in range(2)]
    ids = {first.headers["x-request-id"], second.headers["x-request-id"]}
    assert len(ids) == 2
    assert {f"chatcmpl-{each}" for each in ids} == {first.parse().id, second.parse().id}


async def test_an_unusable_request_id_is_replaced(client: AsyncOpenAI) -> None:
    headers = {"X-Request-Id": "x" * 5000}
    answer = await client.chat.completions.with_raw_response.create(**chat(), extra_headers=headers)
    assert answer.headers["x-request-id"] != "x" * 5000
    assert answer.parse().id == f"chatcmpl-{answer.headers['x-request-id']}"
