"""A reported KV cache size is raised where usage contradicts it, and only then."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.backends.backend import KvCacheSize, held_tokens
from gateway.core.backends.facts import Telemetry
from gateway.core.backends.settings import BackendConfig
from gateway.core.request import Demand
from gateway.core.routing.engine import Engine
from gateway.core.routing.kv_reservations import Reservation

from .conftest import MakeScene


def size_after(reported: int | None, held: int, usage: float, samples: int) -> int | None:
    size = KvCacheSize()
    size.report(reported)
    for _ in range(samples):
        size.observe(held, usage)
    return size.tokens


def started(engine: Engine, demand: Demand, output_tokens: int, streamed: int | None) -> Reservation:
    """A request that holds a reservation; None = its prefill is not over."""
    request = Reservation(demand, demand.sequences, 0.1)
    engine.kv.reserve(request, output_tokens)
    engine.load.start(request, 0.0)
    if streamed is not None:
        engine.load.first_token(request, 0.1)
        engine.kv.on_tokens(request, streamed)
    return request


@pytest.mark.parametrize(
    ("held", "usage", "samples", "size"),
    [
        (40_000, 0.4, 5, 100_000),
        (40_000, 0.4, 4, 25_000),  # too few samples
        (2_000, 0.02, 50, 25_000),  # too little in use
        (12_000, 0.4, 50, 25_000),  # within the error of prompt lengths
        (1_000, 0.9, 50, 25_000),  # others use it
        (0, 0.5, 50, 25_000),
    ],
)
def test_the_size_follows_strong_evidence_only(held: int, usage: float, samples: int, size: int) -> None:
    assert size_after(25_000, held, usage, samples) == size


def test_an_unknown_size_stays_unknown() -> None:
    assert size_after(None, 40_000, 0.4, 50) is None


def test_a_raised_size_falls_when_usage_no_longer_supports_it() -> None:
    size = KvCacheSize()
    size.report(25_000)
    for _ in range(5):
        size.observe(40_000, 0.4)
    for _ in range(30):
        size.observe(20_000, 0.9)
    assert size.tokens == 25_000


def test_another_report_and_another_process_void_the_evidence() -> None:
    size = KvCacheSize()
    for reported in (25_000, 30_000):
        size.report(reported)
        for _ in range(5):
            size.observe(40_000, 0.4)
        assert size.tokens == 100_000
    size.forget()
    assert size.tokens == 30_000


@given(st.lists(st.tuples(st.integers(0, 10**7), st.floats(0, 1)), max_size=60), st.integers(1, 10**6))
def test_a_size_is_never_below_the_report(samples: list[tuple[int, float]], reported: int) -> None:
    size = KvCacheSize()
    size.report(reported)
    for held, usage in samples:
        size.observe(held, usage)
        assert size.tokens is not None
        assert size.tokens >= reported


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=60), st.floats(0.0, 1.0))
def test_what_is_held_in_part_raises_no_true_size(usages: list[float], counted: float) -> None:
    size = KvCacheSize()
    size.report(100_000)
    for usage in usages:
        size.observe(int(counted * usage * 100_000), usage)
    assert size.tokens == 100_000


def test_what_is_certainly_held_leaves_out_answers_to_come_and_requests_in_prefill() -> None:
    engine = Engine(0, "a")
    plain = Demand("m", keys=(1, 2), edges=(400, 800), prompt_size=800, prompt_tokens=200, sequences=1, streams=True)
    started(engine, plain, 320, streamed=100)
    started(engine, plain, 320, streamed=0)
    assert held_tokens([engine]) == 200 + 100  # the prompt is shared
    started(engine, replace(plain, keys=(7, 8)), 320, streamed=None)
    started(engine, replace(plain, keys=(4, 5), streams=False), 320, streamed=0)
    assert held_tokens([engine]) == 200 + 100


def test_the_fleet_follows_a_size_that_usage_shows(scene: MakeScene) -> None:
    s = scene(1)
    [a] = s.fleet.backends
    s.fleet.learned(a, replace(a.facts, kv_cache_tokens=1000))
    [engine] = a.engines
    demand = Demand("m", prompt_size=8000, prompt_tokens=2000, sequences=1, streams=True)
    started(engine, demand, 16, streamed=0)
    for second in range(6):
        s.fleet.measured(a, Telemetry(2.0 * second, running=1, waiting=0, preemptions=0.0, kv_usage=0.5))
    assert (a.kv_cache_tokens, engine.kv_cache_tokens) == (4000, 4000)


def test_a_configured_size_is_used_as_it_is(scene: MakeScene) -> None:
    s = scene(1)
    [a] = s.fleet.backends
    a.config = BackendConfig(url="http://h:1", kv_cache_tokens=1000)
    s.fleet.learned(a, replace(a.facts, kv_cache_tokens=5000))
    assert a.kv_cache_tokens == 1000
