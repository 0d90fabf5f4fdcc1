"""What shows several engines behind one URL, and what is a restart."""

import pytest

from gateway.core.backends.facts import Facts, ModelCard, Telemetry

from .conftest import MakeScene


@pytest.mark.parametrize(
    "starts", [[2.0, 1.0e3, 2.0, 1.0e3, 2.0] * 4, [*range(1000, 0, -50)], [5e3, 9e3, 7e3, 8e3, 1e3]]
)
def test_a_process_start_that_goes_back_shows_several_engines_and_no_restart(
    scene: MakeScene, starts: list[float]
) -> None:
    s = scene(2)
    a = s.fleet.backends[0]
    for start in starts:
        s.clock.now += 2.0
        s.fleet.learned(a, Facts("0.30.0", (ModelCard("m"),), process_start_seconds=float(start)))
    assert a.restarts.several
    assert len(s.restarts) <= 1  # before it went back
    assert a.limit(s.clock.now) == a.cap


def test_counters_that_go_back_again_and_again_show_several_engines(scene: MakeScene) -> None:
    s = scene(1)
    a = s.fleet.backends[0]
    for number in range(20):
        s.clock.now += 2.0
        queries = 500.0 if number % 2 else 20.0
        s.fleet.measured(
            a,
            Telemetry(s.clock.now, running=0, waiting=0, preemptions=0.0, kv_usage=0.0, prefix_queries_tokens=queries),
        )
    assert a.restarts.several
    assert len(s.restarts) == 2


def test_after_ten_quiet_minutes_another_process_is_a_restart_again(scene: MakeScene) -> None:
    s = scene(1)
    a = s.fleet.backends[0]
    for start, seconds in ((5.0e3, 2.0), (1.0e3, 2.0), (9.0e3, 700.0)):
        s.clock.now += seconds
        s.fleet.learned(a, Facts("0.30.0", (ModelCard("m"),), process_start_seconds=start))
    assert not a.restarts.several
    assert s.restarts == ["a"]


def test_restarts_in_a_row_are_restarts(scene: MakeScene) -> None:
    s = scene(1)
    a = s.fleet.backends[0]
    for number in range(6):
        s.clock.now += 5.0
        s.fleet.learned(a, Facts("0.30.0", (ModelCard("m"),), process_start_seconds=1.0e3 + 5 * number))
    assert s.restarts == ["a"] * 5
