import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.cache_view import HitAccuracy


def trust_that_tells() -> tuple[HitAccuracy, list[tuple[int, bool]]]:
    """What it tells: the engine, and whether predictions hold there again."""
    trust, told = HitAccuracy(), list[tuple[int, bool]]()
    trust.on_change.append(lambda engine, _, holds: told.append((engine, holds)))
    return trust, told


def observe(trust: HitAccuracy, times: int, actual: int, predicted: int = 1000, engine: int = 0) -> None:
    for _ in range(times):
        trust.observed(engine, predicted, actual)


def test_predictions_are_believed_until_they_fail() -> None:
    trust, told = trust_that_tells()
    assert trust.share(0) == 1.0
    observe(trust, 50, 900)
    assert trust.share(0) == 1.0
    assert told == []


def test_one_error_changes_nothing() -> None:
    trust, told = trust_that_tells()
    observe(trust, 1, 0)
    assert trust.share(0) == 1.0
    assert told == []


def test_an_error_that_persists_lowers_the_share_to_what_is_confirmed_and_is_told_once() -> None:
    trust, told = trust_that_tells()
    observe(trust, 40, 300)
    assert trust.share(0) == pytest.approx(0.3, abs=0.01)
    assert trust.share(1) == 1.0
    assert told == [(0, False)]


@pytest.mark.parametrize("failures", [5, 1000])
def test_twenty_good_requests_restore_it_and_that_is_told_once(failures: int) -> None:
    trust, told = trust_that_tells()
    observe(trust, failures, 0)
    assert trust.share(0) < 0.5
    observe(trust, 20, 1000)
    assert trust.share(0) == 1.0
    assert told == [(0, False), (0, True)]


def test_what_is_left_of_a_prediction_can_always_be_confirmed() -> None:
    trust, _ = trust_that_tells()
    observe(trust, 1000, 0)
    for _ in range(20):
        discounted = int(1000 * trust.share(0)) // 16 * 16
        trust.observed(0, int(discounted / trust.share(0)), 1000)
    assert trust.share(0) == 1.0


def test_a_share_between_good_and_bad_is_not_told_back_and_forth() -> None:
    trust, told = trust_that_tells()
    observe(trust, 20, 400)
    for _ in range(20):
        observe(trust, 1, 300)
        observe(trust, 1, 700)
    assert told == [(0, False)]


@pytest.mark.parametrize("predicted", [0, 1, 63])
def test_small_predictions_say_nothing(predicted: int) -> None:
    trust, told = trust_that_tells()
    observe(trust, 100, 0, predicted)
    assert trust.share(0) == 1.0
    assert told == []


def test_more_than_predicted_is_no_more_than_right() -> None:
    trust, _ = trust_that_tells()
    observe(trust, 5, 0)
    observe(trust, 1, 1_000_000)
    assert trust.share(0) < 1.0


def test_another_process_starts_with_full_trust_and_is_told_of_again() -> None:
    trust, told = trust_that_tells()
    observe(trust, 20, 0)
    trust.reset(0)
    assert trust.share(0) == 1.0
    assert trust.lowered == {}
    observe(trust, 20, 0)
    assert told == [(0, False), (0, False)]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5000), st.integers(0, 5000)), max_size=60))
def test_a_share_is_never_nothing_and_never_more_than_all(reports: list[tuple[int, int, int]]) -> None:
    trust, told = trust_that_tells()
    for report in reports:
        trust.observed(*report)
        assert all(0.1 <= trust.share(engine) <= 1.0 for engine in range(3))
        assert trust.lowered == {engine: trust.share(engine) for engine in range(3) if trust.share(engine) < 1.0}
    for engine in range(3):
        assert [good for which, good in told if which == engine] == [
            bool(turn % 2) for turn in range(sum(which == engine for which, _ in told))
        ]
