"""What a soak makes of its samples and of the last page of metrics."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.soak.figures import ZERO_GAUGES, Sample, busy_gauges, lag_share_above, slope_mib

AT_REST = {
    'gateway_backend_in_flight{backend="a"}': 0.0,
    'gateway_backend_kv_tokens_reserved{backend="a"}': 0.0,
    'gateway_queued_requests{model="m"}': 0.0,
    "gateway_held_bytes": 0.0,
    'gateway_backend_in_flight_limit{backend="a"}': 8.0,
}


@given(st.floats(-50, 50), st.integers(0, 10**9), st.lists(st.integers(0, 10**6), min_size=2, unique=True))
def test_the_slope_of_a_line_is_its_own(mib: float, first_bytes: int, requests: list[int]) -> None:
    samples = [Sample(each, int(first_bytes + 10**8 + mib * 1048576 * each / 100_000)) for each in requests]
    if max(requests) - min(requests) > 1000:
        assert slope_mib(samples) == pytest.approx(mib, abs=0.01)


def test_one_table_that_doubles_is_no_growth_and_many_steps_are() -> None:
    doubling = [Sample(each * 1000, 10**8 + 5 * 1048576 * (each > 50)) for each in range(400)]
    assert slope_mib(doubling) == 0
    leaking = [Sample(each * 1000, 10**8 + 1048576 * (each // 50)) for each in range(400)]
    assert slope_mib(leaking) == pytest.approx(2.0, abs=0.3)


def test_too_few_samples_have_no_slope() -> None:
    assert slope_mib([]) == slope_mib([Sample(1, 5)]) == slope_mib([Sample(1, 5), Sample(1, 9)]) == 0


def test_at_rest_is_where_every_gauge_is_there_and_zero() -> None:
    assert busy_gauges(AT_REST) == []
    assert len(busy_gauges({})) == len(ZERO_GAUGES)
    assert busy_gauges({**AT_REST, "gateway_held_bytes": 7.0}) == ["gateway_held_bytes is 7"]
    violated = {'recount_violations_total{what="x"}': 1.0}
    assert busy_gauges(AT_REST | violated) == ['recount_violations_total{what="x"} is 1']


def test_the_share_of_late_looks_is_taken_from_the_histogram() -> None:
    page = {'gateway_event_loop_lag_seconds_bucket{le="0.05"}': 90.0, "gateway_event_loop_lag_seconds_count": 100.0}
    assert lag_share_above(page) == pytest.approx(0.1)
    assert lag_share_above({}) == 0
