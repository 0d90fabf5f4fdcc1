import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.scheduling.fair_share import ServiceRate
from gateway.core.scheduling.wait_queue import Queue


def test_before_two_have_left_it_is_a_second() -> None:
    rate = ServiceRate()
    assert rate.seconds_for(10, 5.0) == 1.0
    rate.left(5.0)
    assert rate.seconds_for(10, 5.0) == 1.0


def test_steady_departures_a_second_apart_free_ten_places_in_ten_seconds() -> None:
    rate = ServiceRate()
    for now in range(20):
        rate.left(float(now))
    assert rate.seconds_for(10, 19.0) == pytest.approx(10.0)


def test_a_change_of_pace_is_followed_smoothly() -> None:
    rate = ServiceRate()
    rate.left(0.0)
    rate.left(1.0)
    rate.left(3.0)
    assert 1.4 < rate.seconds_for(1, 3.0) < 1.6
    for now in range(5, 61, 2):
        rate.left(float(now))
    assert rate.seconds_for(1, 59.0) == pytest.approx(2.0, rel=0.01)


def test_bursts_do_not_raise_the_rate() -> None:
    rate = ServiceRate()
    for second in range(30):
        for _ in range(64):
            rate.left(float(second))
    assert rate.seconds_for(64, 29.0) == pytest.approx(1.0, rel=0.1)


def test_each_model_has_a_rate_of_its_own() -> None:
    queue = Queue(10, 1000)
    for now in range(20):
        queue.tenants.of("slow").rate.left(float(now))
        for _ in range(10):
            queue.tenants.of("fast").rate.left(float(now))
    assert queue.retry_after_seconds("slow", 19.0) == pytest.approx(1.0)
    assert queue.retry_after_seconds("fast", 19.0) == pytest.approx(0.1, rel=0.1)
    assert queue.retry_after_seconds("unknown", 19.0) == 1.0


def test_silence_makes_the_expected_wait_longer() -> None:
    rate = ServiceRate()
    rate.left(0.0)
    rate.left(0.5)
    assert rate.seconds_for(1, 0.5) == pytest.approx(0.5)
    assert 5.0 < rate.seconds_for(1, 10.5) < 10.0


@given(gaps=st.lists(st.floats(0, 1e6), max_size=30), places=st.integers(1, 100_000), later=st.floats(0, 1e6))
def test_the_answer_is_always_between_a_tenth_of_a_second_and_a_minute(
    gaps: list[float], places: int, later: float
) -> None:
    rate, now = ServiceRate(), 0.0
    for gap in gaps:
        now += gap
        rate.left(now)
    assert 0.1 <= rate.seconds_for(places, now + later) <= 60.0


@given(gaps=st.lists(st.floats(0.001, 10), min_size=2, max_size=50))
def test_the_estimate_stays_between_the_shortest_and_the_longest_gap(gaps: list[float]) -> None:
    rate, now = ServiceRate(), 0.0
    rate.left(now)
    for gap in gaps:
        now += gap
        rate.left(now)
    shortest, longest = max(0.1, min(gaps)), max(0.1, max(gaps))
    assert shortest * 0.999 <= rate.seconds_for(1, now) <= longest * 1.001


def test_a_rate_is_unknown_until_two_requests_have_left() -> None:
    rate = ServiceRate()
    rate.left(0.0)
    assert rate.between_seconds(0.0) is None
    rate.left(0.5)
    assert rate.between_seconds(0.5) == 0.5
