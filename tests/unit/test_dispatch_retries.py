import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import UpstreamConfig
from gateway.core import errors
from gateway.core.dispatch import MOST_EXECUTIONS, Attempts, RetryBudget
from gateway.core.errors import (
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
from gateway.core.observe.record import Record

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


class Story:
    """The attempts of one request, whose failures are noted as the dispatcher notes them."""

    def __init__(self, shared: RetryBudget | None = None, *, repeatable: bool = True) -> None:
        self.record = Record("id-1", "chat", 0.0)
        self.attempts = Attempts(shared or budget(), self.record, repeatable)

    def allows(self, error: BackendError, backend: str, *, others: bool, waits: bool = False) -> bool:
        self.record.failed(error.result, ran=error.ran)
        return self.attempts.allows(error, backend, others=others, waits=waits)


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
    story = Story(repeatable=repeatable)
    assert story.allows(kind("why"), "a", others=others_left, waits=waits) == allowed


@pytest.mark.parametrize("second", [kind for kind in KINDS if kind not in (ConnectFailed, ModelMissing)])
@pytest.mark.parametrize("first", [ReusedConnectionClosed, FreshConnectionClosed, BackendBusy])
def test_a_request_that_may_have_been_received_is_sent_twice_at_most(
    first: type[BackendError], second: type[BackendError]
) -> None:
    story = Story()
    assert story.allows(first("why"), "a", others=True)
    assert not story.allows(second("why"), "b", others=True)


Failures = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from("abc"), st.booleans(), st.booleans()))


@given(Failures)
def test_whatever_fails_in_whatever_order_a_request_is_executed_twice_at_most(
    failures: list[tuple[type[BackendError], str, bool, bool]],
) -> None:
    story, ran = Story(budget(1000)), 0
    for kind, backend, others, waits in failures:
        is_last = ran + 1 >= MOST_EXECUTIONS
        ran += kind not in (ConnectFailed, ModelMissing)
        assert ran <= MOST_EXECUTIONS
        allowed = story.allows(kind("why"), backend, others=others, waits=waits)
        assert not (allowed and is_last and kind not in (ConnectFailed, ModelMissing))
        if not allowed:
            return


@given(Failures)
def test_what_must_not_be_repeated_is_sent_again_only_if_no_connection_came_about(
    failures: list[tuple[type[BackendError], str, bool, bool]],
) -> None:
    story = Story(budget(1000), repeatable=False)
    for kind, backend, others, waits in failures:
        assert not story.allows(kind("why"), backend, others=others, waits=waits) or kind is ConnectFailed


def test_a_backend_that_closes_its_connections_while_it_stops_is_left_for_another() -> None:
    story = Story()
    assert story.allows(ReusedConnectionClosed("why"), "a", others=True)
    assert (story.attempts.avoid, story.attempts.fresh) == ({"a"}, True)
    assert not story.allows(FreshConnectionClosed("why"), "b", others=True)


@pytest.mark.parametrize("second", [FreshConnectionClosed, BackendBusy, BackendFault, FirstByteTimeout])
def test_a_backend_that_closed_a_pooled_connection_may_have_executed_the_request(second: type[BackendError]) -> None:
    story = Story()
    assert story.allows(ReusedConnectionClosed("why"), "a", others=False)
    assert not story.allows(second("why"), "a", others=True, waits=True)


def test_a_backend_that_lacks_the_model_has_run_nothing_so_another_may_still_be_tried() -> None:
    story = Story()
    assert story.allows(ReusedConnectionClosed("why"), "a", others=True)
    assert story.allows(ModelMissing("why"), "a", others=True)
    assert story.attempts.avoid == {"a"}
    assert not story.allows(FreshConnectionClosed("why"), "b", others=True)


def test_up_to_three_connections_that_never_came_about_are_replaced() -> None:
    story = Story(repeatable=False)
    assert [story.allows(ConnectFailed("why"), name, others=True) for name in "abcd"] == [True, True, True, False]
    assert story.attempts.avoid == frozenset("abcd")


def test_a_pooled_connection_of_the_only_backend_is_replaced_by_a_fresh_one() -> None:
    story = Story()
    assert not story.attempts.fresh
    story.allows(ReusedConnectionClosed("why"), "a", others=False)
    assert story.attempts.fresh
    assert story.attempts.avoid == frozenset()


def test_other_failures_are_not_tried_again_where_they_happened() -> None:
    story = Story()
    story.allows(BackendBusy("why"), "a", others=True)
    assert story.attempts.avoid == frozenset("a")
    assert not story.attempts.fresh


def test_only_failures_that_may_be_the_requests_fault_are_charged_to_the_budget() -> None:
    shared = budget(minimum=1, fraction=0.0)
    for error in (ConnectFailed("why"), ReusedConnectionClosed("why"), BackendDown("why")):
        assert Story(shared).allows(error, "a", others=True)
    assert Story(shared).allows(BackendBusy("why"), "a", others=True)
    assert not Story(shared).allows(BackendBusy("why"), "a", others=True)


def test_a_retry_that_cannot_be_made_is_not_charged() -> None:
    shared = budget(minimum=1, fraction=0.0)
    assert not Story(shared).allows(BackendBusy("why"), "a", others=False)
    assert not Story(shared, repeatable=False).allows(BackendBusy("why"), "a", others=True)
    assert tokens(shared) == 1


def test_ten_requests_earn_one_retry() -> None:
    shared = budget(minimum=0)
    for _ in range(9):
        Story(shared)
    assert not shared.spend()
    Story(shared)
    Story(shared)
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
