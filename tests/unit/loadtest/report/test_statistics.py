"""Percentiles and distributions."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.report.statistics import distribution_ms, distribution_of_ticks_ms, percentile

_PERCENTS = st.sampled_from([0.0, 1, 7, 29, 50, 58, 90, 95, 99, 99.9, 100])


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300), _PERCENTS)
def test_a_percentile_is_the_nearest_rank(values: list[float], percent: float) -> None:
    expected = np.percentile(values, percent, method="inverted_cdf")
    assert percentile(sorted(values), percent) == expected


@given(st.integers(1, 5000), st.integers(0, 100))
def test_a_percentile_covers_at_least_its_share_and_no_smaller_value_does(count: int, percent: int) -> None:
    value = percentile(range(1, count + 1), percent)
    assert value * 100 >= percent * count
    assert value == 1 or (value - 1) * 100 < percent * count


def test_there_is_no_percentile_of_nothing() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    assert distribution_ms([]) is None
    assert distribution_of_ticks_ms({}, 1000) is None


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=300))
def test_counted_ticks_have_the_distribution_of_their_values(ticks: list[int]) -> None:
    counted = distribution_of_ticks_ms(Counter(ticks), 1000)
    listed = distribution_ms([tick / 1000 for tick in ticks])
    assert counted is not None
    assert listed is not None
    assert counted.count == listed.count
    for name in ("mean", "p50", "p90", "p95", "p99", "max"):
        assert getattr(counted, name) == pytest.approx(getattr(listed, name))
