from random import Random

import pytest
from structlog.testing import capture_logs

from gateway.backends.fleet import Fleet
from gateway.config import BackendConfig, HealthConfig
from gateway.feedback import TrustLog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> TrustLog:
    return TrustLog(
        Fleet([BackendConfig(url="http://h:1", name="a")], HealthConfig(), clock=clock, random=Random(1)), clock
    )


def test_a_fall_and_the_rise_after_it_are_told(log: TrustLog) -> None:
    with capture_logs() as told:
        log.changed(0, 0.412, False)
        log.changed(0, 0.9, True)
    assert [(line["log_level"], line["confirmed_share"]) for line in told] == [("warning", 0.41), ("info", 0.9)]
    assert told[0]["backend"] == "a"


def test_an_engine_that_wavers_is_told_of_once_a_minute(log: TrustLog, clock: Clock) -> None:
    with capture_logs() as told:
        for _ in range(100):
            log.changed(0, 0.4, False)
            log.changed(0, 0.8, True)
            clock.now += 1.0
    assert [line["log_level"] for line in told] == ["warning", "info"] * 2


def test_a_rise_is_told_however_soon_it_follows_and_a_later_fall_again(log: TrustLog, clock: Clock) -> None:
    with capture_logs() as told:
        log.changed(0, 0.4, False)
        log.changed(0, 0.8, True)
        log.changed(0, 0.4, False)
        clock.now += 61.0
        log.changed(0, 0.8, True)
        log.changed(0, 0.4, False)
    assert [line["log_level"] for line in told] == ["warning", "info", "warning"]


def test_an_engine_that_is_gone_is_not_told_of(log: TrustLog) -> None:
    with capture_logs() as told:
        log.changed(7, 0.4, False)
    assert told == []
