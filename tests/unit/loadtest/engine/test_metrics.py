"""The /metrics page has vLLM's families and moves with the load."""

import re
from pathlib import Path

import aiohttp
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from loadtest.engine import SimulatedEngine
from tests.unit.loadtest.engine.support import eventually

RECORDED = Path(__file__).parents[3] / "contract" / "recordings" / "metrics.txt"
# Not imitated: they describe the accelerator, the multi-process front end, or Python.
OTHERS = re.compile(r"vllm:estimated_|python_|http_|process_")


async def page(http: aiohttp.ClientSession, engine: SimulatedEngine) -> str:
    async with http.get(f"{engine.url}/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return await answer.text()


def value(text: str, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    raise AssertionError(f"no {name} {labels}")


async def test_the_counters_count(http: aiohttp.ClientSession, engine: SimulatedEngine, client: AsyncOpenAI) -> None:
    prompt = "p" * 400
    for _ in range(2):
        await client.completions.create(model="sim", prompt=prompt, max_tokens=5, extra_body={"ignore_eos": True})
    text = await page(http, engine)
    label = {"model_name": "sim", "engine": "0"}
    assert value(text, "vllm:prompt_tokens_total", **label) == 200
    assert value(text, "vllm:generation_tokens_total", **label) == 10
    assert value(text, "vllm:prefix_cache_queries_total") == 200
    assert value(text, "vllm:prefix_cache_hits_total") == 96
    assert value(text, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 96
    assert value(text, "vllm:request_success_total", finished_reason="length") == 2
    assert value(text, "vllm:time_to_first_token_seconds_count") == 2
    assert value(text, "vllm:inter_token_latency_seconds_count") == 8
    assert value(text, "vllm:iteration_tokens_total_count") == 10
    assert value(text, "vllm:request_prompt_tokens_sum") == 200
    assert value(text, "vllm:num_requests_running") == value(text, "vllm:kv_cache_usage_perc") == 0


async def test_the_gauges_follow_the_load(http: aiohttp.ClientSession, slow_engine: SimulatedEngine) -> None:
    body = {"prompt": "p" * 400, "max_tokens": 2000, "ignore_eos": True, "n": 10, "stream": True}
    async with http.post(f"{slow_engine.url}/v1/completions", json=body):
        await eventually(lambda: slow_engine.service.engine.ranks[0].scheduler.num_running == 8)
        text = await page(http, slow_engine)
        assert value(text, "vllm:num_requests_running") == 8
        assert value(text, "vllm:num_requests_waiting") == 2
        assert value(text, "vllm:num_requests_waiting_by_reason", reason="capacity") == 2
        assert 0 < value(text, "vllm:kv_cache_usage_perc") < 0.1
    await eventually(lambda: slow_engine.service.engine.num_requests == 0)
    text = await page(http, slow_engine)
    assert value(text, "vllm:num_requests_running") == 0
    assert value(text, "sim_peak_requests") == 10


async def test_the_cache_is_described(http: aiohttp.ClientSession, engine: SimulatedEngine) -> None:
    text = await page(http, engine)
    assert value(text, "vllm:cache_config_info", block_size="16", kv_cache_size_tokens="32000", num_gpu_blocks="2000")
    assert value(text, "process_start_time_seconds") > 0


def shapes(text: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Sample name -> type and label names."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = (family.type, frozenset(sample.labels))
    return found


async def test_every_family_of_the_recorded_page_is_there(http: aiohttp.ClientSession, engine: SimulatedEngine) -> None:
    ours = shapes(await page(http, engine))
    recorded = {name: shape for name, shape in shapes(RECORDED.read_text()).items() if not OTHERS.match(name)}
    assert len(recorded) > 50
    assert {name: ours.get(name) for name in recorded} == recorded
