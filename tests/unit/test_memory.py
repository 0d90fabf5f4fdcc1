"""The memory budget is never exceeded, and nothing of it is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import MemoryFull
from gateway.core.resources import Holding, MemoryBudget


def test_what_exceeds_the_budget_is_refused_and_reserves_nothing() -> None:
    budget = MemoryBudget(100)
    with Holding(budget) as first:
        first.add(70)
        with Holding(budget) as second:
            with pytest.raises(MemoryFull) as refused:
                second.add(31)
            assert refused.value.status == 503
            assert refused.value.retry_after_seconds
            assert budget.used_bytes == 70
            second.add(30)
        assert budget.used_bytes == 70
    assert budget.used_bytes == 0


def test_releasing_again_gives_nothing_back_twice() -> None:
    budget = MemoryBudget(100)
    holding = Holding(budget)
    holding.add(60)
    holding.release()
    holding.release()
    assert repr(budget) == "<MemoryBudget 0 of 100 bytes>"


def test_a_part_is_given_back_and_never_more_than_is_held() -> None:
    budget = MemoryBudget(100)
    holding = Holding(budget)
    holding.add(60)
    holding.shrink(20)
    assert (holding.size_bytes, budget.used_bytes) == (40, 40)
    holding.shrink(50)
    holding.shrink(1)
    assert (holding.size_bytes, budget.used_bytes) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 60))))
def test_the_sum_of_all_holdings_is_what_is_used_and_within_the_limit(steps: list[tuple[int, int]]) -> None:
    budget = MemoryBudget(100)
    holdings = [Holding(budget) for _ in range(5)]
    for number, size_bytes in steps:
        if size_bytes < 0:
            holdings[number].release()
        else:
            try:
                holdings[number].add(size_bytes)
            except MemoryFull:
                assert budget.used_bytes + size_bytes > 100
        assert sum(each.size_bytes for each in holdings) == budget.used_bytes <= 100


def test_what_is_held_can_be_fitted_and_passed_on() -> None:
    budget = MemoryBudget(100)
    with Holding(budget) as holding:
        holding.fit(60)
        holding.fit(20)
        with pytest.raises(MemoryFull):
            holding.fit(101)
        assert (holding.size_bytes, budget.used_bytes) == (20, 20)
        other = holding.passed_on()
    assert (other.size_bytes, budget.used_bytes) == (20, 20)
    other.release()
    assert budget.used_bytes == 0
