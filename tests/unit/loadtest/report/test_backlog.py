"""Rates above capacity, and what only looks like one."""

from __future__ import annotations

import pytest

from loadtest.report.schema import Stall
from loadtest.report.timeline import backlog, sweep

_SECONDS = 32


def _found(
    per_second: float, capacity: float, freeze: tuple[float, float] | None = None, *, stalls: bool = True
) -> tuple[float, float] | None:
    """Arrivals at even gaps to a server that answers one after the other and may stand still for a while."""
    free, spans = 0.0, []
    for index in range(int(_SECONDS * per_second)):
        due = index / per_second
        free = max(free, due) + 1 / capacity
        if freeze and freeze[0] < free < freeze[1]:
            free = freeze[1] + 1 / capacity
        spans.append((due, free))
    seen = [Stall(start=freeze[0], seconds=freeze[1] - freeze[0], in_flight=1)] if freeze and stalls else []
    return backlog(0, _SECONDS, sweep(spans), seen)


def test_a_rate_above_capacity_piles_up() -> None:
    found = _found(20, 15)
    assert found is not None
    assert found == pytest.approx((60, 140), rel=0.1)


@pytest.mark.parametrize("start", range(0, 29, 2))
def test_one_freeze_is_no_rate_above_capacity_whenever_it_comes(start: int) -> None:
    assert _found(20, 25, (start, start + 3)) is None
    assert _found(20, 40, (start, start + 3)) is None


@pytest.mark.parametrize("start", range(0, 22, 2))
def test_one_freeze_that_nothing_reported_is_none_either_unless_it_is_the_end(start: int) -> None:
    assert _found(20, 25, (start, start + 3), stalls=False) is None


@pytest.mark.parametrize("start", [2, 10, 18, 26])
def test_a_rate_above_capacity_is_found_beside_a_freeze(start: int) -> None:
    assert _found(20, 12, (start, start + 1.5)) is not None


def test_a_rate_that_is_carried_is_none() -> None:
    assert _found(20, 21) is None
    assert backlog(0, 0, [], []) is None
