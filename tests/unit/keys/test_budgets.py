"""Tokens of a day and of a month: never more than the limit but for wrong estimates, and renewed when it is over."""

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.core.errors import QuotaExceeded, RateLimited
from gateway.features.keys.budgets import Budgets, month_of
from gateway.features.keys.rate_limits import KeyLimits
from gateway.features.keys.settings import KeyConfig
from tests.unit.front.wires import Clock

EPOCH = date(1970, 1, 1)


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def key(**limits: Any) -> KeyConfig:
    return KeyConfig(name="k", key="k", **limits)


def refused(budgets: Budgets | KeyLimits, tokens: int) -> QuotaExceeded:
    with pytest.raises(QuotaExceeded) as error:
        budgets.charge(tokens)
    return error.value


@given(st.integers(0, 200_000))
def test_a_month_has_the_days_of_the_calendar(day: int) -> None:
    first, end = month_of(day)
    month = (EPOCH + timedelta(day)).replace(day=1)
    assert EPOCH + timedelta(first) == month
    assert EPOCH + timedelta(end) == (month + timedelta(32)).replace(day=1)


def test_a_day_is_renewed_at_midnight_and_a_month_on_its_first_day() -> None:
    clock = Clock(at("2026-12-30 18:00:00"))
    budgets = Budgets(key(tokens_per_day=100, tokens_per_month=150), clock)
    budgets.charge(90)
    error = refused(budgets, 11)
    assert (
        "the quota of 100 tokens per day of this API key: 10 remain, and this request needs about 11" in error.message
    )
    assert error.message.endswith("The quota is renewed at midnight UTC.")
    assert (error.retry_after_seconds, error.not_retryable) == (6 * 3600, True)
    clock.now = at("2026-12-31 00:00:00")
    error = refused(budgets, 61)
    assert "150 tokens per month" in error.message
    assert error.message.endswith("on the first day of the next month (UTC).")
    assert error.retry_after_seconds == 24 * 3600
    budgets.charge(60)
    assert repr(budgets) == ", 60/100 a day, 150/150 a month"
    clock.now = at("2027-01-01 00:00:00")
    budgets.charge(100)
    assert repr(budgets) == ", 100/100 a day, 100/150 a month"


def test_a_request_that_is_larger_than_the_budget_is_refused_for_good() -> None:
    error = refused(Budgets(key(tokens_per_day=100), Clock()), 101)
    assert (error.retry_after_seconds, "too large" in error.message) == (None, True)


def test_what_was_charged_yesterday_is_not_given_back_today() -> None:
    clock = Clock(at("2026-11-26 23:59:59"))
    budgets = Budgets(key(tokens_per_day=100, tokens_per_month=1000), clock)
    day = budgets.charge(80)
    clock.now += 2
    budgets.charge(50)
    budgets.correct(day, 80, 10)
    assert repr(budgets) == ", 50/100 a day, 60/1000 a month"


@pytest.mark.parametrize(("reported", "used"), [(10**15, 180), (-(10**15), 0), (81, 81)])
def test_an_answer_costs_at_most_the_limit_more_than_expected(reported: int, used: int) -> None:
    budgets = Budgets(key(tokens_per_day=100), Clock())
    budgets.correct(budgets.charge(80), 80, reported)
    assert repr(budgets) == f", {used}/100 a day"


def test_a_clock_that_is_set_back_a_little_renews_nothing_and_one_that_was_wrong_recovers() -> None:
    clock = Clock(at("2026-11-27 00:00:01"))
    budgets = Budgets(key(tokens_per_day=100, tokens_per_month=100), clock)
    clock.now = at("2026-11-26 23:59:59")
    budgets.correct(budgets.charge(80), 80, 70)
    assert repr(budgets) == ", 70/100 a day, 70/100 a month"
    clock.now = at("2036-01-01 00:00:00")
    budgets.charge(100)
    clock.now = at("2026-11-27 00:00:00")
    budgets.charge(100)
    assert refused(budgets, 1).retry_after_seconds == 24 * 3600


def test_other_limits_take_over_what_was_used() -> None:
    clock = Clock()
    limits = KeyLimits(key(tokens_per_day=100), clock, clock)
    assert limits.most_tokens == 100
    limits.charge(80)
    limits.apply(key(tokens_per_day=120, tokens_per_month=90, tokens_per_minute=110))
    assert limits.most_tokens == 90
    assert repr(limits) == "<KeyLimits 1 running, 110/110, 80/120 a day, 0/90 a month>"
    limits.apply(key(max_concurrent_requests=2))
    assert (limits.most_tokens, limits.spent()) == (None, {})
    limits.correct(80, 80, counts=True, day=0)


def test_a_request_over_the_budget_takes_nothing_of_the_rates() -> None:
    clock = Clock()
    limits = KeyLimits(key(tokens_per_day=100, requests_per_minute=2), clock, clock)
    refused(limits, 101)
    assert repr(limits) == "<KeyLimits 0 running, 2/2, 0/100 a day>"
    limits.charge(1)
    limits.charge(1)
    with pytest.raises(RateLimited):
        limits.charge(1)
    assert repr(limits) == "<KeyLimits 2 running, 0/2, 2/100 a day>"


class BudgetMachine(RuleBasedStateMachine):
    """Requests of one key in virtual time, over days, months and restarts; the model is the calendar's own."""

    @initialize(
        start=st.datetimes(datetime(2024, 1, 1), datetime(2030, 1, 1)),
        day=st.none() | st.integers(1, 5000),
        month=st.none() | st.integers(1, 20000),
    )
    def begin(self, start: datetime, day: int | None, month: int | None) -> None:
        self.clock = Clock(start.replace(tzinfo=UTC).timestamp())
        self.key = key(tokens_per_day=day, tokens_per_month=month)
        self.limits = {"day": day, "month": month}
        self.budgets = Budgets(self.key, self.clock)
        self.running: list[tuple[int, int, dict[str, str]]] = []
        self.used = {"day": 0, "month": 0}  # charged and corrected in the current period
        self.unexpected = {"day": 0, "month": 0}  # of it: more than was estimated
        self.seen = self.periods()

    def periods(self) -> dict[str, str]:
        now = datetime.fromtimestamp(self.clock.now, UTC)
        return {"day": f"{now:%Y-%m-%d}", "month": f"{now:%Y-%m}"}

    @rule(hours=st.floats(0, 24 * 40) | st.floats(0, 30))
    def pass_time(self, hours: float) -> None:
        self.clock.now += hours * 3600
        before, self.seen = self.seen, self.periods()
        for name in self.seen:
            if self.seen[name] != before[name]:
                self.used[name] = self.unexpected[name] = 0

    @rule(tokens=st.integers(0, 3000))
    def arrive(self, tokens: int) -> None:
        limits = {name: limit for name, limit in self.limits.items() if limit is not None}
        fits = all(self.used[name] + tokens <= limit for name, limit in limits.items())
        try:
            day = self.budgets.charge(tokens)
        except QuotaExceeded as error:
            assert not fits
            until = error.retry_after_seconds
            if until is not None:  # then, and no earlier, there is another period
                assert until > 0
                later = Clock(self.clock.now + until + 1e-3)
                machine, self.clock = self.clock, later
                assert self.periods() != self.seen
                self.clock = machine
            return
        assert fits
        for name in self.used:
            self.used[name] += tokens
        self.running.append((day, tokens, self.seen))

    @rule(data=st.data(), share=st.floats(0, 1.5))
    def end(self, data: st.DataObject, share: float) -> None:
        if not self.running:
            return
        day, charged, began = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        used = int(charged * share)
        self.budgets.correct(day, charged, used)
        for name, limit in self.limits.items():
            if began[name] == self.seen[name] and limit is not None:
                difference = min(used, charged + limit) - charged
                self.used[name] += difference
                self.unexpected[name] += max(0, difference)

    @rule()
    def restart(self) -> None:
        spent = self.budgets.spent()
        self.budgets = Budgets(self.key, self.clock)
        self.budgets.restore(spent)

    @invariant()
    def what_is_counted_is_what_the_calendar_says(self) -> None:
        for name, (first_day, used) in self.budgets.spent().items():
            began = EPOCH + timedelta(first_day)
            is_current = self.seen[name] == (f"{began:%Y-%m-%d}" if name == "day" else f"{began:%Y-%m}")
            if is_current:
                assert used == self.used[name]
            else:
                assert self.used[name] == 0  # nothing has been asked of it since the period began

    @invariant()
    def no_more_is_used_than_the_limit_but_for_what_was_not_expected(self) -> None:
        for name, limit in self.limits.items():
            assert limit is None or self.used[name] <= limit + self.unexpected[name]


TestBudgetMachine = BudgetMachine.TestCase
TestBudgetMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
