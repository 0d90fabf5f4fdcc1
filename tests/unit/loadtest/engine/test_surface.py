"""What is served: routes, keys, errors, the endpoints without an OpenAI client."""

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest

from loadtest.engine import EngineConfig, SimulatedEngine


async def post(http: aiohttp.ClientSession, url: str, value: Any, **headers: str) -> tuple[int, Any]:
    async with http.post(url, json=value, headers=headers) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize("path", ["/sleep", "/reset_prefix_cache", "/collective_rpc", "/inference/v1/generate"])
async def test_routes_that_clients_must_not_reach_exist_in_dev_mode_only(
    http: aiohttp.ClientSession, engine: SimulatedEngine, path: str
) -> None:
    async with http.post(engine.url + path) as answer:
        assert answer.status == 200
    async with SimulatedEngine(EngineConfig(time_scale=0)) as plain, http.post(plain.url + path) as answer:
        assert (answer.status, await answer.json()) == (404, {"detail": "Not Found"})


async def test_control_routes_and_scripts_need_the_control_flag(http: aiohttp.ClientSession) -> None:
    async with SimulatedEngine(EngineConfig(time_scale=0)) as plain:
        async with http.get(f"{plain.url}/sim/ledger") as answer:
            assert answer.status == 404
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        script = json.dumps({"status": 500})
        status, _ = await post(http, f"{plain.url}/v1/chat/completions", body, **{"x-sim-script": script})
        assert status == 200


async def test_the_key_guards_v1_and_nothing_else(http: aiohttp.ClientSession) -> None:
    async with SimulatedEngine(EngineConfig(time_scale=0, api_key="k")) as guarded:
        for path, headers, expected in (
            ("/v1/models", {}, 401),
            ("/v1/models", {"Authorization": "Bearer wrong"}, 401),
            ("/v1/models", {"Authorization": "bearer k"}, 200),
            ("/metrics", {}, 200),
            ("/health", {}, 200),
        ):
            async with http.get(guarded.url + path, headers=headers) as answer:
                assert answer.status == expected, path
        assert await post(http, f"{guarded.url}/tokenize", {"prompt": "abcd"}) == (
            200,
            {"count": 1, "max_model_len": 131072, "tokens": [1684234849], "token_strs": None},
        )


async def test_a_full_queue_refuses(http: aiohttp.ClientSession) -> None:
    async with SimulatedEngine(EngineConfig(time_scale=0, max_num_queued_reqs=2)) as small:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        assert (await post(http, f"{small.url}/v1/chat/completions", {**body, "n": 2}))[0] == 200
        status, answer = await post(http, f"{small.url}/v1/chat/completions", {**body, "n": 3, "stream": True})
        assert (status, answer["error"]["type"]) == (503, "Service Unavailable")
        assert small.service.engine.rejected == 1


async def test_messages_are_answered_in_anthropics_shape(http: aiohttp.ClientSession, engine: SimulatedEngine) -> None:
    body = {"model": "sim", "system": "terse", "messages": [{"role": "user", "content": "nonce:m"}], "max_tokens": 9}
    status, answer = await post(http, f"{engine.url}/v1/messages", body)
    assert (status, answer["type"], answer["stop_reason"]) == (200, "message", "max_tokens")
    assert answer["content"][0]["text"].startswith("nonce:m")
    assert answer["usage"]["output_tokens"] == 9
    async with http.post(f"{engine.url}/v1/messages", json={**body, "stream": True}) as stream:
        events = [event for event in (await stream.text()).split("\n\n") if event]
    text = "".join(json.loads(e.split("data: ")[1])["delta"]["text"] for e in events if "content_block_delta" in e)
    assert text == answer["content"][0]["text"]
    assert events[-1].startswith("event: message_stop")
    assert (await post(http, f"{engine.url}/v1/messages", {**body, "model": "y"}))[1]["type"] == "error"


async def test_stored_responses_are_found_and_continued(http: aiohttp.ClientSession) -> None:
    async with SimulatedEngine(EngineConfig(time_scale=0, responses_store=True)) as keeper:
        url = f"{keeper.url}/v1/responses"
        _, first = await post(http, url, {"input": "x" * 300, "max_output_tokens": 20})
        async with http.get(f"{url}/{first['id']}") as answer:
            assert await answer.json() == first
        status, second = await post(
            http, url, {"input": "more", "previous_response_id": first["id"], "max_output_tokens": 2}
        )
        assert status == 200
        assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0
        assert (await post(http, f"{url}/{first['id']}/cancel", {}))[0] == 400
        assert (await post(http, url, {"input": "more", "previous_response_id": "resp_none"}))[0] == 404


async def test_a_response_in_the_background_is_queued_until_it_is_complete_or_cancelled(
    http: aiohttp.ClientSession,
) -> None:
    async with SimulatedEngine(EngineConfig(responses_store=True)) as keeper:
        url = f"{keeper.url}/v1/responses"

        async def status_of(response_id: str) -> str:
            async with http.get(f"{url}/{response_id}") as answer:
                return str((await answer.json())["status"])

        _, brief = await post(http, url, {"input": "x", "background": True, "max_output_tokens": 2})
        assert brief["status"] == "queued"
        while await status_of(brief["id"]) == "queued":
            await asyncio.sleep(0.01)
        assert await status_of(brief["id"]) == "incomplete"
        _, long = await post(http, url, {"input": "x", "background": True, "max_output_tokens": 20000})
        assert await status_of(long["id"]) == "queued"
        assert (await post(http, f"{url}/{long['id']}/cancel", {}))[1]["status"] == "cancelled"
        assert await status_of(long["id"]) == "cancelled"
        while keeper.service.engine.num_requests:
            await asyncio.sleep(0.01)


async def test_responses_are_not_stored_by_default(http: aiohttp.ClientSession, engine: SimulatedEngine) -> None:
    _, answer = await post(http, f"{engine.url}/v1/responses", {"input": "x", "max_output_tokens": 2})
    async with http.get(f"{engine.url}/v1/responses/{answer['id']}") as found:
        assert found.status == 404


async def test_audio_is_read_and_answered(http: aiohttp.ClientSession, engine: SimulatedEngine) -> None:
    def form(model: str) -> aiohttp.FormData:
        data = aiohttp.FormData()
        data.add_field("model", model)
        data.add_field("file", b"RIFF" + bytes(300_000), filename="a.wav", content_type="audio/wav")
        return data

    async with http.post(f"{engine.url}/v1/audio/transcriptions", data=form("sim")) as answer:
        assert await answer.json() == {"text": "the cat sat on the mat", "usage": {"type": "duration", "seconds": 18}}
    async with http.post(f"{engine.url}/v1/audio/translations", data=form("other")) as answer:
        assert answer.status == 404


async def test_documents_are_ranked_and_scored(http: aiohttp.ClientSession, embedder: SimulatedEngine) -> None:
    documents = ["a dog", "a cat", "a mat"]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        body = {"model": "emb", "query": "a cat", "documents": documents, "top_n": 2}
        _, ranked = await post(http, embedder.url + path, body)
        assert ranked["results"][0]["index"] == 1
        assert ranked["results"][0]["relevance_score"] == pytest.approx(1)
        assert len(ranked["results"]) == 2
    _, scored = await post(http, f"{embedder.url}/score", {"text_1": "a cat", "text_2": documents})
    assert [item["index"] for item in scored["data"]] == [0, 1, 2]
    assert scored["data"][1]["score"] > max(scored["data"][0]["score"], scored["data"][2]["score"])


async def test_one_bad_input_fails_the_whole_list(http: aiohttp.ClientSession, embedder: SimulatedEngine) -> None:
    url = f"{embedder.url}/v1/embeddings"
    status, answer = await post(http, url, {"model": "emb", "input": ["fine", "long " * 500]})
    assert (status, answer["error"]["param"]) == (400, "input_tokens")
    assert (await post(http, url, {"model": "emb", "input": ["a", [1, 2]]}))[0] == 400
    assert (await post(http, url, {"model": "emb", "input": [[1, 2], [3]]}))[1]["usage"]["prompt_tokens"] == 3
    assert (await post(http, url, {"model": "emb", "input": ""}))[0] == 200


async def test_pooling_and_classify_answer(http: aiohttp.ClientSession, embedder: SimulatedEngine) -> None:
    _, pooled = await post(http, f"{embedder.url}/pooling", {"model": "emb", "input": "a cat"})
    assert len(pooled["data"][0]["data"]) == 384
    _, classified = await post(http, f"{embedder.url}/classify", {"model": "emb", "input": ["a", "b"]})
    assert [sum(item["probs"]) for item in classified["data"]] == pytest.approx([1, 1])


async def test_tokens_are_detokenised(http: aiohttp.ClientSession, engine: SimulatedEngine) -> None:
    _, tokens = await post(http, f"{engine.url}/tokenize", {"prompt": "häuser 🙂"})
    assert (await post(http, f"{engine.url}/detokenize", {"tokens": tokens["tokens"]}))[1] == {"prompt": "häuser 🙂"}


async def test_a_body_over_the_limit_is_too_large(http: aiohttp.ClientSession) -> None:
    async with SimulatedEngine(EngineConfig(time_scale=0, max_body_bytes=1000)) as small:
        status, _ = await post(http, f"{small.url}/v1/completions", {"prompt": "x" * 2000})
        assert status == 413


async def test_an_adapter_is_a_model_of_its_own(http: aiohttp.ClientSession) -> None:
    async with SimulatedEngine(EngineConfig(time_scale=0, lora_adapters=("poet",))) as adapted:
        async with http.get(f"{adapted.url}/v1/models") as answer:
            cards = (await answer.json())["data"]
        assert [(card["id"], card["parent"], card["max_model_len"]) for card in cards] == [
            ("sim", None, 131072),
            ("poet", "sim", None),
        ]
        hits = []
        for model in ("sim", "poet", "poet"):
            body = {"model": model, "prompt": "p" * 200, "max_tokens": 1}
            _, completion = await post(http, f"{adapted.url}/v1/completions", body)
            assert completion["model"] == model
            hits.append(completion["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert hits == [0, 0, 48]


async def test_the_api_server_may_cost_cpu_for_each_request_and_each_input(http: aiohttp.ClientSession) -> None:
    config = EngineConfig(time_scale=0, embedding=True, api_request_seconds=0.05, api_input_seconds=0.02)
    async with SimulatedEngine(config) as costly:
        before = time.thread_time()
        status, _ = await post(http, f"{costly.url}/v1/embeddings", {"input": ["a", "b", "c"]})
        assert status == 200
        assert 0.11 <= time.thread_time() - before < 0.5


async def test_what_is_said_depends_on_the_prompt_and_not_on_the_salt_of_its_cache(
    http: aiohttp.ClientSession, engine: SimulatedEngine
) -> None:
    said = set()
    for salt in ("one", "another"):
        asked = {"model": "sim", "prompt": "the same question", "max_tokens": 8, "cache_salt": salt}
        status, answer = await post(http, f"{engine.url}/v1/completions", asked)
        assert status == 200
        said.add(answer["choices"][0]["text"])
    assert len(said) == 1
