"""Axes and figures."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.report.chart import linear, logarithmic, nice_step, nice_top, percentiles
from loadtest.report.formatting import milliseconds, number, percent

_SIZES = st.floats(1e-3, 1e9)


@given(_SIZES)
def test_a_nice_top_holds_the_value_wastes_little_and_ends_on_a_tick(value: float) -> None:
    top = nice_top(value)
    axis = linear(0, top, 0, 100, 4)
    assert value <= top * (1 + 1e-9)
    assert top <= value * 2.1
    assert axis.place(axis.ticks[-1][0]) == pytest.approx(100)


@given(_SIZES)
def test_a_nice_step_is_round_and_not_below_the_rough_one(rough: float) -> None:
    step = nice_step(rough)
    assert step >= rough * (1 - 1e-9)
    assert any(math.isclose(step / 10 ** math.floor(math.log10(step) + 1e-9), lead) for lead in (1, 2, 2.5, 5))


@given(_SIZES, st.floats(1, 1e5))
def test_a_log_axis_holds_its_values_and_has_few_distinct_ticks(low: float, factor: float) -> None:
    axis = logarithmic(low, low * factor, 100, 0)
    assert -1e-6 <= axis.place(low * factor) <= axis.place(low) <= 100 + 1e-6
    assert 2 <= len(axis.ticks) <= 16
    assert len({label for _, label in axis.ticks}) == len(axis.ticks)


def test_ticks_of_fractions_are_distinguished() -> None:
    assert [label for _, label in linear(0, 1, 0, 1, 4).ticks] == ["0.00", "0.25", "0.50", "0.75", "1.00"]
    assert [label for _, label in linear(0, 2, 0, 1, 4, " s").ticks] == ["0.0 s", "0.5 s", "1.0 s", "1.5 s", "2.0 s"]


def test_percentiles_reach_as_far_as_the_count_of_values_carries() -> None:
    assert [name for _, name in percentiles(100, 0, 1).ticks] == ["0", "p50", "p90", "p99"]
    assert [name for _, name in percentiles(12_000, 0, 1).ticks][-1] == "p99.99"
    assert percentiles(1000, 0, 300).place(90) == pytest.approx(100)
    assert percentiles(1000, 0, 300).place(100) == pytest.approx(300)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (0.123, "0.12 ms"), (12.34, "12.3 ms"), (123.4, "123 ms"), (1234, "1.23 s"), (12_345, "12.3 s")],
)
def test_milliseconds_have_three_digits_and_a_fitting_unit(value: float | None, shown: str) -> None:
    assert milliseconds(value) == shown


def test_numbers_and_percentages_read_well() -> None:
    assert [number(value) for value in (None, 7, 0.5, 12.34, 1234567.8)] == ["-", "7", "0.50", "12.3", "1,234,568"]
    assert [percent(value) for value in (None, 0.8765)] == ["-", "87.6%"]
