"""Rounds, ranks, and the frontier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.sweep.judge import Judged, Round, best, frontier, rounds, tied, winner
from loadtest.sweep.plan import Halving


def judged(value: float, excess: float = 0.0, values: Sequence[float] = ()) -> Judged:
    return Judged({}, value, excess=excess, complaints=["missed"] if excess else [], values=values)


def of_runs(*values: float) -> Judged:
    return judged(median(values), values=values)


def test_a_grid_is_one_round_of_whole_runs() -> None:
    assert rounds(7, None) == [Round(7, 1.0)]


def test_halving_makes_runs_longer_as_configurations_get_fewer() -> None:
    assert rounds(16, Halving(factor=4, shortest=0.05)) == [Round(16, 1 / 16), Round(4, 1 / 4), Round(1, 1.0)]


def test_no_run_is_shorter_than_the_shortest() -> None:
    assert rounds(100, Halving(factor=2, shortest=0.25)) == [Round(100, 0.25), Round(50, 0.5), Round(25, 1.0)]


@given(st.integers(0, 500), st.floats(1.1, 10), st.floats(0.01, 1))
def test_the_last_round_is_whole_and_each_is_longer_with_no_more_in_it(
    count: int, factor: float, shortest: float
) -> None:
    made = rounds(count, Halving(factor=factor, shortest=shortest))
    assert made[0].count == count
    assert made[-1].share == 1
    assert all(one.share >= shortest * 0.999 for one in made)
    for before, after in pairwise(made):
        assert after.share > before.share
        assert 1 <= after.count <= before.count


def test_what_fits_comes_before_what_is_faster_and_does_not() -> None:
    found = {"slow": judged(1), "fast": judged(2), "faster": judged(9, 0.5), "close": judged(8, 0.1)}
    assert best(found, 9) == ["fast", "slow", "close", "faster"]
    assert best(found, 1) == ["fast"]
    assert winner(found) == "fast"


def test_there_is_no_winner_where_nothing_fits() -> None:
    assert winner({"a": judged(9, 0.5), "b": judged(9, math.inf)}) is None
    assert winner({}) is None


def test_what_runs_do_not_separate_from_the_first_ties_with_it() -> None:
    found = {"a": of_runs(9.0, 9.1, 9.2, 9.3), "b": of_runs(8.9, 9.05, 9.15, 9.25), "c": of_runs(4, 5, 6, 7)}
    late = judged(99, excess=1, values=[99] * 4)
    assert tied(found | {"late": late}, "a") == ["b"]
    assert tied({"a": found["a"]}, "a") == []


@given(st.integers(1, 3), st.floats(1, 100))
def test_three_runs_and_less_separate_nothing(runs: int, apart: float) -> None:
    assert tied({"a": of_runs(*[1 + apart] * runs), "b": of_runs(*[1.0] * runs)}, "a") == ["b"]


@pytest.mark.parametrize("configurations", [2, 4, 8])
@pytest.mark.parametrize("runs", [4, 5, 8])
def test_of_equal_configurations_one_sweep_in_twenty_at_most_has_a_clear_winner(configurations: int, runs: int) -> None:
    draw = Random(3)
    clear = 0
    for _ in range(200):
        found = {name: of_runs(*(draw.gauss(100, 1) for _ in range(runs))) for name in range(configurations)}
        clear += tied(found, best(found, 1)[0]) == []
    assert clear <= 10


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_nothing_beats_what_is_on_the_frontier_and_something_beats_the_rest(points: list[tuple[int, int]]) -> None:
    kept = frontier(points, lambda point: point[0], lambda point: point[1])
    for point in points:
        beaten = any(other[0] <= point[0] and other[1] >= point[1] and other != point for other in points)
        assert (point in kept) != beaten
    assert kept == sorted(kept)
