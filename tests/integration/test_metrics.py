"""What the gateway counts is what happened."""

from openai import AsyncOpenAI, BadRequestError, NotFoundError

from tests.integration.conftest import StartGateway, whole_fleet_is_up
from tests.integration.fleet import CHAT_MODEL, CONTEXT_TOKENS, EMBEDDING_MODEL, Fleet
from tests.integration.observed import eventually, gateway_holds_nothing, samples, total
from tests.integration.prompts import chat, long_prefix


async def some_traffic(sdk: AsyncOpenAI) -> tuple[int, int]:
    """3 chats (one of them streamed), 1 embedding, 1 unknown model, 1 refused prompt; prompt and completion tokens."""
    usages = [(await sdk.chat.completions.create(**chat(tokens=tokens))).usage for tokens in (5, 7)]
    stream = await sdk.chat.completions.create(**chat(tokens=11), stream=True, stream_options={"include_usage": True})
    usages.append([chunk async for chunk in stream][-1].usage)
    embedded = await sdk.embeddings.create(model=EMBEDDING_MODEL, input="a cat")
    for content, model in (("hello", "absent"), ("import sys\n" * CONTEXT_TOKENS, CHAT_MODEL)):
        try:
            await sdk.chat.completions.create(**{**chat(content), "model": model})
        except (NotFoundError, BadRequestError):
            continue
        raise AssertionError("the request should have been refused")
    prompt = sum(usage.prompt_tokens for usage in usages if usage) + embedded.usage.prompt_tokens
    return prompt, sum(usage.completion_tokens for usage in usages if usage)


async def test_requests_tokens_and_latencies_are_counted(start_gateway: StartGateway, fleet: Fleet) -> None:
    with start_gateway({}) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with gateway.client() as sdk:
            prompt_tokens, completion_tokens = await some_traffic(sdk)

        async def all_counted() -> bool:
            found = await samples(gateway.admin_url)
            counts = [total(found, "gateway_requests_total", endpoint=endpoint) for endpoint in ("chat", "embeddings")]
            return counts == [5, 1]

        await eventually(all_counted, "five chats and one embedding counted")
        found = await samples(gateway.admin_url)
    assert total(found, "gateway_requests_total", model=CHAT_MODEL, outcome="completed") == 3
    assert total(found, "gateway_requests_total", model=EMBEDDING_MODEL, outcome="completed") == 1
    assert total(found, "gateway_requests_total", outcome="rejected") == 1
    assert total(found, "gateway_requests_total", model=CHAT_MODEL, outcome="refused_by_backend") == 1
    assert not [sample for sample in found if sample.labels.get("model") == "absent"], "a client chose this label"
    assert total(found, "gateway_completion_tokens_total") == completion_tokens
    assert total(found, "gateway_prompt_tokens_total") == prompt_tokens
    assert total(found, "gateway_time_to_first_token_seconds_count") >= 1
    assert total(found, "gateway_request_duration_seconds_count") >= 4
    assert total(found, "gateway_upstream_attempts_total") == 5
    assert total(found, "gateway_backend_up") == 3


async def test_nothing_is_in_flight_after_the_traffic(start_gateway: StartGateway, fleet: Fleet) -> None:
    with start_gateway({}) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with gateway.client() as sdk:
            await some_traffic(sdk)
        await gateway_holds_nothing(gateway.admin_url)


async def test_a_streams_tokens_are_counted_though_its_client_asked_for_no_usage(
    start_gateway: StartGateway, fleet: Fleet
) -> None:
    with start_gateway({}) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with gateway.client() as sdk:
            stream = await sdk.chat.completions.create(**chat(tokens=13), stream=True)
            async for chunk in stream:
                assert chunk.usage is None

        async def counted() -> bool:
            return total(await samples(gateway.admin_url), "gateway_completion_tokens_total") == 13

        await eventually(counted, "13 completion tokens counted")


async def test_actual_prefix_hits_are_what_the_engines_reported(start_gateway: StartGateway, fleet: Fleet) -> None:
    prefix = long_prefix()
    with start_gateway({}) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with gateway.client() as sdk:
            cached = 0
            for turn in range(3):
                usage = (await sdk.chat.completions.create(**chat(f"{prefix} Turn {turn}.", tokens=2))).usage
                assert usage is not None
                assert usage.prompt_tokens_details is not None
                cached += usage.prompt_tokens_details.cached_tokens or 0

        async def counted() -> bool:
            found = await samples(gateway.admin_url)
            return total(found, "gateway_prefix_hit_tokens_total", kind="actual") == cached

        assert cached > 0
        await eventually(counted, f"{cached} cached tokens counted")
        found = await samples(gateway.admin_url)
        assert total(found, "gateway_prefix_hit_tokens_total", kind="predicted") > 0
