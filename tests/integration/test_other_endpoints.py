"""Completions, embeddings, responses, messages, token counts and models through the gateway."""

import asyncio
import base64
import json
from typing import Any

import aiohttp
import numpy as np
import pytest
from openai import AsyncOpenAI, NotFoundError

from tests.integration.fleet import CHAT_MODEL, CONTEXT_TOKENS, EMBEDDING_MODEL, Fleet
from tests.integration.gateway_process import Gateway
from tests.integration.prompts import fresh

SENTENCES = ["The cat sat on the mat.", "A dog barked.", "Parallel requests share one batch.", "Colours: red, green."]
COMPLETION: dict[str, Any] = {
    "model": CHAT_MODEL,
    "max_tokens": 6,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}


async def post(url: str, path: str, body: dict[str, Any]) -> Any:
    """A plain POST's JSON answer, which must be a success."""
    async with aiohttp.ClientSession() as session, session.post(f"{url}{path}", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def post_for_events(url: str, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """The named server-sent events of a streamed POST."""
    async with aiohttp.ClientSession() as session, session.post(f"{url}{path}", json=body) as answer:
        assert answer.content_type == "text/event-stream"
        text = await answer.text()
    events = [dict(line.split(": ", 1) for line in event.split("\n")) for event in text.strip().split("\n\n")]
    return [(event["event"], json.loads(event["data"])) for event in events]


async def test_a_completion_is_answered_and_streams_the_same_text(client: AsyncOpenAI) -> None:
    request = {**COMPLETION, "prompt": fresh()}
    plain = await client.completions.create(**request)
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 6
    stream = await client.completions.create(**request, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == plain.choices[0].text
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


async def test_a_completion_of_several_prompts_answers_each(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(**COMPLETION, prompt=[fresh(), fresh(), fresh()])
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 18


async def test_a_completion_takes_a_prompt_of_token_ids(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(**COMPLETION, prompt=[301, 302, 303, 304])
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_embeddings_equal_what_the_engine_itself_answers(gateway: Gateway, fleet: Fleet, encoding: str) -> None:
    direct = await post(fleet.embedding_url, "/v1/embeddings", {"model": EMBEDDING_MODEL, "input": SENTENCES})
    async with gateway.client() as sdk:
        answer = await sdk.embeddings.create(model=EMBEDDING_MODEL, input=SENTENCES, encoding_format=encoding)  # type: ignore[arg-type]
    vectors = [item.embedding for item in answer.data]
    if encoding == "base64":  # asked for explicitly, the SDK hands over the text as it came
        vectors = [np.frombuffer(base64.b64decode(str(each)), "<f4").tolist() for each in vectors]
    assert [item.index for item in answer.data] == list(range(len(SENTENCES)))
    assert answer.usage.prompt_tokens == direct["usage"]["prompt_tokens"]
    np.testing.assert_allclose(vectors, [item["embedding"] for item in direct["data"]], atol=1e-5)


async def test_many_small_embedding_requests_at_once_get_each_their_own_answer(
    client: AsyncOpenAI, fleet: Fleet
) -> None:
    texts = [f"{sentence} Variation {number}." for number in range(8) for sentence in SENTENCES]
    direct = await post(fleet.embedding_url, "/v1/embeddings", {"model": EMBEDDING_MODEL, "input": texts})
    answers = await asyncio.gather(*(client.embeddings.create(model=EMBEDDING_MODEL, input=text) for text in texts))
    vectors = [answer.data[0].embedding for answer in answers]
    assert all(len(answer.data) == 1 and answer.data[0].index == 0 for answer in answers)
    assert sum(answer.usage.prompt_tokens for answer in answers) == direct["usage"]["prompt_tokens"]
    np.testing.assert_allclose(vectors, [item["embedding"] for item in direct["data"]], atol=1e-2)
    assert np.argmax(
        np.array(vectors) @ np.array([item["embedding"] for item in direct["data"]]).T, axis=1
    ).tolist() == [*range(len(texts))]


async def test_a_response_is_answered_and_streams_its_events(client: AsyncOpenAI) -> None:
    request: dict[str, Any] = {"model": CHAT_MODEL, "input": fresh(), "max_output_tokens": 6, "temperature": 0}
    answer = await client.responses.create(**request)
    assert answer.object == "response"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 6
    stream = await client.responses.create(**request, stream=True)
    events = [event async for event in stream]
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer.output_text


async def test_a_message_is_answered_and_streams_its_events(client: AsyncOpenAI, gateway: Gateway) -> None:
    body = {"model": CHAT_MODEL, "messages": [{"role": "user", "content": fresh()}], "max_tokens": 6, "temperature": 0}
    answer = await post(gateway.url, "/v1/messages", body)
    assert answer["type"] == "message"
    assert answer["usage"]["output_tokens"] == 6
    events = await post_for_events(gateway.url, "/v1/messages", {**body, "stream": True})
    assert [name for name, _ in (events[0], events[-1])] == ["message_start", "message_stop"]
    deltas = [data["delta"]["text"] for name, data in events if name == "content_block_delta"]
    assert "".join(deltas) == answer["content"][0]["text"]
    counted = {key: body[key] for key in ("model", "messages")}
    assert (await post(gateway.url, "/v1/messages/count_tokens", counted))["input_tokens"] > 0


async def test_tokenize_and_detokenize_are_each_others_inverse(client: AsyncOpenAI, gateway: Gateway) -> None:
    text = "def read(self, size):"
    tokens = await post(gateway.url, "/tokenize", {"model": CHAT_MODEL, "prompt": text})
    assert tokens["count"] == len(tokens["tokens"])
    back = await post(gateway.url, "/detokenize", {"model": CHAT_MODEL, "tokens": tokens["tokens"]})
    assert back["prompt"] == text


async def test_the_models_of_all_backends_are_listed_once(client: AsyncOpenAI) -> None:
    models = (await client.models.list()).data
    assert sorted(model.id for model in models) == sorted([CHAT_MODEL, EMBEDDING_MODEL])
    lengths = {model.id: (model.model_extra or {})["max_model_len"] for model in models}
    assert lengths == {CHAT_MODEL: CONTEXT_TOKENS, EMBEDDING_MODEL: 256}


async def test_one_model_can_be_looked_up_by_its_name(client: AsyncOpenAI) -> None:
    assert (await client.models.retrieve(CHAT_MODEL)).id == CHAT_MODEL
    with pytest.raises(NotFoundError) as caught:
        await client.models.retrieve("absent")
    assert caught.value.code == "model_not_found"


async def test_a_batch_of_conversations_gets_a_choice_for_each(gateway: Gateway, fleet: Fleet) -> None:
    chats = [[{"role": "user", "content": fresh()}] for _ in range(3)]
    body = {"model": CHAT_MODEL, "messages": chats, "max_tokens": 6, "temperature": 0}
    answer = await post(gateway.url, "/v1/chat/completions/batch", body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    direct = await post(fleet.chat_urls[0], "/v1/chat/completions/batch", body)
    assert [choice["message"]["content"] for choice in direct["choices"]] == [
        choice["message"]["content"] for choice in answer["choices"]
    ]


async def test_coheres_embeddings_equal_those_of_openais_endpoint(gateway: Gateway) -> None:
    usual = await post(gateway.url, "/v1/embeddings", {"model": EMBEDDING_MODEL, "input": SENTENCES})
    body = {"model": EMBEDDING_MODEL, "texts": SENTENCES}
    answer = await post(gateway.url, "/v2/embed", body)
    vectors = [item["embedding"] for item in usual["data"]]
    np.testing.assert_allclose(answer["embeddings"]["float"], vectors, atol=1e-5)


async def test_an_invocation_goes_to_the_endpoint_that_its_fields_are_for(gateway: Gateway) -> None:
    chat = {"model": CHAT_MODEL, "messages": [{"role": "user", "content": fresh()}], "max_tokens": 3}
    assert (await post(gateway.url, "/invocations", chat))["object"] == "chat.completion"
    completion = {"model": CHAT_MODEL, "prompt": fresh(), "max_tokens": 3}
    assert (await post(gateway.url, "/invocations", completion))["object"] == "text_completion"
    inputs = {"model": EMBEDDING_MODEL, "input": SENTENCES}
    assert len((await post(gateway.url, "/invocations", inputs))["data"]) == len(SENTENCES)


async def test_version_load_and_ping_are_those_of_the_fleet(gateway: Gateway, fleet: Fleet) -> None:
    async with aiohttp.ClientSession() as session:
        async with (
            session.get(f"{fleet.chat_urls[0]}/version") as direct,
            session.get(f"{gateway.url}/version") as ours,
        ):
            assert await ours.json() == await direct.json()
        async with session.get(f"{gateway.url}/load") as answer:
            assert (await answer.json())["server_load"] == 0
        async with session.post(f"{gateway.url}/ping") as answer:
            assert answer.status == 200
