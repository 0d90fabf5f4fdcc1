"""A turn starts a proxy, loads it, and tells what it cost or why it failed."""

import os
import sys
from pathlib import Path

import pytest

from loadtest.compare.proxy import Peer
from tests.bench.bodies import write_bodies
from tests.bench.measure import MeasurementFailed, engines, measure_turn, parse_load
from tests.bench.place import Cores, Place
from tests.bench.scenarios import Scenario
from tests.unit.bench.builders import make_peer, nowhere

CORE = min(os.sched_getaffinity(0))
CORES = Cores(proxy=CORE, load=max(os.sched_getaffinity(0)), harness=CORE)
PLAIN = Scenario("a1", "", "1k", connections=2, seconds=0.2, warmup_seconds=0.1)
STREAM = Scenario("p20", "", "1k", connections=5, seconds=0.2, warmup_seconds=0.1, events=5, pace_ms=10)


def python(code: str) -> Peer:
    """A proxy that is a Python program."""
    return make_peer("python", lambda _: Path(sys.executable), "-c", code)


def test_a_turn_measures_every_scenario_and_the_memory_afterwards(tools: Place) -> None:
    """A mock engine stands in for the proxy: it answers the same requests."""
    write_bodies(tools)
    stand_in = make_peer("stand-in", lambda _: tools.engine, "{port}")
    with engines(tools, CORES) as bench:
        turn = measure_turn(bench, stand_in, [PLAIN, STREAM])
    assert turn.failure == ""
    assert set(turn.samples) == {"a1", "p20"}
    assert turn.memory_mib is not None
    assert turn.memory_mib > 0.1
    plain, stream = turn.samples["a1"], turn.samples["p20"]
    assert plain.load.error_count == stream.load.error_count == 0
    assert plain.cpu_us_per_request is not None
    assert 0.1 < plain.cpu_us_per_request < 10_000
    assert stream.cpu_us_per_event is not None
    assert 0.1 < stream.cpu_us_per_event < 10_000
    assert plain.least_backend_share == 0  # nothing came through to the engines


def test_a_proxy_that_ends_at_once_fails_its_turn_with_its_last_words(tools: Place) -> None:
    with engines(tools, CORES) as bench:
        turn = measure_turn(bench, python("raise SystemExit('no such flag')"), [PLAIN])
    assert turn.samples == {}
    assert turn.failure == "it ended by itself, exit code 1; its last words: no such flag"


def test_a_peer_that_is_not_there_fails_its_turn(tools: Place) -> None:
    absent = make_peer("absent", nowhere)
    with engines(tools, CORES) as bench:
        turn = measure_turn(bench, absent, [PLAIN])
    assert turn.failure.startswith("absent is not installed")


def test_a_load_generator_that_cannot_start_fails_the_turn_with_its_words(tools: Place) -> None:
    stand_in = make_peer("stand-in", lambda _: tools.engine, "{port}")
    lost = Scenario("a1", "", "no-such-size", connections=1, seconds=0.1, warmup_seconds=0)
    with engines(tools, CORES) as bench:
        turn = measure_turn(bench, stand_in, [lost])
    assert "no-such-size.jsonl: No such file" in turn.failure


def test_output_that_is_not_the_load_generators_is_refused() -> None:
    with pytest.raises(MeasurementFailed, match="printed 'Segmentation fault'"):
        parse_load("Segmentation fault")
    with pytest.raises(MeasurementFailed):
        parse_load('{"seconds": 1}')
