import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.routing.cache_view import HitAccuracy


def watched() -> tuple[HitAccuracy, list[tuple[int, bool]]]:
    """With its changes: the engine, and whether predictions hold there again."""
    changes: list[tuple[int, bool]] = []
    return HitAccuracy(lambda engine, _, holds: changes.append((engine, holds))), changes


def observe(hit_accuracy: HitAccuracy, times: int, actual: int, predicted: int = 1000, engine: int = 0) -> None:
    for _ in range(times):
        hit_accuracy.observed(engine, predicted, actual)


def test_predictions_are_believed_until_they_fail() -> None:
    hit_accuracy, changes = watched()
    assert hit_accuracy.share(0) == 1.0
    observe(hit_accuracy, 50, 900)
    assert hit_accuracy.share(0) == 1.0
    assert changes == []


def test_one_error_changes_nothing() -> None:
    hit_accuracy, changes = watched()
    observe(hit_accuracy, 1, 0)
    assert hit_accuracy.share(0) == 1.0
    assert changes == []


def test_an_error_that_persists_lowers_the_share_to_what_is_confirmed_and_is_reported_once() -> None:
    hit_accuracy, changes = watched()
    observe(hit_accuracy, 40, 300)
    assert hit_accuracy.share(0) == pytest.approx(0.3, abs=0.01)
    assert hit_accuracy.share(1) == 1.0
    assert changes == [(0, False)]


@pytest.mark.parametrize("failures", [5, 1000])
def test_twenty_good_requests_restore_it_and_that_is_reported_once(failures: int) -> None:
    hit_accuracy, changes = watched()
    observe(hit_accuracy, failures, 0)
    assert hit_accuracy.share(0) < 0.5
    observe(hit_accuracy, 20, 1000)
    assert hit_accuracy.share(0) == 1.0
    assert changes == [(0, False), (0, True)]


def test_what_is_left_of_a_prediction_can_always_be_confirmed() -> None:
    hit_accuracy, _ = watched()
    observe(hit_accuracy, 1000, 0)
    for _ in range(20):
        discounted = int(1000 * hit_accuracy.share(0)) // 16 * 16
        hit_accuracy.observed(0, int(discounted / hit_accuracy.share(0)), 1000)
    assert hit_accuracy.share(0) == 1.0


def test_a_share_between_good_and_bad_is_not_reported_back_and_forth() -> None:
    hit_accuracy, changes = watched()
    observe(hit_accuracy, 20, 400)
    for _ in range(20):
        observe(hit_accuracy, 1, 300)
        observe(hit_accuracy, 1, 700)
    assert changes == [(0, False)]


@pytest.mark.parametrize("predicted", [0, 1, 63])
def test_small_predictions_say_nothing(predicted: int) -> None:
    hit_accuracy, changes = watched()
    observe(hit_accuracy, 100, 0, predicted)
    assert hit_accuracy.share(0) == 1.0
    assert changes == []


def test_more_than_predicted_is_no_more_than_right() -> None:
    hit_accuracy, _ = watched()
    observe(hit_accuracy, 5, 0)
    observe(hit_accuracy, 1, 1_000_000)
    assert hit_accuracy.share(0) < 1.0


def test_another_process_starts_with_full_accuracy_and_is_reported_again() -> None:
    hit_accuracy, changes = watched()
    observe(hit_accuracy, 20, 0)
    hit_accuracy.reset(0)
    assert hit_accuracy.share(0) == 1.0
    assert hit_accuracy.lowered == {}
    observe(hit_accuracy, 20, 0)
    assert changes == [(0, False), (0, False)]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5000), st.integers(0, 5000)), max_size=60))
def test_a_share_is_never_nothing_and_never_more_than_all(reports: list[tuple[int, int, int]]) -> None:
    hit_accuracy, changes = watched()
    for report in reports:
        hit_accuracy.observed(*report)
        assert all(0.1 <= hit_accuracy.share(engine) <= 1.0 for engine in range(3))
        assert hit_accuracy.lowered == {
            engine: hit_accuracy.share(engine) for engine in range(3) if hit_accuracy.share(engine) < 1.0
        }
    for engine in range(3):
        assert [good for which, good in changes if which == engine] == [
            bool(turn % 2) for turn in range(sum(which == engine for which, _ in changes))
        ]
