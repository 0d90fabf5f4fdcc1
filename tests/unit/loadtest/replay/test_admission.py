"""Arms of admission: what each bounds, whatever the trace; and that no request is lost under any."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.engine.kv_cache import SequenceState
from loadtest.engine.scheduler import Limits
from loadtest.engine.step_time import StepTime
from loadtest.replay.engine import ReplayEngine, ReplayRequest
from loadtest.replay.gateway_router import WAYS, admission_of, parted, with_admission
from loadtest.replay.policies import RouterContext, router_of
from loadtest.replay.scenario import Lengths, Scenario
from loadtest.replay.simulation import Simulation
from loadtest.replay.workload import requests_of
from tests.unit.loadtest.replay.builders import BLOCK, conversation_trace, scenario

_ARMS = tuple(way.replace("N", "3") for way in WAYS)


class _CountingEngine(ReplayEngine):
    """Remembers the most requests that it had at once."""

    def __init__(self, limits: Limits, step_time: StepTime) -> None:
        super().__init__(limits, step_time)
        self.most_held = 0

    def submit(self, sequence: SequenceState, now: float) -> None:
        super().submit(sequence, now)
        self.most_held = max(self.most_held, self.scheduler.num_running + self.scheduler.num_waiting)


def _run(arm: str, at: Scenario, rows: int = 120) -> tuple[list[ReplayRequest], list[_CountingEngine]]:
    requests = requests_of(
        conversation_trace(rows, seed=at.seed), at.engines, at.rate_per_second, at.seed, lengths=at.lengths
    )
    engines = [_CountingEngine(at.limits(BLOCK), at.step_time) for _ in range(at.engines)]
    router = router_of(with_admission("ours", arm), RouterContext(at, BLOCK, engines, rng=random.Random(0)))
    simulation = Simulation(requests, engines, router)
    simulation.run()
    assert simulation.left == 0
    assert router.waiting == 0
    assert all(engine.scheduler.pool.num_used == 0 for engine in engines)
    return requests, engines


@settings(max_examples=25, deadline=None)
@given(
    arm=st.sampled_from(_ARMS),
    seed=st.integers(0, 1000),
    engines=st.integers(1, 3),
    rate=st.floats(5.0, 200.0),
    kv_tokens=st.integers(5_000, 30_000),
    max_num_seqs=st.integers(1, 24),
    max_tokens_times=st.sampled_from([None, 1.0, 3.0]),
)
def test_no_request_is_lost_and_no_engine_gets_more_than_its_cap(
    arm: str, seed: int, engines: int, rate: float, kv_tokens: int, max_num_seqs: int, max_tokens_times: float | None
) -> None:
    at = scenario(
        engines, rate, seed, kv_tokens=kv_tokens, max_num_seqs=max_num_seqs, lengths=Lengths(2.0, max_tokens_times)
    )
    requests, its_engines = _run(arm, at)
    assert all(0 <= r.arrival_seconds <= r.sent_seconds < r.first_token_seconds <= r.finished_seconds for r in requests)
    cap = admission_of(arm).cap(max_num_seqs)
    assert all(engine.most_held <= cap for engine in its_engines)


@settings(max_examples=15, deadline=None)
@given(
    arm=st.sampled_from(["ledger", "adaptive"]),
    seed=st.integers(0, 1000),
    rate=st.floats(10.0, 100.0),
    kv_tokens=st.integers(8_000, 20_000),
    output_times=st.floats(0.5, 6.0),
)
def test_a_ledger_that_is_reported_how_long_answers_become_lets_no_engine_preempt(
    arm: str, seed: int, rate: float, kv_tokens: int, output_times: float
) -> None:
    at = scenario(1, rate, seed, kv_tokens=kv_tokens, max_num_seqs=64, lengths=Lengths(output_times, 1.0))
    _, [engine] = _run(arm, at)
    counters = engine.scheduler.counters
    assert (counters.preemptions, counters.recomputed_tokens) == (0, 0)
    assert counters.peak_used_blocks <= engine.scheduler.pool.num_blocks


def test_without_admission_everything_is_sent_at_once_and_engines_preempt() -> None:
    at = scenario(1, 100.0, kv_tokens=5_000, lengths=Lengths(output_times=5.0))
    requests, [engine] = _run("none", at)
    assert all(r.sent_seconds == r.arrival_seconds for r in requests)
    assert engine.peak_waiting > at.max_num_seqs
    counters = engine.scheduler.counters
    assert 0 < counters.preemptions == sum(r.preemptions for r in requests)
    assert 0 < counters.recomputed_tokens == sum(r.recomputed_tokens for r in requests)


def test_a_static_limit_of_one_leaves_the_line_in_the_gateway() -> None:
    requests, [engine] = _run("static:1", scenario(1, 100.0, kv_tokens=5_000))
    assert (engine.peak_waiting, engine.scheduler.counters.preemptions) == (0, 0)
    assert engine.sequence_seconds == pytest.approx(sum(r.finished_seconds - r.sent_seconds for r in requests))


def test_names_with_an_arm_are_parted_again() -> None:
    assert parted(with_admission("ours", "static:8")) == ("ours", admission_of("static:8"))
    assert parted("lmetric") == ("lmetric", None)


@pytest.mark.parametrize("name", ["", "static", "static:0", "static:x", "best"])
def test_unknown_arms_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="--admission"):
        admission_of(name)


def test_lengths_are_changed_and_reported_as_asked() -> None:
    lengths = Lengths(output_times=2.5, max_tokens_times=1.5, misjudged=0.2)
    assert lengths.output_tokens(10) == 25
    assert lengths.max_tokens(25) == 38
    assert Lengths().max_tokens(25) is None
    believed = [lengths.believed_tokens(1000, number) for number in range(200)]
    assert believed == [lengths.believed_tokens(1000, number) for number in range(200)]
    assert 900 < sorted(believed)[100] < 1100
    assert min(believed) < 800
    assert Lengths().believed_tokens(1000, 7) == 1000
