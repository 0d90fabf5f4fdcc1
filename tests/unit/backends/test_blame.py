"""Whose fault error answers are, compared with the whole history of requests."""

import math

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.backends.health import Blame

from .conftest import peers

LATELY, PATIENCE = 30.0, 6.0
ALONE: list[Blame] = []

History = list[tuple[bool, str | None, float]]  # served or not, whose it was, seconds since the one before


def at_fault(history: list[tuple[bool, str | None, float]], peer_blames: list[Blame], now: float) -> int:
    """The rule by its words: failures of the backend, by everything that has happened, oldest first."""
    last_good = max((place for place, (served, _, _) in enumerate(history) if served), default=-1)
    errors = history[last_good + 1 :]
    tenants = {tenant for _, tenant, _ in errors} - {None}
    if len(tenants) > 1:
        return len(errors)
    others = [at for served, tenant, at in history if served and {tenant} != (tenants or {None})]
    if any(now - at <= LATELY for at in others) or all(now - peer.served_seconds > LATELY for peer in peer_blames):
        return 0
    if any(now - peer.erred_seconds <= LATELY for peer in peer_blames) and now - errors[0][2] < PATIENCE:
        return 0
    return len(errors)


SECONDS = st.sampled_from([0.0, 0.1, 1.0, 5.0, 6.0, 10.0, 30.0, 31.0])
STEPS = st.lists(st.tuples(st.booleans(), st.sampled_from(["a", "b", "c", None]), SECONDS), max_size=20)


@given(STEPS, SECONDS, SECONDS)
def test_whatever_happened_error_answers_count_by_the_rule(steps: History, served: float, erred: float) -> None:
    blame, now = Blame(), 100.0
    history: list[tuple[bool, str | None, float]] = []
    for is_served, tenant, seconds in steps:
        now += seconds
        history.append((is_served, tenant, now))
        if is_served:
            blame.served(tenant, now)
            continue
        blame.erred(tenant, now)
        for others in (ALONE, peers(now - served, -math.inf), peers(now - served, now - erred)):
            assert blame.failures(others, PATIENCE, now) == at_fault(history, others, now)


def test_what_is_forgiven_counts_no_more() -> None:
    blame = Blame()
    for tenant in "ab":
        blame.erred(tenant, 1.0)
    blame.forgive()
    blame.erred("a", 2.0)
    assert blame.failures(ALONE, PATIENCE, 2.0) == 0
    assert blame.failures(peers(1.0, -math.inf), PATIENCE, 2.0) == 1
