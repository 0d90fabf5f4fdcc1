"""Which failures are waited for, which are tried a few times, and which are final."""

import pytest

from gateway.core import errors
from gateway.features.batches.run import _has_budget_within, _passes

PASSING = [
    errors.QueueFull("x"),
    errors.WaitExpired("x"),
    errors.NoBackend("x"),
    errors.MemoryFull("x"),
    errors.OutOfDescriptors("x"),
    errors.Draining("x"),
    errors.ModelNotFound.of("m"),
    errors.ConnectFailed("x"),
    errors.BackendDown("x"),
    errors.BackendBusy("x"),
    errors.BackendRefusesKey("x"),
    errors.ModelMissing("x"),
    errors.EngineDead("x"),
    errors.BackendAborted("x"),
]
NOT_PASSING = [
    errors.InvalidRequest("x"),
    errors.Unauthorized("x"),
    errors.ModelNotFound("Unknown response.", param="previous_response_id"),
    errors.EndpointNotOffered("x"),
    errors.BackendFault("x"),
    errors.AnswerBrokeOff("x"),
    errors.FirstByteTimeout("x"),
    errors.WrongAnswer("x"),
    errors.InternalError("x"),
    errors.QuotaExceeded("x", retry_after_seconds=60.0),
]


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
def test_what_passes(error: errors.GatewayError) -> None:
    assert _passes(error)


@pytest.mark.parametrize("error", NOT_PASSING, ids=lambda error: type(error).__name__)
def test_what_does_not_pass(error: errors.GatewayError) -> None:
    assert not _passes(error)


def test_a_budget_that_is_renewed_before_the_window_closes_is_waited_for() -> None:
    used_up = errors.QuotaExceeded("x", retry_after_seconds=60.0)
    assert _has_budget_within(used_up, 61.0)
    assert not _has_budget_within(used_up, 60.0)
    assert not _has_budget_within(errors.QuotaExceeded("Request too large."), 61.0)
    assert not _has_budget_within(errors.QueueFull("x", retry_after_seconds=60.0), 61.0)
