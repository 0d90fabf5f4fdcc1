"""How long a batch waits after failures that pass."""

from random import Random

from gateway.features.batches.run import Backoff


def test_the_wait_doubles_up_to_a_minute_and_lines_that_fail_meanwhile_do_not_prolong_it() -> None:
    backoff, clock = Backoff(Random(1)), 0.0
    waits = []
    for _ in range(10):
        backoff.failed(clock, 0.0)
        wait = backoff.wait_seconds(clock)
        backoff.failed(clock + wait / 2, 0.0)
        assert backoff.wait_seconds(clock) == wait
        waits.append(wait)
        clock += wait
    for number, wait in enumerate(waits):
        assert min(60, 2**number) <= wait <= 1.5 * min(60, 2**number)


def test_what_a_backend_asks_for_counts_and_success_starts_anew() -> None:
    backoff = Backoff(Random(1))
    backoff.failed(0.0, 20.0)
    assert 20 <= backoff.wait_seconds(0.0) <= 30
    assert backoff.wait_seconds(30.0) == 0
    backoff.failed(1000.0, 1e9)
    assert 60 <= backoff.wait_seconds(1000.0) <= 90
    backoff.succeeded()
    backoff.failed(2000.0, 0.0)
    assert 1 <= backoff.wait_seconds(2000.0) <= 1.5
