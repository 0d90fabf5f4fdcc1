"""Rounds, ranks, and the frontier."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from loadtest.sweep.judge import Judged
from loadtest.sweep.plan import Halving
from loadtest.sweep.search import Round, best, frontier, rounds, winner


def judged(value: float, excess: float = 0.0) -> Judged:
    return Judged({}, value, excess, ["missed"] if excess else [])


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


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_nothing_beats_what_is_on_the_frontier_and_something_beats_the_rest(points: list[tuple[int, int]]) -> None:
    kept = frontier(points, lambda point: point[0], lambda point: point[1])
    for point in points:
        beaten = any(other[0] <= point[0] and other[1] >= point[1] and other != point for other in points)
        assert (point in kept) != beaten
    assert kept == sorted(kept)
