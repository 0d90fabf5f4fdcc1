import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import errors
from gateway.config import UpstreamConfig
from gateway.dispatch import Attempts, RetryBudget
from gateway.errors import (
    BackendBusy,
    BackendDown,
    BackendError,
    BackendFault,
    ConnectFailed,
    FirstByteTimeout,
    FreshConnectionClosed,
    ModelMissing,
    ReusedConnectionClosed,
)

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, BackendError) and kind is not BackendError
]
# What may follow a first failure: (repeatable, others exist) for which another try is allowed.
ALWAYS, NEVER, ELSEWHERE, SAME_PLACE = "whatever", "never", "elsewhere", "even there"
RULES = {
    "ConnectFailed": ALWAYS,
    "ReusedConnectionClosed": SAME_PLACE,
    "FreshConnectionClosed": ELSEWHERE,
    "BackendDown": ELSEWHERE,
    "BackendBusy": ELSEWHERE,
    "ModelMissing": ELSEWHERE,
    "EngineDead": ELSEWHERE,
    "BackendRefusesKey": NEVER,
    "EndpointNotOffered": NEVER,
    "BackendAborted": ELSEWHERE,
    "AnswerBrokeOff": NEVER,
    "BackendFault": NEVER,
    "BackendProtocolError": NEVER,
    "FirstByteTimeout": NEVER,
    "StreamInterrupted": NEVER,
    "StreamStalled": NEVER,
    "WrongAnswer": NEVER,
}


def budget(minimum: int = 3, fraction: float = 0.1) -> RetryBudget:
    return RetryBudget(UpstreamConfig(retry_budget_min=minimum, retry_budget_fraction=fraction))


def tokens(of: RetryBudget) -> int:
    """How many retries are left; takes them."""
    count = 0
    while of.spend():
        count += 1
    return count


def test_the_table_names_every_kind_of_failure() -> None:
    assert set(RULES) == {kind.__name__ for kind in KINDS}


RETURNING = {
    "ConnectFailed",
    "FreshConnectionClosed",
    "BackendDown",
    "BackendAborted",
    "EngineDead",
}  # worth waiting for


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("others", [True, False])
@pytest.mark.parametrize("repeatable", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_first_failure_the_table_says_what_may_follow(
    kind: type[BackendError], repeatable: bool, others: bool, waits: bool
) -> None:
    others_left = others
    others = others or (waits and kind.__name__ in RETURNING)
    allowed = {
        ALWAYS: others,
        SAME_PLACE: repeatable,
        ELSEWHERE: repeatable and others,
        NEVER: False,
    }[RULES[kind.__name__]]
    attempts = Attempts(budget(), repeatable=repeatable)
    assert attempts.allows(kind("why"), "a", others=others_left, waits=waits) == allowed


@pytest.mark.parametrize("second", [kind for kind in KINDS if kind not in (ConnectFailed, ModelMissing)])
@pytest.mark.parametrize("first", [ReusedConnectionClosed, FreshConnectionClosed, BackendBusy])
def test_a_request_that_may_have_been_received_is_sent_twice_at_most(
    first: type[BackendError], second: type[BackendError]
) -> None:
    attempts = Attempts(budget(), repeatable=True)
    assert attempts.allows(first("why"), "a", others=True)
    assert not attempts.allows(second("why"), "b", others=True)


def test_a_backend_that_closes_all_its_connections_while_it_stops_counts_as_one_failure() -> None:
    attempts = Attempts(budget(), repeatable=True)
    assert attempts.allows(ReusedConnectionClosed("why"), "a", others=True)
    assert attempts.allows(FreshConnectionClosed("why"), "a", others=True)
    assert attempts.avoid == {"a"}
    assert not attempts.allows(FreshConnectionClosed("why"), "b", others=True)


@pytest.mark.parametrize("second", [BackendBusy, BackendFault, FirstByteTimeout])
def test_one_that_answers_on_the_new_connection_has_failed_twice(second: type[BackendError]) -> None:
    attempts = Attempts(budget(), repeatable=True)
    assert attempts.allows(ReusedConnectionClosed("why"), "a", others=True)
    assert not attempts.allows(second("why"), "a", others=True)


def test_a_backend_that_lacks_the_model_has_run_nothing_so_another_may_still_be_tried() -> None:
    attempts = Attempts(budget(), repeatable=True)
    assert attempts.allows(ReusedConnectionClosed("why"), "a", others=True)
    assert attempts.allows(ModelMissing("why"), "a", others=True)
    assert attempts.avoid == {"a"}
    assert not attempts.allows(FreshConnectionClosed("why"), "b", others=True)


def test_up_to_three_connections_that_never_came_about_are_replaced() -> None:
    attempts = Attempts(budget(), repeatable=False)
    assert [attempts.allows(ConnectFailed("why"), name, others=True) for name in "abcd"] == [True, True, True, False]
    assert attempts.avoid == frozenset("abcd")


def test_a_pooled_connection_that_was_closed_is_replaced_by_a_fresh_one_to_the_same_backend() -> None:
    attempts = Attempts(budget(), repeatable=True)
    assert not attempts.fresh
    attempts.allows(ReusedConnectionClosed("why"), "a", others=True)
    assert attempts.fresh
    assert attempts.avoid == frozenset()


def test_other_failures_are_not_tried_again_where_they_happened() -> None:
    attempts = Attempts(budget(), repeatable=True)
    attempts.allows(BackendBusy("why"), "a", others=True)
    assert attempts.avoid == frozenset("a")
    assert not attempts.fresh


def test_only_failures_that_may_be_the_requests_fault_are_charged_to_the_budget() -> None:
    shared = budget(minimum=1, fraction=0.0)
    for error in (ConnectFailed("why"), ReusedConnectionClosed("why"), BackendDown("why")):
        assert Attempts(shared, repeatable=True).allows(error, "a", others=True)
    assert Attempts(shared, repeatable=True).allows(BackendBusy("why"), "a", others=True)
    assert not Attempts(shared, repeatable=True).allows(BackendBusy("why"), "a", others=True)


def test_a_retry_that_cannot_be_made_is_not_charged() -> None:
    shared = budget(minimum=1, fraction=0.0)
    assert not Attempts(shared, repeatable=True).allows(BackendBusy("why"), "a", others=False)
    assert not Attempts(shared, repeatable=False).allows(BackendBusy("why"), "a", others=True)
    assert tokens(shared) == 1


def test_ten_requests_earn_one_retry() -> None:
    shared = budget(minimum=0)
    for _ in range(9):
        Attempts(shared, repeatable=True)
    assert not shared.spend()
    Attempts(shared, repeatable=True)
    Attempts(shared, repeatable=True)
    assert shared.spend()
    assert not shared.spend()


@given(st.integers(0, 20), st.floats(0, 1), st.integers(0, 2000))
def test_retries_never_exceed_what_was_given_and_earned_and_little_is_saved_up(
    minimum: int, fraction: float, requests: int
) -> None:
    shared = budget(minimum, fraction)
    for _ in range(requests):
        shared.earn()
    assert tokens(shared) <= min(minimum + fraction * requests, max(100 * fraction, minimum)) + 1e-6
