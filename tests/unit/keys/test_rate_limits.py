"""What a key may use, and that it never uses more."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.core.errors import RateLimited
from gateway.features.keys.rate_limits import Bucket, KeyLimits, in_words
from gateway.features.keys.settings import KeyConfig


@dataclass
class Clock:
    """Seconds that pass when the test sets them."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def limits(clock: Clock | None = None, **allowed: int) -> KeyLimits:
    return KeyLimits(KeyConfig(name="k", key="k", **allowed), clock or Clock(), Clock())  # type: ignore[arg-type]


def refused(of: KeyLimits, tokens: int = 1) -> RateLimited:
    with pytest.raises(RateLimited) as error:
        of.charge(tokens)
    return error.value


def used(of: KeyLimits, charged: int, used_tokens: int, *, counts: bool = True) -> None:
    of.charge(charged)
    of.correct(charged, used_tokens, counts=counts)


def test_a_minutes_worth_of_requests_may_come_at_once_and_then_one_each_sixtieth() -> None:
    clock = Clock()
    key = limits(clock, requests_per_minute=6)
    for _ in range(6):
        used(key, 1, 1)
    error = refused(key)
    assert "6 requests per minute" in error.message
    assert error.retry_after_seconds == pytest.approx(10.0)
    clock.now += 10.0
    used(key, 1, 1)
    assert refused(key).retry_after_seconds == pytest.approx(10.0)


def test_tokens_are_charged_by_what_is_expected_and_put_right_by_what_was_used() -> None:
    clock = Clock()
    key = limits(clock, tokens_per_minute=6000)
    key.charge(4000)
    error = refused(key, 2500)
    assert "6000 tokens per minute reached for this API key: 2000 remain, this request needs 2500" in error.message
    assert error.retry_after_seconds == pytest.approx(5.0)
    key.correct(4000, 1000, counts=False)
    used(key, 5000, 5000)
    assert refused(key, 1).retry_after_seconds == pytest.approx(0.01)


def test_one_who_needed_more_than_expected_leaves_debt() -> None:
    clock = Clock()
    key = limits(clock, tokens_per_minute=600)
    used(key, 100, 700)
    assert refused(key, 100).retry_after_seconds == pytest.approx(20.0)
    assert b"x-ratelimit-remaining-tokens: 0\r\nx-ratelimit-reset-tokens: 1m10s\r\n" in key.headers()


@pytest.mark.parametrize(("reported", "left"), [(10**12, -50), (-(10**12), 100), (151, -50), (149, -49)])
def test_one_answer_costs_no_more_than_a_minute_beyond_what_was_expected(reported: int, left: int) -> None:
    of = limits(Clock(), tokens_per_minute=100)
    used(of, 50, reported)
    assert repr(of) == f"<KeyLimits 0 running, {left}/100>"


def test_a_request_for_which_no_backend_worked_costs_nothing() -> None:
    key = limits(requests_per_minute=1, tokens_per_minute=100)
    for _ in range(3):
        used(key, 100, 0, counts=False)
    used(key, 100, 100)
    assert "requests" in refused(key).message


def test_so_many_may_run_at_once_however_they_end() -> None:
    key = limits(max_concurrent_requests=2)
    key.charge(1)
    key.charge(1)
    error = refused(key)
    assert "limit of 2 requests (running and queued) reached" in error.message
    assert error.retry_after_seconds == 1.0
    key.correct(1, 0, counts=True)
    key.correct(1, 0, counts=False)
    assert key.running == 0


def test_what_can_never_be_admitted_is_not_to_be_sent_again() -> None:
    error = refused(limits(tokens_per_minute=100), 101)
    assert error.not_retryable
    assert error.retry_after_seconds is None
    assert "too large" in error.message
    assert refused(limits(max_concurrent_requests=1, tokens_per_minute=100), 101) is not None


def test_a_refusal_takes_nothing_of_any_limit() -> None:
    key = limits(requests_per_minute=2, tokens_per_minute=100, max_concurrent_requests=5)
    used(key, 100, 100)
    for _ in range(10):
        refused(key, 50)
    assert b"x-ratelimit-remaining-requests: 1\r\n" in key.headers()
    assert key.running == 0


def test_the_headers_show_limit_remaining_and_reset() -> None:
    key = limits(requests_per_minute=60, tokens_per_minute=6000)
    key.charge(1500)
    assert key.headers().decode().split("\r\n") == [
        "x-ratelimit-limit-requests: 60",
        "x-ratelimit-remaining-requests: 59",
        "x-ratelimit-reset-requests: 1s",
        "x-ratelimit-limit-tokens: 6000",
        "x-ratelimit-remaining-tokens: 4500",
        "x-ratelimit-reset-tokens: 15s",
        "",
    ]


def test_a_key_whose_requests_alone_are_limited_hears_nothing_of_tokens() -> None:
    assert b"tokens" not in limits(requests_per_minute=1).headers()
    assert limits(max_concurrent_requests=1).headers() == b""


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, "0ms"), (0.0001, "1ms"), (0.12, "120ms"), (1.0, "1s"), (1.5, "1.5s"), (59.9991, "1m0s"), (360.0, "6m0s"),
     (61.25, "1m1.25s")],
)  # fmt: skip
def test_times_are_written_as_openai_does(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_a_look_at_it_shows_what_is_left() -> None:
    assert repr(limits(requests_per_minute=5)) == "<KeyLimits 0 running, 5/5>"
    assert repr(limits(max_concurrent_requests=5)) == "<KeyLimits 0 running, no rates>"


@given(
    limit=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.floats(0, 90), st.integers(1, 1000)), max_size=60),
)
@settings(max_examples=200)
def test_in_no_window_is_more_taken_than_its_share_and_one_minutes_worth(
    limit: int, steps: list[tuple[float, int]]
) -> None:
    now, taken = 0.0, list[tuple[float, int]]()
    bucket = Bucket(limit, now)
    for gap, amount in steps:
        now += gap
        wait = bucket.seconds_until(amount, now)
        if wait == 0.0:
            bucket.take(amount, now)
            taken.append((now, amount))
        elif amount <= limit:
            assert bucket.seconds_until(amount, now + wait) == pytest.approx(0.0, abs=1e-6)
    for first in range(len(taken)):
        total = 0
        for at, amount in taken[first:]:
            total += amount
            assert total <= limit + (at - taken[first][0]) * limit / 60 + 1e-6


class KeyMachine(RuleBasedStateMachine):
    """Requests of one key that come, end and go wrong in any order."""

    @initialize(
        requests=st.none() | st.integers(1, 20),
        tokens=st.none() | st.integers(1, 5000),
        most=st.none() | st.integers(1, 5),
    )
    def begin(self, requests: int | None, tokens: int | None, most: int | None) -> None:
        self.clock = Clock()
        self.allowed = KeyConfig(
            name="k", key="k", requests_per_minute=requests, tokens_per_minute=tokens, max_concurrent_requests=most
        )
        self.key = KeyLimits(self.allowed, self.clock, self.clock)
        self.running: list[int] = []  # the tokens charged to each request
        self.net_tokens = 0.0  # charged, less what was given back, since the start
        self.net_requests = 0

    @rule(tokens=st.integers(0, 3000))
    def arrive(self, tokens: int) -> None:
        before = repr(self.key)
        try:
            self.key.charge(tokens)
        except RateLimited:
            assert repr(self.key) == before
            return
        self.running.append(tokens)
        self.net_tokens += tokens
        self.net_requests += 1

    @rule(data=st.data(), share=st.floats(0, 2), counts=st.booleans())
    def end(self, data: st.DataObject, share: float, counts: bool) -> None:
        if not self.running:
            return
        charged = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        used_tokens = int(charged * share)
        self.key.correct(charged, used_tokens, counts=counts)
        self.net_tokens += used_tokens - charged
        self.net_requests -= 0 if counts else 1

    @rule(seconds=st.floats(0, 120))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def those_who_run_are_counted_and_within_the_limit(self) -> None:
        assert self.key.running == len(self.running)
        assert self.allowed.max_concurrent_requests is None or len(self.running) <= self.allowed.max_concurrent_requests

    @invariant()
    def no_level_is_above_a_minutes_worth(self) -> None:
        for bucket in self.key._buckets.values():
            assert bucket.level(self.clock.now) <= bucket.limit

    @invariant()
    def usage_exceeds_the_limit_only_by_unexpected_tokens(self) -> None:
        """No more is returned than was charged, so the level is at least the burst less all that was used."""
        net = {"requests": self.net_requests, "tokens": self.net_tokens}
        for what, bucket in self.key._buckets.items():
            assert bucket.level(self.clock.now) >= bucket.limit - net[what] - 1e-6

    def teardown(self) -> None:
        if hasattr(self, "key"):
            while self.running:
                self.key.correct(self.running.pop(), 0, counts=False)
            assert self.key.running == 0
            self.clock.now += 1e7
            assert all(
                part.split("/")[0] == part.split("/")[1] for part in repr(self.key)[:-1].split(", ")[1:] if "/" in part
            )


TestKeyMachine = KeyMachine.TestCase
TestKeyMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_other_limits_take_over_what_was_used() -> None:
    clock = Clock()
    of = limits(clock, requests_per_minute=10, tokens_per_minute=1000)
    used(of, 400, 400)
    of.charge(100)
    of.apply(KeyConfig(name="a", key="x", requests_per_minute=20, tokens_per_minute=600, max_concurrent_requests=1))
    assert b"x-ratelimit-remaining-requests: 18\r\n" in of.headers()
    assert b"x-ratelimit-remaining-tokens: 100\r\n" in of.headers()
    refused(of)  # one runs
    of.apply(KeyConfig(name="a", key="x", requests_per_minute=20))
    of.charge(10**9)
    assert b"tokens" not in of.headers()
