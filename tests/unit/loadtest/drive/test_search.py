"""The search for the highest load, against servers that exist as a formula only."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.drive.search import Aim, LoadSearch

_AIMS = st.sampled_from(list(Aim))


def _searched(aim: Aim, passes: Callable[[float], bool]) -> tuple[LoadSearch, list[float]]:
    search, tried = LoadSearch(aim), []
    while (load := search.next()) is not None:
        tried.append(load)
        search.take(load, passed=passes(load))
    return search, tried


@given(_AIMS, st.floats(1.0, 5000))
def test_a_sharp_limit_is_found_to_a_twentieth_from_below(aim: Aim, limit: float) -> None:
    search, tried = _searched(aim, lambda load: load <= limit)
    assert search.answer is not None
    assert search.answer <= limit
    assert search.limit is not None
    assert search.limit > limit
    assert search.limit / search.answer <= 1.05 or (aim is Aim.CONCURRENCY and search.limit - search.answer <= 1)
    assert tried.count(search.answer) == 2
    assert len(tried) <= 25


@given(_AIMS, st.floats(2.0, 2000), st.integers(0, 10**6))
def test_near_a_limit_with_noise_the_answer_is_confirmed_and_near(aim: Aim, limit: float, seed: int) -> None:
    """The chance to pass falls from 1 to 0 over a fifth around the limit."""
    draw, won = Random(seed), dict[float, list[bool]]()

    def passes(load: float) -> bool:
        chance = 1 / (1 + math.exp(min(50.0, 40 * (load / limit - 1))))
        won.setdefault(load, []).append(draw.random() < chance)
        return won[load][-1]

    search, tried = _searched(aim, passes)
    assert len(tried) <= search.most_runs
    answer = search.answer
    if answer is None:
        assert len(tried) == search.most_runs or aim is Aim.CONCURRENCY
        return
    assert sum(won[answer]) >= 2
    assert sum(won[answer]) > len(won[answer]) / 2
    assert answer <= 1.3 * limit + 1
    assert answer >= 0.6 * limit - 1


@pytest.mark.parametrize("aim", list(Aim))
def test_a_server_that_never_keeps_the_slo_has_no_answer(aim: Aim) -> None:
    search, tried = _searched(aim, lambda _: False)
    assert search.answer is None
    assert search.highest_passing is None
    assert len(tried) <= 8


@pytest.mark.parametrize("aim", list(Aim))
def test_a_server_without_a_limit_ends_the_search_at_the_most_that_is_tried(aim: Aim) -> None:
    search, _ = _searched(aim, lambda _: True)
    assert search.limit is None
    assert search.highest_passing == 100_000


@given(_AIMS, st.lists(st.booleans(), min_size=60, max_size=60))
def test_whatever_runs_come_to_the_search_ends_and_its_answer_has_passed_twice(aim: Aim, outcomes: list[bool]) -> None:
    left = iter(outcomes)
    search, tried = _searched(aim, lambda _: next(left))
    assert len(tried) <= search.most_runs
    if search.answer is not None:
        count = sum(passed for load, passed in zip(tried, outcomes, strict=False) if load == search.answer)
        assert count >= 2
        assert search.limit is None or search.answer < search.limit


@given(_AIMS, st.floats(2.0, 5000))
def test_a_load_that_the_client_never_carries_is_its_limit(aim: Aim, most: float) -> None:
    search = LoadSearch(aim)
    while (load := search.next()) is not None:
        if load <= most:
            search.take(load, passed=True)
        else:
            search.take_spoilt(load)
    assert not search.is_disturbed
    assert search.answer is not None
    assert search.answer <= most < search.answer * 1.05 + 1


@pytest.mark.parametrize("aim", list(Aim))
def test_a_client_that_carries_nothing_ends_the_search_after_three_loads(aim: Aim) -> None:
    search, tried = LoadSearch(aim), list[float]()
    while (load := search.next()) is not None:
        tried.append(load)
        search.take_spoilt(load)
    assert len(tried) == 6
    assert len(set(tried)) == 3
    assert search.answer is None


@pytest.mark.parametrize("passed", [True, False])
def test_a_client_that_is_disturbed_at_loads_it_has_carried_is_no_limit_and_ends_the_search(passed: bool) -> None:
    search = LoadSearch(Aim.CONCURRENCY)
    first = search.next()
    assert first is not None
    search.take(first, passed=passed)
    spoilt = 0
    while (load := search.next()) is not None:
        spoilt += load <= first
        search.take_spoilt(load)
    assert spoilt == search.disturbances == 3
    assert search.answer is None
    assert search.highest_passing == (first if passed else None)
    assert (search.limit == first) == (not passed)
