"""Samples give the figures that the report compares."""

from tests.unit.bench.builders import make_sample


def test_cpu_is_spread_over_what_was_counted_in_the_window() -> None:
    sample = make_sample(proxy_cpu_seconds=2.0, requests=100_000, events=0)
    assert sample.cpu_us_per_request == 20
    assert sample.cpu_us_per_event is None


def test_errors_of_all_kinds_are_added_up() -> None:
    assert make_sample(errors={"lost": 2, "status": 3}).load.error_count == 5
