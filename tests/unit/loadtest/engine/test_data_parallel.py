"""Several engines behind one server: who gets a request, and what each shows of itself."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from loadtest.engine import EngineConfig, Limits, SimulatedEngine
from loadtest.engine.ranks import RankBalancer, RankLoad
from tests.unit.loadtest.engine.support import eventually, idle

LIMITS = Limits(max_num_seqs=2, max_num_batched_tokens=2048, block_size=16, num_blocks=200)
CONFIG = EngineConfig(limits=LIMITS, time_scale=0, max_model_len=2048, control=True, data_parallel_size=3)
PATH = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 2}


@pytest.fixture
async def ranks() -> AsyncIterator[SimulatedEngine]:
    """A fast engine of three ranks."""
    async with SimulatedEngine(CONFIG, seed=1) as running:
        yield running


async def ask(
    http: aiohttp.ClientSession, engine: SimulatedEngine, rank: str | None, path: str = PATH, **body: Any
) -> tuple[int, Any]:
    headers = {} if rank is None else {"X-data-parallel-rank": rank}
    async with http.post(engine.url + path, json={**BODY, **body}, headers=headers) as answer:
        value = await answer.json() if answer.content_type == "application/json" else await answer.text()
        return answer.status, value


def prefills(engine: SimulatedEngine) -> list[int]:
    return [rank.scheduler.counters.prompt_tokens for rank in engine.service.engine.ranks]


def load(in_flight: int = 0, waiting: int = 0, running: int = 0, kv_usage: float = 0.0) -> RankLoad:
    return RankLoad(in_flight, waiting, running, kv_usage=kv_usage)


def test_equal_ranks_take_turns() -> None:
    balancer = RankBalancer()
    assert [balancer.choose([load()] * 3) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 8))
def test_the_rank_with_the_fewest_requests_is_chosen(in_flight: list[int], earlier: int) -> None:
    balancer = RankBalancer()
    for _ in range(earlier):
        balancer.choose([load()] * len(in_flight))
    assert in_flight[balancer.choose([load(count) for count in in_flight])] == min(in_flight)


@pytest.mark.parametrize(
    ("busy", "score"),
    [
        (load(in_flight=3, waiting=1, running=1), 3.0),
        (load(in_flight=1, waiting=2, running=4), 6.0),
        (load(waiting=2, running=4, kv_usage=0.5), 6.0),
        (load(waiting=2, running=4, kv_usage=0.75), 9.0),
        (load(waiting=2, running=4, kv_usage=1.0), 12.0),
        (load(waiting=0, running=4, kv_usage=1.0), 4.0),
    ],
)
def test_waiting_requests_weigh_up_to_four_times_when_the_cache_is_full(busy: RankLoad, score: float) -> None:
    assert busy.score == score


async def test_a_rank_that_is_asked_for_answers_from_its_own_cache(
    http: aiohttp.ClientSession, ranks: SimulatedEngine
) -> None:
    cached = []
    for rank in ("1", "1", "2", "2"):
        status, answer = await ask(http, ranks, rank)
        assert status == 200
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 0
    assert [tokens > 0 for tokens in prefills(ranks)] == [False, True, True]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_other_generating_endpoints_obey_the_rank_too(
    http: aiohttp.ClientSession, ranks: SimulatedEngine, path: str
) -> None:
    assert (await ask(http, ranks, "2", path, prompt="hello"))[0] == 200
    assert [tokens > 0 for tokens in prefills(ranks)] == [False, False, True]


async def test_responses_go_where_there_is_room_whatever_rank_is_asked_for(
    http: aiohttp.ClientSession, ranks: SimulatedEngine
) -> None:
    assert (await ask(http, ranks, "7", "/v1/responses", input="hello"))[0] == 200


@pytest.mark.parametrize("rank", ["bad", "", None])
async def test_without_a_readable_rank_the_engine_balances(
    http: aiohttp.ClientSession, ranks: SimulatedEngine, rank: str | None
) -> None:
    for _ in range(3):
        assert (await ask(http, ranks, rank))[0] == 200
    assert all(tokens > 0 for tokens in prefills(ranks))


async def test_the_answers_of_one_request_spread_over_the_ranks_unless_it_asks_for_one(
    http: aiohttp.ClientSession, ranks: SimulatedEngine
) -> None:
    await ask(http, ranks, "0", n=3)
    assert [tokens > 0 for tokens in prefills(ranks)] == [True, False, False]
    await ask(http, ranks, None, n=3)
    assert all(tokens > 0 for tokens in prefills(ranks))


@pytest.mark.parametrize("rank", ["3", "-1"])
async def test_a_rank_that_does_not_exist_is_refused(
    http: aiohttp.ClientSession, ranks: SimulatedEngine, rank: str
) -> None:
    status, answer = await ask(http, ranks, rank)
    assert status == 400
    assert answer["error"]["message"] == f"data_parallel_rank {rank} is out of range [0, 3)."
    assert await ask(http, ranks, rank, stream=True) == (
        200,
        f'data: {{"error": {{"message": "data_parallel_rank {rank} is out of range [0, 3).", '
        '"type": "BadRequestError", "param": null, "code": 400}}\n\ndata: [DONE]\n\n',
    )
    await eventually(lambda: idle(ranks))


async def test_a_single_engine_has_rank_0_alone(http: aiohttp.ClientSession, engine: SimulatedEngine) -> None:
    assert (await ask(http, engine, "0"))[0] == 200
    status, answer = await ask(http, engine, "1")
    assert (status, answer["error"]["message"]) == (400, "data_parallel_rank 1 is out of range [0, 1).")


async def test_each_rank_has_its_own_batch_and_queue(http: aiohttp.ClientSession) -> None:
    slow = EngineConfig(limits=LIMITS, max_model_len=2048, control=True, data_parallel_size=2)
    async with SimulatedEngine(slow, seed=1) as engine:
        endless = {**BODY, "max_tokens": 1000, "ignore_eos": True, "stream": True}
        headers = {"X-data-parallel-rank": "1"}
        answers = [await http.post(engine.url + PATH, json=endless, headers=headers) for _ in range(3)]
        schedulers = [rank.scheduler for rank in engine.service.engine.ranks]
        await eventually(lambda: schedulers[1].num_running == 2 and schedulers[1].num_waiting == 1)
        assert schedulers[0].num_running == 0
        assert (await ask(http, engine, None))[0] == 200, "the idle rank answers at once"
        async with http.get(f"{engine.url}/sim/ledger") as answer:
            ledger = await answer.json()
        assert (ledger["running"], ledger["waiting"]) == (2, 1)
        assert [rank["running"] for rank in ledger["ranks"]] == [0, 2]
        for response in answers:
            response.close()
        await eventually(lambda: idle(engine))


async def test_metrics_show_each_rank(http: aiohttp.ClientSession, ranks: SimulatedEngine) -> None:
    await ask(http, ranks, "1", n=2)
    async with http.get(f"{ranks.url}/metrics") as answer:
        families = list(text_string_to_metric_families(await answer.text()))
    samples = [sample for family in families for sample in family.samples if sample.name.startswith("vllm:")]
    by_engine: dict[str, set[str]] = {}
    for sample in samples:
        by_engine.setdefault(sample.labels.get("engine", ""), set()).add(sample.name)
    assert set(by_engine) == {"", "0", "1", "2"}
    assert by_engine["0"] == by_engine["1"] == by_engine["2"]
    assert by_engine[""] == {"vllm:admission_rejections_total", "vllm:admission_rejections_created"}
    values = {(s.name, s.labels.get("engine")): s.value for s in samples if s.name in COUNTED}
    assert [values[name, engine] for name in COUNTED for engine in "012"] == [0, 2, 0, 0, 1, 0, 0, 2, 0, 1, 1, 1]


COUNTED = (
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_params_n_count",
    "vllm:request_params_max_tokens_count",
    "vllm:cache_config_info",
)


async def test_a_reset_and_a_pause_are_for_all_ranks(http: aiohttp.ClientSession, ranks: SimulatedEngine) -> None:
    for rank in "012":
        await ask(http, ranks, rank)
    pools = [rank.scheduler.pool for rank in ranks.service.engine.ranks]
    assert all(pool.num_cached for pool in pools)
    async with http.post(f"{ranks.url}/reset_prefix_cache") as answer:
        assert answer.status == 200
    assert not any(pool.num_cached for pool in pools)
    async with http.post(f"{ranks.url}/sim/faults", json={"engine_paused": True}) as answer:
        assert answer.status == 200
    assert all(rank.paused for rank in ranks.service.engine.ranks)


async def test_the_size_is_part_of_the_fingerprint_and_of_the_server_info(
    http: aiohttp.ClientSession, ranks: SimulatedEngine, engine: SimulatedEngine
) -> None:
    assert "-dp3-" in (await ask(http, ranks, None))[1]["system_fingerprint"]
    assert "-dp" not in (await ask(http, engine, None))[1]["system_fingerprint"]
    async with http.get(f"{ranks.url}/server_info") as answer:
        assert (await answer.json())["vllm_config"]["parallel_config"] == {"data_parallel_size": 3}


def test_there_is_at_least_one_rank() -> None:
    with pytest.raises(ValueError, match="data_parallel_size must be at least 1"):
        EngineConfig(data_parallel_size=0)
