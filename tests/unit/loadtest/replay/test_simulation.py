"""Whole replays: no request is lost, nothing is kept, the same again gives the same."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gateway.config import RoutingConfig
from loadtest.replay.engine import ReplayRequest
from loadtest.replay.gateway_router import GatewayRouter
from loadtest.replay.policies import NAMES, router_of
from loadtest.replay.router import PushRouter, Router
from loadtest.replay.scenario import EngineFaults, Scenario
from loadtest.replay.simulation import Simulation, engines_of, replay
from loadtest.replay.workload import requests_of
from loadtest.workloads.trace import Trace
from tests.unit.loadtest.replay.builders import BLOCK, conversation_trace, request, scenario, session_trace, site


def _run(trace: Trace, at: Scenario, policy: str) -> tuple[list[ReplayRequest], Router, Simulation]:
    requests = requests_of(trace, at.engines, at.rate_per_second, at.seed)
    its_site = replace(site(at), rng=random.Random(0))
    router = router_of(policy, its_site)
    simulation = Simulation(requests, its_site.engines, router)
    simulation.run()
    assert all(engine.scheduler.num_running + engine.scheduler.num_waiting == 0 for engine in its_site.engines)
    assert all(engine.scheduler.pool.num_used == 0 for engine in its_site.engines)
    return requests, router, simulation


@pytest.mark.parametrize("policy", NAMES)
def test_every_request_ends_once_and_all_loads_return_to_zero(policy: str) -> None:
    requests, router, simulation = _run(conversation_trace(), scenario(rate=60.0), policy)
    assert simulation.left == 0
    assert router.waiting == 0
    assert all(0 <= r.arrival_seconds < r.first_token_seconds <= r.finished_seconds for r in requests)
    if isinstance(router, PushRouter):
        assert all((view.in_flight, view.prefill_tokens) == (0, 0) for view in router._engines)
        assert not router._uncached
    elif isinstance(router, GatewayRouter):
        engines = [backend.engine for backend in router._backends]
        assert all((engine.load.in_flight, engine.load.decoding) == (0, 0) for engine in engines)
        assert {repr(engine.kv) for engine in engines} == {"<KvLedger 0 tokens, 0 requests, 0 prefixes>"}


@pytest.mark.parametrize("policy", ["ours", "sglang", "dynamo", "llmd", "lmetric"])
def test_the_same_seed_gives_the_same_figures(policy: str) -> None:
    once, again = (replay(conversation_trace(), scenario(seed=3), policy) for _ in range(2))
    assert replace(once, cpu_seconds=0.0) == replace(again, cpu_seconds=0.0)


def test_another_seed_gives_others() -> None:
    one, other = (replay(conversation_trace(), scenario(seed=seed), "ours") for seed in (1, 2))
    assert one.ttft != other.ttft


def test_a_turn_is_sent_when_its_think_time_after_the_answer_is_over() -> None:
    requests, _, _ = _run(session_trace(think_seconds=0.5), scenario(rate=10.0), "ours")
    followed = [r for r in requests if r.following is not None]
    assert len(followed) == len(requests) * 3 // 4
    for before in followed:
        assert before.following is not None
        assert before.following.arrival_seconds == before.finished_seconds + 0.5
    # a session's next turn finds the blocks of the one before, wherever else others went
    assert sum(r.cached_tokens for r in requests) > 0.5 * sum(r.prompt_tokens for r in requests)


def test_one_request_through_the_gateway_takes_what_the_step_model_says() -> None:
    at = scenario(engines=2)
    engines = engines_of(at, BLOCK)
    router = GatewayRouter("prefix", at, engines=engines, block_tokens=BLOCK, routing=RoutingConfig())
    alone = request(prompt_tokens=2000, output_tokens=5)
    Simulation([alone], engines, router).run()
    assert alone.ttft_seconds == pytest.approx(at.cold_prefill_seconds(2000), abs=1e-9)
    decode = at.step_time.decode_stretch_seconds(4, 1, 2000)
    assert alone.tpot_seconds == pytest.approx(decode / 4, abs=1e-9)


def test_lost_caches_lower_the_hit_ratio() -> None:
    calm = scenario(rate=20.0, kv_tokens=100_000)
    lossy = replace(calm, faults=EngineFaults(restart_at=0.5, restart_share=1.0))
    trace = conversation_trace()
    assert replay(trace, lossy, "lmetric").hit_ratio < replay(trace, calm, "lmetric").hit_ratio - 0.02


@pytest.mark.parametrize("policy", NAMES)
def test_engines_that_join_get_requests_from_then_on(policy: str) -> None:
    at = scenario(engines=2, rate=60.0, faults=EngineFaults(join_at=0.5, join_engines=2))
    requests = requests_of(conversation_trace(), at.engines, at.rate_per_second, at.seed)
    its_site = replace(site(at), rng=random.Random(0))
    Simulation(requests, its_site.engines, router_of(policy, its_site), join_seconds=2.5).run()
    assert {r.engine for r in requests if r.sent_seconds < 2.5} == {0, 1}
    if policy != "sglang":  # its rule follows prefixes while loads are in balance
        assert {r.engine for r in requests} == {0, 1, 2, 3}


def test_an_engine_that_joins_starts_slowly_behind_the_gateway() -> None:
    at = scenario(engines=1, max_num_seqs=40, faults=EngineFaults(join_at=0.5, join_engines=1))
    router = GatewayRouter("prefix", at, engines=engines_of(at, BLOCK), block_tokens=BLOCK, routing=RoutingConfig())
    router.joined(10.0)
    slots = []
    for now in (10.0, 25.0, 40.0):
        router.scraped(now)
        slots.append([backend.engine.slots for backend in router._backends])
    assert slots == [[40, 4], [40, 22], [40, 40]]


def test_figures_show_the_minute_after_engines_joined() -> None:
    calm = scenario(rate=20.0)
    joined = replay(conversation_trace(), replace(calm, faults=EngineFaults(join_at=0.5, join_engines=2)), "ours").join
    assert joined is not None
    assert 0.2 < joined.share_new < 0.8
    assert joined.hit_ratio_new < joined.hit_ratio
    assert joined.ttft.mean < joined.ttft_before.mean
    assert replay(conversation_trace(), calm, "ours").join is None


def test_slow_engines_get_less_from_the_gateway_which_is_reported() -> None:
    at = scenario(engines=4, rate=40.0, faults=EngineFaults(slow_factor=3.0, slow_engines=2))
    assert at.speeds() == at.told_speeds() == (1.0, 1.0, 3.0, 3.0)
    untold = replace(at, faults=replace(at.faults, slow_is_told=False))
    assert untold.told_speeds() == (1.0,) * 4
    requests, _, _ = _run(conversation_trace(), at, "ours")
    fast, slow = (sum(r.engine in engines for r in requests) for engines in ((0, 1), (2, 3)))
    assert fast > 1.5 * slow


def test_a_line_forms_in_the_gateway_and_not_in_the_engines_above_capacity() -> None:
    at = scenario(engines=1, max_num_seqs=4)
    engines = engines_of(at, BLOCK)
    router = GatewayRouter("least_loaded", at, engines=engines, block_tokens=BLOCK, routing=RoutingConfig())
    crowd = [request(number) for number in range(20)]
    Simulation(crowd, engines, router).run()
    assert engines[0].scheduler.counters.peak_running <= 4
    assert engines[0].scheduler.counters.preemptions == 0
    assert max(r.ttft_seconds for r in crowd) > 4 * min(r.ttft_seconds for r in crowd)
