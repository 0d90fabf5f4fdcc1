"""Errors as the SDK raises them: the gateway's own, and an engine's passed through."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from openai import (
    APIStatusError,
    AsyncOpenAI,
    AuthenticationError,
    BadRequestError,
    InternalServerError,
    NotFoundError,
    RateLimitError,
)
from yarl import URL

from loadtest.servers.processes import free_ports
from tests.integration.conftest import StartGateway, whole_fleet_is_up
from tests.integration.fleet import CHAT_MODEL, CONTEXT_TOKENS, EMBEDDING_MODEL, Fleet
from tests.integration.gateway_process import Gateway, running_gateway
from tests.integration.observed import engines_become_idle, eventually, read
from tests.integration.prompts import ENDLESS_TOKENS, as_json, chat

TOO_LONG = "import sys\n" * CONTEXT_TOKENS
BACKEND_ONLY = [
    ("GET", "/metrics"),
    ("GET", "/server_info"),
    ("GET", "/kv_event_sources"),
    ("GET", "/openapi.json"),
    ("POST", "/sleep"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/%2e%2e/sleep"),
    ("POST", "/v1/x/../../sleep"),
    ("GET", "/admin/backends"),
]


async def send(
    gateway: Gateway, method: str, path: str, raw: bytes | None = None, **headers: str
) -> tuple[int, Any, Any]:
    """Status, JSON body and headers of a request that the SDK would not send."""
    async with aiohttp.ClientSession() as session:
        url = gateway.url + path
        sent = {"content-type": "application/json", **headers}
        async with session.request(method, URL(url, encoded=True), data=raw, headers=sent) as answer:
            return answer.status, await answer.json(), answer.headers


def assert_is_openai_error(body: Any) -> None:
    """The one shape of error bodies."""
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]


async def direct_error(fleet: Fleet, body: dict[str, Any]) -> Any:
    """The error body that the engine itself answers to a chat."""
    url = f"{fleet.chat_urls[0]}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        assert answer.status == 400
        return await answer.json()


async def test_an_unknown_model_is_not_found(client: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError) as caught:
        await client.chat.completions.create(**{**chat(), "model": "absent"})
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert "absent" in caught.value.message
    assert "x-request-id" in caught.value.response.headers
    with pytest.raises(NotFoundError):
        await client.embeddings.create(model="absent", input="a")


async def test_a_prompt_over_the_context_gets_the_engines_words_and_the_code_that_clients_know(
    client: AsyncOpenAI, fleet: Fleet
) -> None:
    request = chat(TOO_LONG)
    with pytest.raises(BadRequestError) as caught:
        await client.chat.completions.create(**request)
    assert f"maximum context length is {CONTEXT_TOKENS} tokens" in caught.value.message
    direct = await direct_error(fleet, as_json(request))
    assert caught.value.response.json() == {"error": {**direct["error"], "code": "context_length_exceeded"}}
    with pytest.raises(BadRequestError):
        await client.chat.completions.create(**request, stream=True)


async def test_a_field_that_the_engine_refuses_gets_the_engines_own_answer(client: AsyncOpenAI, fleet: Fleet) -> None:
    request = {**chat("the same in both"), "top_p": 7}
    with pytest.raises(BadRequestError) as caught:
        await client.chat.completions.create(**request)
    assert caught.value.param == "top_p"
    assert caught.value.response.json() == await direct_error(fleet, as_json(request))


async def test_an_over_long_embedding_fails_alone(client: AsyncOpenAI) -> None:
    good, bad = await asyncio.gather(
        client.embeddings.create(model=EMBEDDING_MODEL, input="short"),
        client.embeddings.create(model=EMBEDDING_MODEL, input="far too long " * 300),
        return_exceptions=True,
    )
    assert not isinstance(good, BaseException)
    assert len(good.data) == 1
    assert isinstance(bad, BadRequestError)
    assert "maximum context length" in bad.message


@pytest.mark.parametrize(
    "raw", [b'{"model": "tiny", ', b"[1, 2]", b"", b"\xff\xfe", b'{"messages": []}', b'{"model": 7}']
)
async def test_a_malformed_body_is_a_bad_request(gateway: Gateway, client: AsyncOpenAI, raw: bytes) -> None:
    status, body, headers = await send(gateway, "POST", "/v1/chat/completions", raw)
    assert status == 400
    assert_is_openai_error(body)
    assert "x-request-id" in headers


async def test_a_compressed_body_is_refused(gateway: Gateway, client: AsyncOpenAI) -> None:
    status, body, _ = await send(gateway, "POST", "/v1/chat/completions", b"\x1f\x8b", **{"content-encoding": "gzip"})
    assert status == 415
    assert_is_openai_error(body)


@pytest.mark.parametrize(("method", "path"), BACKEND_ONLY)
async def test_nothing_else_of_a_backend_can_be_reached(
    gateway: Gateway, client: AsyncOpenAI, method: str, path: str
) -> None:
    status, body, _ = await send(gateway, method, path)
    assert status == 404
    assert_is_openai_error(body)


async def test_a_wrong_method_says_which_one_is_right(gateway: Gateway, client: AsyncOpenAI) -> None:
    status, body, headers = await send(gateway, "GET", "/v1/chat/completions")
    assert status == 405
    assert "POST" in headers["allow"]
    assert_is_openai_error(body)


async def test_a_wrong_key_is_refused_and_a_right_one_works(start_gateway: StartGateway, fleet: Fleet) -> None:
    with start_gateway({"auth": {"keys": [{"name": "alice", "key": "sk-alice"}]}}) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with gateway.client(api_key="sk-mallory") as wrong:
            with pytest.raises(AuthenticationError) as caught:
                await wrong.chat.completions.create(**chat())
        assert caught.value.code == "invalid_api_key"
        async with gateway.client(api_key="sk-alice") as right:
            assert (await right.chat.completions.create(**chat())).choices


@asynccontextmanager
async def both_backends_busy(gateway: Gateway, fleet: Fleet) -> AsyncIterator[AsyncOpenAI]:
    """Each backend's only slot is taken by a stream that does not end by itself."""
    await whole_fleet_is_up(gateway, fleet)
    async with gateway.client() as sdk:
        patient = sdk.with_options(max_retries=9)  # a backend that is late to answer its probe gets nothing meanwhile
        streams = [await patient.chat.completions.create(**chat(tokens=ENDLESS_TOKENS), stream=True) for _ in range(2)]
        try:
            yield sdk
        finally:
            for stream in streams:
                await stream.close()
    await engines_become_idle(fleet.urls)


def assert_says_when_to_retry(error: APIStatusError) -> None:
    """Both forms of the header, agreeing with each other."""
    seconds = int(error.response.headers["retry-after"])
    milliseconds = int(error.response.headers["retry-after-ms"])
    assert 0 < milliseconds <= seconds * 1000 <= 120_000


async def test_a_full_queue_is_a_rate_limit_error_that_says_when_to_retry(
    start_gateway: StartGateway, fleet: Fleet
) -> None:
    with start_gateway({"admission": {"max_queued_requests": 0}}, max_in_flight=1) as gateway:
        async with both_backends_busy(gateway, fleet) as sdk:
            with pytest.raises(RateLimitError) as caught:
                await sdk.chat.completions.create(**chat())
            assert caught.value.code == "queue_full"
            assert_says_when_to_retry(caught.value)


async def test_an_expired_wait_is_a_rate_limit_error_that_says_when_to_retry(
    start_gateway: StartGateway, fleet: Fleet
) -> None:
    with start_gateway({"admission": {"max_wait_seconds": 0.3}}, max_in_flight=1) as gateway:
        async with both_backends_busy(gateway, fleet) as sdk:
            with pytest.raises(RateLimitError) as caught:
                await sdk.chat.completions.create(**chat())
            assert caught.value.code == "queue_timeout"
            assert_says_when_to_retry(caught.value)
            assert await read(gateway.admin_url, "gateway_queued_requests") == 0


async def test_without_a_living_backend_the_gateway_lives_but_is_not_ready(tmp_path: Any) -> None:
    backends = [{"url": f"http://127.0.0.1:{free_ports(1)[0]}"}]
    config = {"backends": backends, "admission": {"max_wait_seconds": 0.5}}
    with running_gateway(tmp_path, config, ready_path="/livez") as gateway:
        for path in ("/readyz", "/health"):
            async with aiohttp.ClientSession() as session, session.get(gateway.url + path) as answer:
                assert answer.status == 503
        async with gateway.client() as sdk:
            with pytest.raises(InternalServerError) as caught:
                await sdk.chat.completions.create(**chat())
        assert caught.value.status_code == 503
        assert caught.value.code == "no_backend_available"
        assert_says_when_to_retry(caught.value)


async def test_backends_given_as_flags_replace_those_of_the_file(fleet: Fleet, tmp_path: Any) -> None:
    config = {"backends": [{"url": f"http://127.0.0.1:{free_ports(1)[0]}"}]}
    flags = [flag for url in fleet.chat_urls for flag in ("--backend", url)]
    with running_gateway(tmp_path, config, flags) as gateway:

        async def both_up() -> bool:
            return await read(gateway.admin_url, "gateway_backend_up") == 2

        await eventually(both_up, "both backends are up")
        async with gateway.client() as sdk:
            assert [model.id for model in (await sdk.models.list()).data] == [CHAT_MODEL]
