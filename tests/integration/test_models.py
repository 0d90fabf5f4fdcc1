"""Aliases of models with the SDK of OpenAI: every API answers with the name that the client used."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, InternalServerError

from tests.integration.conftest import StartGateway
from tests.integration.fleet import CHAT_FLAGS, CHAT_MODEL, EMBEDDING_MODEL, name_of, simulated_engine
from tests.integration.gateway_process import running_gateway
from tests.integration.prompts import fresh
from tests.integration.test_other_endpoints import SENTENCES, post, post_for_events

CHAT, EMBED = "gpt-4o", "text-embedding-3-small"
MODELS = {"models": {"aliases": {CHAT: CHAT_MODEL, EMBED: EMBEDDING_MODEL}}}


def prompt() -> Any:
    return [{"role": "user", "content": fresh()}]


async def check_generation(client: AsyncOpenAI) -> None:
    chat: dict[str, Any] = {"model": CHAT, "messages": prompt(), "max_tokens": 6}
    raw = await client.chat.completions.with_raw_response.create(**chat)
    assert raw.headers["x-gateway-model"] == CHAT_MODEL
    assert raw.parse().model == CHAT
    options = {"include_usage": True}
    chunks = [each async for each in await client.chat.completions.create(**chat, stream=True, stream_options=options)]
    assert {each.model for each in chunks} == {CHAT}
    assert chunks[-1].usage is not None
    text: dict[str, Any] = {"model": CHAT, "prompt": fresh(), "max_tokens": 6}
    assert (await client.completions.create(**text)).model == CHAT
    assert {each.model async for each in await client.completions.create(**text, stream=True)} == {CHAT}
    ask: dict[str, Any] = {"model": CHAT, "input": fresh(), "max_output_tokens": 6, "metadata": {"model": CHAT_MODEL}}
    response = await client.responses.create(**ask)
    assert (response.model, response.metadata) == (CHAT, {"model": CHAT_MODEL})
    events = [each async for each in await client.responses.create(**ask, stream=True)]
    answers = [each.response for each in events if hasattr(each, "response")]
    assert [answer.model for answer in answers] == [CHAT] * len(answers)
    assert len(answers) >= 2


async def test_every_api_answers_with_the_alias(start_gateway: StartGateway) -> None:
    with start_gateway(MODELS) as gateway:
        async with gateway.client() as client:
            await check_generation(client)
            for inputs in (SENTENCES[:1], SENTENCES):  # alone, and as a list
                assert (await client.embeddings.create(model=EMBED, input=inputs)).model == EMBED
            assert (await client.embeddings.create(model=EMBEDDING_MODEL, input=SENTENCES)).model == EMBEDDING_MODEL
            assert {CHAT, EMBED, CHAT_MODEL} <= {each.id async for each in client.models.list()}
        message = {"model": CHAT, "messages": prompt(), "max_tokens": 6}
        assert (await post(gateway.url, "/v1/messages", message))["model"] == CHAT
        events = await post_for_events(gateway.url, "/v1/messages", message | {"stream": True})
        assert [data["message"]["model"] for _, data in events if "message" in data] == [CHAT]
        rerank = {"model": EMBED, "query": "x", "documents": SENTENCES}
        assert (await post(gateway.url, "/v1/rerank", rerank))["model"] == EMBED


@pytest.mark.simulated("the real models have no adapters")
async def test_conversations_are_divided_by_weight_and_keep_their_model(tmp_path: Path) -> None:
    aliases = {"aliases": {"gpt": {CHAT_MODEL: 50, "canary": 50}}}
    with (
        simulated_engine(tmp_path, *CHAT_FLAGS, "--lora", "canary") as engine,
        running_gateway(tmp_path, {"backends": [{"url": engine.url}], "models": aliases}) as gateway,
    ):
        async with gateway.client() as client:
            found = Counter[str]()
            for _ in range(12):
                turns, models = prompt(), set()
                for _ in range(2):
                    raw = await client.chat.completions.with_raw_response.create(
                        model="gpt", messages=turns, max_tokens=4
                    )
                    answer = raw.parse()
                    assert answer.model == "gpt"
                    models.add(raw.headers["x-gateway-model"])
                    turns += [{"role": "assistant", "content": answer.choices[0].message.content}, *prompt()]
                assert len(models) == 1
                found.update(models)
    assert set(found) == {CHAT_MODEL, "canary"}


@pytest.mark.simulated("the real models have no adapters")
async def test_adapters_are_loaded_when_requests_come_for_them(tmp_path: Path) -> None:
    lora = {"base": CHAT_MODEL, "path": "/adapters/poet"}
    models = {"aliases": {"gpt": "poet"}, "poet": {"lora": lora}, "broken": {"lora": lora | {"base": "absent"}}}
    config = {"models": models, "admission": {"max_wait_seconds": 1.5}}
    with (
        simulated_engine(tmp_path, *CHAT_FLAGS) as strict,  # which refuses
        simulated_engine(tmp_path, *CHAT_FLAGS, "--dev-mode") as engine,
        running_gateway(tmp_path, {"backends": [{"url": each.url} for each in (strict, engine)], **config}) as gateway,
    ):
        async with gateway.client() as client:
            for model in ("poet", "gpt", CHAT_MODEL):
                raw = await client.chat.completions.with_raw_response.create(
                    model=model, messages=prompt(), max_tokens=4
                )
                assert raw.parse().model == model
                assert model == CHAT_MODEL or raw.headers["x-gateway-backend"] == name_of(engine)
            assert "poet" in {each.id async for each in client.models.list()}
            with pytest.raises(InternalServerError, match="No backend for model 'broken'"):
                await client.chat.completions.create(model="broken", messages=prompt(), max_tokens=4)
