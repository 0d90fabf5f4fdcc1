"""Predictions are read from the access log as the gateway writes it."""

import pytest

from gateway.core.observe.log import LineForm, iso_time
from gateway.core.observe.record import Record
from tests.bench.routing.fidelity import Prediction, fidelity, predictions, recovery


def line(arrived: float, predicted: int, actual: int | None, outcome: str = "completed", backend: str = "a") -> bytes:
    """A request that waited a second, then took two."""
    record = Record("id", "completions", arrived)
    record.queue_seconds, record.ended_seconds = 1.0, arrived + 3.0
    record.outcome, record.backend, record.prompt_tokens = outcome, backend, 100
    record.predicted_hit_tokens, record.actual_hit_tokens = predicted, actual
    return LineForm().line(record, iso_time(1000.0 + record.ended_seconds))


def test_answered_requests_count_from_a_moment_on_in_the_order_in_which_they_were_placed() -> None:
    log = b"".join(
        [
            line(9, 80, 64),
            b"something else that was printed\n",
            line(5, 0, 32),
            line(1, 50, 50),  # before
            line(6, 10, None),  # the engine did not tell
            line(7, 10, 0, outcome="client_gone"),
        ]
    )
    found = predictions(log, since=1003.0)
    assert [(one.placed, one.predicted, one.actual) for one in found] == [(1006.0, 0, 32), (1010.0, 80, 64)]


def test_errors_are_shares_of_the_prompts_tokens() -> None:
    found = fidelity([Prediction(0, "a", 80, 64, 100), Prediction(1, "a", 0, 32, 300)])
    assert found is not None
    assert found.requests == 2
    assert [found.error, found.over, found.under] == pytest.approx([48 / 400, 16 / 400, 32 / 400])
    assert found.error_a_request == pytest.approx((0.16 + 32 / 300) / 2)
    assert fidelity([]) is None


def test_recovery_looks_at_the_backends_that_lost_something_by_the_ordinal_of_their_requests() -> None:
    before = [Prediction(0, "a", 100, 100, 100), Prediction(0, "b", 100, 0, 100)]
    after = [Prediction(10 + number, "a", 50 if number < 5 else 0, 0, 100) for number in range(8)]
    found = recovery([*before, *after, Prediction(10, "b", 90, 0, 100)], ["a"], at=5)
    assert found.before is not None
    assert (found.before.requests, found.before.error) == (1, 0)
    errors = {name: one.error for name, one in found.after.items() if one is not None}
    assert errors == {"1 to 5": 0.5, "6 to 20": 0.0}
