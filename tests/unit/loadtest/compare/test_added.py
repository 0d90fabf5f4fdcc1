"""Added latency is that of pairs; a hit in spite of another salt means that the salt was lost."""

import pytest

from loadtest.compare.turn import added_of, judged


def test_differences_are_taken_pair_by_pair() -> None:
    found = added_of([(0.010, 0.011), (0.020, 0.0205), (0.005, 0.008)])
    assert found is not None
    assert (found.pairs, found.direct_p50) == (3, pytest.approx(10))
    assert (found.p50, found.p99) == (pytest.approx(1.0), pytest.approx(3.0))


def test_an_answer_that_came_sooner_counts_as_it_is() -> None:
    found = added_of([(0.010, 0.009)])
    assert found is not None
    assert found.p50 == pytest.approx(-1.0)


def test_without_pairs_nothing_is_reported() -> None:
    assert added_of([]) is None


def test_a_salt_is_passed_on_if_only_the_repetition_with_the_same_one_hits() -> None:
    assert judged(before=0, warm=64, after=64) is True
    assert judged(before=0, warm=64, after=128) is False
    assert judged(before=10, warm=10, after=10) is None  # the engines cache nothing: it cannot be reported
