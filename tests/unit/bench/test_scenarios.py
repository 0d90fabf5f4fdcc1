"""Scenarios become command lines of the load generator."""

from pathlib import Path

import pytest

from tests.bench import scenarios
from tests.bench.place import Place

PLACE = Place(Path("/bench"))


def test_a_plain_scenario_names_bodies_connections_and_times() -> None:
    [found] = scenarios.named("a1")
    assert found.arguments(PLACE, 8100) == [
        *["/bench/bin/load", "--port", "8100", "--bodies", "/bench/bodies/1k.jsonl"],
        *["--connections", "32", "--seconds", "3", "--warmup", "1"],
    ]
    assert found.paced_events_per_s is None


def test_a_paced_scenario_says_how_many_events_and_how_far_apart() -> None:
    [found] = scenarios.named("p20")
    assert found.arguments(PLACE, 8100)[-5:] == ["--stream", "--events", "100", "--pace-ms", "20"]
    assert found.paced_events_per_s == 25_000


def test_scenarios_are_chosen_by_name_and_unknown_ones_refused() -> None:
    assert [scenario.name for scenario in scenarios.named(scenarios.DEFAULT)] == ["a1", "a16", "c1", "p20"]
    with pytest.raises(ValueError, match="no test x1; there are a1, a16"):
        scenarios.named("a1,x1")


def test_the_smoke_scenarios_leave_room_for_start_and_stop_in_half_a_minute() -> None:
    assert sum(scenario.warmup_seconds + scenario.seconds for scenario in scenarios.SMOKE) <= 10
