"""Intervals and tests, against tables, enumeration and simulation."""

from __future__ import annotations

import math
from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.report.statistics import FEWEST, can_tell, mann_whitney, mean_interval, significant, t_quantile

_FEW = st.lists(st.integers(0, 6), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (10, 2.228), (29, 2.045), (120, 1.980)],
)
def test_quantiles_of_t_are_those_of_the_tables(degrees: int, expected: float) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("runs", [3, 5, 10])
def test_nineteen_intervals_in_twenty_hold_the_mean(runs: int) -> None:
    draw = Random(5)
    intervals = [mean_interval([draw.gauss(100, 5) for _ in range(runs)]) for _ in range(4000)]
    held = sum(interval is not None and interval[0] <= 100 <= interval[1] for interval in intervals)
    assert held / 4000 == pytest.approx(0.95, abs=0.01)


def test_one_run_or_two_have_no_interval() -> None:
    assert mean_interval([5.0, 6.0]) is None
    assert mean_interval([5.0]) is None
    assert mean_interval([]) is None


@given(_FEW, _FEW)
def test_the_p_value_is_the_share_of_all_splits_that_are_as_far_apart(first: list[int], other: list[int]) -> None:
    both = first + other

    def away(chosen: tuple[int, ...]) -> float:
        mine = [both[place] for place in chosen]
        rest = [both[place] for place in range(len(both)) if place not in chosen]
        wins = sum((a > b) + (a == b) / 2 for a in mine for b in rest)
        return abs(wins - len(mine) * len(rest) / 2)

    splits = list(combinations(range(len(both)), len(first)))
    as_far = sum(away(chosen) >= away(tuple(range(len(first)))) for chosen in splits)
    assert mann_whitney(first, other) == pytest.approx(as_far / len(splits))


@given(_FEW, _FEW)
def test_neither_the_order_of_sides_nor_the_scale_matters(first: list[int], other: list[int]) -> None:
    p_value = mann_whitney(first, other)
    assert 0 < p_value <= 1
    assert mann_whitney(other, first) == pytest.approx(p_value)
    assert mann_whitney([math.exp(x) for x in first], [math.exp(x) for x in other]) == pytest.approx(p_value)


def test_beyond_sixty_values_the_p_value_goes_on_where_the_exact_one_ends() -> None:
    draw = Random(1)
    first, other = ([draw.gauss(shift, 1) for _ in range(31)] for shift in (0.0, 0.5))
    assert mann_whitney(first, other) == pytest.approx(mann_whitney(first[:30], other[:30]), abs=0.02)
    assert mann_whitney([1.0] * 40, [1.0] * 40) == 1


@pytest.mark.parametrize(("first", "other", "can"), [(1, 1, False), (3, 3, False), (4, 4, True), (3, 5, True)])
def test_so_many_runs_can_or_show_nothing_reliable(first: int, other: int, can: bool) -> None:
    assert can_tell(first, other) == can
    farthest = mann_whitney(range(first), range(100, 100 + other))
    assert (farthest <= 0.05) == can
    assert can_tell(FEWEST, FEWEST)
    assert not can_tell(FEWEST - 1, FEWEST - 1)


def test_one_of_many_must_differ_more_than_one_alone() -> None:
    assert significant({"a": 0.03}) == {"a"}
    assert significant({"a": 0.03, **{str(n): 0.5 for n in range(19)}}) == set()
    assert significant({"a": 0.001, "b": 0.004, **{str(n): 0.5 for n in range(18)}}) == {"a", "b"}
    assert significant({str(n): 0.05 for n in range(20)}) == {str(n) for n in range(20)}
    assert significant({}) == set()


@given(st.dictionaries(st.integers(), st.floats(0, 1), max_size=20))
def test_what_is_as_small_as_something_significant_is_significant(p_values: dict[int, float]) -> None:
    named = significant(p_values)
    assert all(p_values[key] <= 0.05 for key in named)
    assert all(p_values[key] > p_values[other] for key in p_values.keys() - named for other in named)
