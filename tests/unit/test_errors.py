import inspect

import pytest

from gateway.core import errors
from gateway.core.errors import BackendError, ConnectFailed, GatewayError, QueueFull, ReusedConnectionClosed
from gateway.features.batches import errors as batches

LEAVES = [
    kind
    for module in (errors, batches)
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, GatewayError) and kind not in (GatewayError, BackendError)
]
OPENAI_TYPES = {
    "invalid_request_error",
    "authentication_error",
    "rate_limit_error",
    "insufficient_quota",
    "service_unavailable_error",
    "upstream_error",
    "internal_error",
}


@pytest.mark.parametrize("kind", LEAVES)
def test_every_error_knows_its_status_type_and_outcome(kind: type[GatewayError]) -> None:
    assert 400 <= kind.status < 600
    assert kind.type in OPENAI_TYPES
    assert kind.outcome.isidentifier()
    assert kind.__doc__
    if kind.status != 400:
        assert kind.code


@pytest.mark.parametrize("kind", LEAVES)
def test_an_error_states_only_what_its_base_class_has(kind: type[GatewayError]) -> None:
    stated = {name for name, value in vars(kind).items() if not name.startswith("_") and not hasattr(value, "__get__")}
    assert {name for name in stated if not hasattr(kind.__mro__[1], name)} == set()


@pytest.mark.parametrize("kind", [kind for kind in LEAVES if not issubclass(kind, BackendError)])
def test_an_error_of_ours_is_429_when_capacity_is_taken_and_503_when_there_is_none(kind: type[GatewayError]) -> None:
    assert (kind.type in ("rate_limit_error", "insufficient_quota")) == (kind.status == 429)
    assert (kind.type == "service_unavailable_error") == (kind.status == 503)


@pytest.mark.parametrize("kind", [kind for kind in LEAVES if issubclass(kind, BackendError)])
def test_a_backends_failure_is_a_5xx_unless_it_lacks_the_model_or_endpoint(kind: type[BackendError]) -> None:
    assert kind.status >= 500 or kind.code in ("model_not_found", "endpoint_not_offered")
    assert kind("why").answer is None


def test_what_is_not_the_backends_fault_is_not_counted_against_it() -> None:
    spared = {kind.__name__ for kind in LEAVES if issubclass(kind, BackendError) and not kind.counts_as_failure}
    assert {"ReusedConnectionClosed", "BackendBusy", "ModelMissing"} <= spared
    assert spared.isdisjoint({"ConnectFailed", "EngineDead", "StreamInterrupted", "BackendFault"})


def test_nothing_is_tried_again_once_an_answer_has_begun() -> None:
    retryable = {kind.__name__ for kind in LEAVES if issubclass(kind, BackendError) and kind.retryable}
    assert retryable.isdisjoint({"AnswerBrokeOff", "StreamInterrupted", "StreamStalled", "FirstByteTimeout"})
    assert {ConnectFailed.__name__, ReusedConnectionClosed.__name__} <= retryable


def test_an_error_has_what_its_response_contains() -> None:
    error = QueueFull("why", param="n", retry_after_seconds=1.5)
    assert (str(error), error.message, error.param, error.retry_after_seconds) == ("why", "why", "n", 1.5)


def test_what_is_the_requests_own_fault_is_not_to_be_sent_again() -> None:
    in_vain = (errors.DeadlineUnmeetable, errors.QuotaExceeded)
    assert all(kind("why").not_retryable for kind in in_vain)
    others = [kind for kind in LEAVES if kind not in (errors.MethodNotAllowed, *in_vain)]
    not_retryable = {kind.status for kind in others if kind("why").not_retryable}
    assert not_retryable.isdisjoint({408, 429, 500, 503, 504})
    assert {400, 401, 404, 413, 415, 431} <= not_retryable
    assert errors.BackendRefusesKey("why").not_retryable
    assert not errors.BackendFault("why").not_retryable
