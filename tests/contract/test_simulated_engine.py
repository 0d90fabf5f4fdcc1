"""The simulated engine's answers have the shape of the recorded ones."""

import asyncio
import http.client
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtest.engine import EngineConfig, Limits, SimulatedEngine
from tests.contract.cases import CASES, CHAT, CHAT_PATH, CONTEXT_TOKENS, EMBEDDING_MODEL, MODEL, Case, get
from tests.contract.exchange import Answer, ask, connect, headers_of
from tests.contract.recording import RECORDINGS, load
from tests.contract.shape import answer_shape

LIMITS = Limits(max_num_seqs=32, max_num_batched_tokens=8192, block_size=32, num_blocks=16_384)
CONFIGS = {
    "chat": EngineConfig(model=MODEL, limits=LIMITS, time_scale=0, max_model_len=CONTEXT_TOKENS),
    "embedding": EngineConfig(model=EMBEDDING_MODEL, limits=LIMITS, time_scale=0, max_model_len=256, embedding=True),
    "strict": EngineConfig(model=MODEL, limits=LIMITS, time_scale=0, max_model_len=CONTEXT_TOKENS, api_key="secret"),
}

# A simulated engine publishes no KV events unless told to, and says so like a real one that does not.
RECORDED_AS = {"kv_event_sources": "embedding_kv_event_sources"}
# What the gateway reads from an engine's metrics.
WATCHED = frozenset(
    {
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
        *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total"),
        *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"),
        *("vllm:cache_config_info", "vllm:time_to_first_token_seconds_count", "vllm:iteration_tokens_total_count"),
    }
)


@pytest.fixture
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[SimulatedEngine]:
    """A simulated engine of the kind that the test's case names; the chat engine otherwise."""
    case = getattr(request, "param", None)
    async with SimulatedEngine(CONFIGS[case.engine if isinstance(case, Case) else "chat"]) as running:
        yield running


async def answer_of(engine: SimulatedEngine, case: Case) -> Answer:
    """The client is a plain blocking one, as for the recording."""
    return await asyncio.to_thread(ask, engine.url, case)


@pytest.mark.parametrize(
    ("engine", "case"), [(case, case) for case in CASES], indirect=["engine"], ids=lambda c: c.name
)
async def test_an_answer_has_the_recorded_shape(engine: SimulatedEngine, case: Case) -> None:
    recorded = answer_shape(load(RECORDED_AS.get(case.name, case.name)))
    simulated = answer_shape(await answer_of(engine, case))
    if case.engine == "strict":  # recorded with --enable-request-id-headers, which is not simulated
        recorded["headers"].pop("x-request-id", None)
    assert simulated == recorded


async def test_a_repeated_long_prompt_is_found_in_the_cache_to_its_last_full_block(engine: SimulatedEngine) -> None:
    usages = []
    for name in ("chat_long_cold", "chat_long_cached"):
        [case] = [each for each in CASES if each.name == name]
        usages.append((await answer_of(engine, case))["json"]["usage"])
    for simulated, recorded in zip(usages, (load("chat_long_cold"), load("chat_long_cached")), strict=True):
        details, real = simulated["prompt_tokens_details"], recorded["json"]["usage"]["prompt_tokens_details"]
        block = LIMITS.block_size
        full_blocks = (simulated["prompt_tokens"] - 1) // block * block
        cached_or_created = {name: full_blocks if count else 0 for name, count in real.items() if count is not None}
        assert {name: details[name] for name in cached_or_created} == cached_or_created


def metric_labels(text: str) -> dict[str, frozenset[str]]:
    """The names of vLLM's samples, each with the names of its labels."""
    return {
        sample.name: frozenset(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("vllm:")
    }


@pytest.mark.parametrize(
    ("engine", "recorded"),
    [(Case("any", "/"), "metrics.txt"), (Case("any", "/", engine="embedding"), "embedding_metrics.txt")],
    indirect=["engine"],
    ids=["chat", "embedding"],
)
async def test_metrics_have_the_recorded_names_and_labels(engine: SimulatedEngine, recorded: str) -> None:
    if recorded == "metrics.txt":
        await answer_of(engine, Case("chat", CHAT_PATH, CHAT))
    simulated = metric_labels((await answer_of(engine, get("metrics", "/metrics")))["text"])
    real = metric_labels((RECORDINGS / recorded).read_text())
    assert set(simulated) <= set(real), "names that a real engine does not have"
    assert {name: labels for name, labels in real.items() if name in simulated} == simulated
    assert {name for name in WATCHED if name in real} <= set(simulated)


async def test_a_clients_request_id_names_the_answer(engine: SimulatedEngine) -> None:
    case = Case("named", CHAT_PATH, CHAT, headers={"X-Request-Id": "abc-123"})
    assert (await answer_of(engine, case))["json"]["id"] == load("chat_request_id")["json"]["id"] == "chatcmpl-abc-123"


async def test_a_full_engine_refuses_like_the_recorded_one() -> None:
    slow = replace(CONFIGS["chat"], time_scale=1.0, max_num_queued_reqs=2)
    async with SimulatedEngine(slow) as engine:
        endless = Case("endless", CHAT_PATH, {**CHAT, "max_tokens": 7000, "ignore_eos": True, "stream": True})
        connections = [connect(engine.url) for _ in range(2)]
        for connection in connections:
            await asyncio.to_thread(begin, connection, endless)
        try:
            refused = await answer_of(engine, Case("refused", CHAT_PATH, CHAT))
        finally:
            for connection in connections:
                connection.close()
    recorded = load("strict_queue_full")
    recorded["headers"] = [header for header in recorded["headers"] if header[0] != "x-request-id"]
    assert answer_shape(refused) == answer_shape(recorded)


def begin(connection: http.client.HTTPConnection, case: Case) -> http.client.HTTPResponse:
    """Send a request and read its answer's head."""
    connection.request(case.method, case.path, case.payload(), headers_of(case))
    return connection.getresponse()


async def test_a_terminated_engine_ends_streams_like_the_recorded_one() -> None:
    engine = SimulatedEngine(replace(CONFIGS["chat"], time_scale=1.0))
    await engine.start()
    endless = Case("endless", CHAT_PATH, {**CHAT, "max_tokens": 7000, "ignore_eos": True, "stream": True})
    connection = connect(engine.url)
    try:
        response = await asyncio.to_thread(begin, connection, endless)
        await asyncio.to_thread(response.readline)
        reading = asyncio.create_task(asyncio.to_thread(response.read))
        await engine.stop()
        last = (await reading).decode().strip().split("\n\n")[-2:]
    finally:
        connection.close()
        await engine.stop()
    assert last in [ending(name) for name in ("terminated_at_once_with_error", "terminated_at_once_with_abort")]


def ending(name: str) -> list[str]:
    """The last two events of a recorded stream."""
    text = json.loads((RECORDINGS / f"{name}.json").read_text())["stream"]["text"]
    return [line.strip() for line in text.split("\r\n") if line.startswith("data: ")][-2:]
