"""How hard each load of the overload run asks."""

from pathlib import Path

import pytest

from gateway.config.file import load
from tests.bench.overload.load import CAPACITY_PER_S, MULTIPLES, QUEUED, SLOTS, scenario
from tests.bench.place import SOURCES, Place


def test_the_numbers_are_those_of_the_configuration() -> None:
    config = load(SOURCES / "overload" / "gateway.yaml", [])
    assert sum(int(backend.max_in_flight) for backend in config.backends) == SLOTS
    assert config.admission.max_queued_requests == QUEUED
    assert pytest.approx(320) == CAPACITY_PER_S


def test_a_load_of_many_times_the_capacity_has_as_many_times_the_clients_who_rest_when_refused() -> None:
    assert [scenario(multiple, "1k", 3).connections for multiple in MULTIPLES] == [64, 160, 352, 672]
    assert scenario(10, "16k", 3).arguments(Place(Path("/bench")), 8100)[-6:] == [
        *["--events", "20", "--pace-ms", "10", "--refused-pause-ms", "200"]
    ]
