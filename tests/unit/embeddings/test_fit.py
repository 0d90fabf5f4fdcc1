"""The line through what was measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.features.embeddings.batching import LinearFit


def test_without_measurements_it_is_the_guess() -> None:
    assert LinearFit(2.0, 0.25, u=4.0, v=400.0).coefficients == pytest.approx((2.0, 0.25))


def test_it_finds_what_measurements_lie_on() -> None:
    fit = LinearFit(1.0, 1.0)
    for number in range(800):
        fit.learn(1.0, number % 64 + 1, 0.003 + 0.0005 * (number % 64 + 1))
    assert fit.coefficients == pytest.approx((0.003, 0.0005), rel=0.2)
    overhead, each = fit.coefficients
    assert overhead + 64 * each == pytest.approx(0.035, rel=0.02)


def test_it_forgets() -> None:
    fit = LinearFit(1.0, 1.0)
    for overhead in (5.0, 1.0):
        for number in range(600):
            fit.learn(1.0, number % 8, overhead)
    assert fit.coefficients == pytest.approx((1.0, 0.0), abs=0.01)


@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e6), st.floats(0, 1e6))))
def test_it_never_estimates_less_than_nothing(measured: list[tuple[float, float, float]]) -> None:
    fit = LinearFit(2.0, 0.25, u=4.0, v=400.0)
    for each in measured:
        fit.learn(*each)
    assert min(fit.coefficients) >= 0
