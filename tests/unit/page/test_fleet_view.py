"""Tiles of engines."""

from typing import Any

import pytest

from gateway.features.page.fleet_view import MOST_TILES, HitRates, fleet_view
from tests.unit.page.builders import House


def view(house: House, hit_rates: HitRates | None = None) -> dict[str, Any]:
    gateway = house.gateway
    describe, trust = gateway.operators.overview.describer(), gateway.core.cache_state.hit_accuracy.share
    return fleet_view(gateway.core.fleet.backends, describe, hit_rates or HitRates(), trust, house.now)


def test_a_tile_has_slots_kv_tokens_and_state_of_an_engine() -> None:
    house = House(1)
    house.place(3, output_tokens=50)
    [tile] = view(house)["tiles"]
    assert (tile["name"], tile["rank"], tile["state"], tile["state_reason"]) == ("gpu-0", None, "up", "answers probes")
    assert (tile["in_flight"], tile["slots"], tile["cap"], tile["prefilling"], tile["decoding"]) == (3, 4, 4, 3, 0)
    assert tile["kv_tokens"] == 10_000
    assert 300 <= tile["kv_reserved"] <= 700
    assert (tile["kv_used"], tile["hit_rate"], tile["trust"]) == (None, None, 1.0)
    assert tile["prefill_ahead_ms"] > 0
    assert tile["models"] == ["m"]


def test_tiles_are_bounded_and_the_rest_is_counted() -> None:
    shown = view(House(MOST_TILES + 44))
    assert (shown["engines"], shown["not_shown"], len(shown["tiles"])) == (MOST_TILES + 44, 44, MOST_TILES)


def test_hit_rates_are_of_recent_requests_with_reported_hits() -> None:
    rates = HitRates()
    rates.add("gpu-0", 100, 80)
    rates.add("gpu-0", 100, None)
    rates.add("", 100, 100)
    assert rates.of("gpu-0") == 0.8
    for _ in range(300):
        rates.fade(["gpu-0"])
    assert rates.of("gpu-0") is None
    rates.add("gpu-0", 1000, 100)
    assert rates.of("gpu-0") == pytest.approx(0.1, abs=0.001)
    rates.fade(["other"])
    assert rates.of("gpu-0") is None
