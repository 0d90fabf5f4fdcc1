from random import Random

import pytest
from structlog.testing import capture_logs

from gateway.config import HealthConfig, RoutingConfig
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.settings import BackendConfig
from gateway.core.feedback import CacheState


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(clock: Clock) -> CacheState:
    backends = (BackendConfig(url="http://h:1", name="a"),)
    return CacheState(RoutingConfig(), Fleet(backends, HealthConfig(), clock=clock, random=Random(1)), clock)


def test_a_fall_and_the_rise_after_it_are_logged(state: CacheState) -> None:
    with capture_logs() as lines:
        state._accuracy_changed(0, 0.412, False)
        state._accuracy_changed(0, 0.9, True)
    assert [(line["log_level"], line["confirmed_share"]) for line in lines] == [("warning", 0.41), ("info", 0.9)]
    assert lines[0]["backend"] == "a"


def test_an_engine_that_wavers_is_logged_once_a_minute(state: CacheState, clock: Clock) -> None:
    with capture_logs() as lines:
        for _ in range(100):
            state._accuracy_changed(0, 0.4, False)
            state._accuracy_changed(0, 0.8, True)
            clock.now += 1.0
    assert [line["log_level"] for line in lines] == ["warning", "info"] * 2


def test_a_rise_is_logged_however_soon_it_follows_and_a_later_fall_again(state: CacheState, clock: Clock) -> None:
    with capture_logs() as lines:
        state._accuracy_changed(0, 0.4, False)
        state._accuracy_changed(0, 0.8, True)
        state._accuracy_changed(0, 0.4, False)
        clock.now += 61.0
        state._accuracy_changed(0, 0.8, True)
        state._accuracy_changed(0, 0.4, False)
    assert [line["log_level"] for line in lines] == ["warning", "info", "warning"]


def test_an_engine_that_is_gone_is_not_logged(state: CacheState) -> None:
    with capture_logs() as lines:
        state._accuracy_changed(7, 0.4, False)
    assert lines == []
