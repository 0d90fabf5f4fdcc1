"""Rates between two looks at the gateway's counters."""

from gateway.core.observe.metrics import Metrics
from gateway.core.resources import ProcessUse, process_use
from gateway.features.page.gateway_view import cpu_share, lag_view, totals_of, traffic_view
from tests.unit.page.builders import record


def test_rates_are_what_was_counted_between_two_looks() -> None:
    metrics = Metrics()
    metrics.finished([record(), record("2", "queue_full")])
    before = totals_of(metrics, ProcessUse(5.0, 1), 100.0)
    metrics.finished([record() for _ in range(10)])
    after = totals_of(metrics, ProcessUse(5.5, 1), 102.0)
    shown = traffic_view(before, after)
    assert shown["outcomes"] == {"completed": 5.0}
    assert (shown["prompt_tokens"], shown["output_tokens"], shown["hit_tokens"]) == (500.0, 35.0, 400.0)
    assert shown["since_start"]["outcomes"] == {"completed": 11, "queue_full": 1}
    assert shown["since_start"]["predicted_hit_tokens"] == 990
    assert cpu_share(before, after) == 0.25


def test_the_lag_is_that_of_the_time_between() -> None:
    metrics = Metrics()
    nothing = totals_of(metrics, ProcessUse(0.0, 1), 0.0)
    assert lag_view(nothing, nothing) == {"mean_ms": 0.0, "most_ms": 0.0}
    metrics.loop_lag.observe((), 0.5)
    before = totals_of(metrics, ProcessUse(0.0, 1), 1.0)
    assert lag_view(nothing, before) == {"mean_ms": 500.0, "most_ms": 1000.0}
    metrics.loop_lag.observe((), 0.002, 0.004)
    after = totals_of(metrics, ProcessUse(0.0, 1), 2.0)
    assert lag_view(before, after) == {"mean_ms": 3.0, "most_ms": 5.0}
    metrics.loop_lag.observe((), 2.0)
    assert lag_view(after, totals_of(metrics, ProcessUse(0.0, 1), 3.0))["most_ms"] is None


def test_the_process_uses_time_and_memory() -> None:
    use = process_use()
    assert use.cpu_seconds > 0
    assert use.memory_bytes > 10_000_000
