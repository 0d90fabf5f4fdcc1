"""API keys: finds the key of a request by its digest, and limits its requests, tokens, concurrency and budgets. Pure.

Requests and tokens are counted in buckets that fill evenly and hold one minute's worth, so an idle key may spend a
minute's worth in one burst. Tokens are charged when a request is admitted, by the expected number, and corrected when
it ends; a request that needed more leaves its key in debt.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence

from gateway.core.errors import KeyExpired, RateLimited, Unauthorized
from gateway.core.ledger import Limits
from gateway.core.scheduling.fair_share import ServiceRate
from gateway.features.keys.budgets import Budgets, Spent
from gateway.features.keys.settings import KeyConfig


class Bucket:
    """A token bucket for a rate per minute, which holds one minute's worth. A level below zero is debt."""

    __slots__ = ("_at_seconds", "_level", "_per_second", "limit")

    def __init__(self, per_minute: int, now: float) -> None:
        self.limit = per_minute
        self._per_second = per_minute / 60
        self._level = float(per_minute)
        self._at_seconds = now

    def resize(self, per_minute: int, now: float) -> None:
        """Take over another rate; recent use still counts."""
        used = self.used(now)
        self.limit, self._per_second = per_minute, per_minute / 60
        self._level = per_minute - used

    def level(self, now: float) -> float:
        """The available amount; below zero = debt."""
        self._level = min(self.limit, self._level + (now - self._at_seconds) * self._per_second)
        self._at_seconds = now
        return self._level

    def seconds_until(self, amount: float, now: float) -> float:
        """Seconds until this amount may be taken."""
        return max(0.0, (amount - self.level(now)) / self._per_second)

    def take(self, amount: float, now: float) -> None:
        """Take this amount, also into debt; a negative one is given back."""
        self._level = min(self.limit, self.level(now) - amount)

    def used(self, now: float) -> float:
        return self.limit - self.level(now)

    def use(self, amount: float, ago_seconds: float, now: float) -> None:
        self.take(max(0.0, amount - ago_seconds * self._per_second), now)

    def headers(self, what: str, now: float) -> str:
        return (
            f"x-ratelimit-limit-{what}: {self.limit}\r\n"
            f"x-ratelimit-remaining-{what}: {max(0, int(self.level(now)))}\r\n"
            f"x-ratelimit-reset-{what}: {in_words(self.seconds_until(self.limit, now))}\r\n"
        )


class KeyLimits(Limits):
    """The limits of one key, and their current use."""

    def __init__(self, key: KeyConfig, clock: Callable[[], float], unix_seconds: Callable[[], float]) -> None:
        self.running = 0
        self.running_elsewhere = 0
        self._clock = clock
        self._unix_seconds = unix_seconds
        self._budgets: Budgets | None = None
        self._ended = ServiceRate()
        self._buckets: dict[str, Bucket] = {}
        self.apply(key)

    def apply(self, key: KeyConfig) -> None:
        """Take over other limits; running requests and recent use still count."""
        now, per_minute = self._clock(), {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}
        self.most_tokens = key.tokens_per_minute  # of one request; None = unlimited
        if not key.has_budget:
            self._budgets = None
        elif self._budgets is None:
            self._budgets = Budgets(key, self._unix_seconds)
        else:
            self._budgets.apply(key)
        if self._budgets is not None and (most := self._budgets.most_tokens) is not None:
            self.most_tokens = most if self.most_tokens is None else min(most, self.most_tokens)
        self._most_running = key.max_concurrent_requests
        for what, limit in per_minute.items():
            if limit is None:
                self._buckets.pop(what, None)
            elif what in self._buckets:
                self._buckets[what].resize(limit, now)
            else:
                self._buckets[what] = Bucket(limit, now)

    def __repr__(self) -> str:
        levels = [f"{bucket.level(self._clock()):.0f}/{bucket.limit}" for bucket in self._buckets.values()]
        budgets = "" if self._budgets is None else repr(self._budgets)
        return f"<KeyLimits {self.running} running, {', '.join(levels) or 'no rates'}{budgets}>"

    @property
    def has_budget(self) -> bool:
        return self._budgets is not None

    def run_elsewhere(self, requests: int) -> None:
        """The number of running requests of the key in another process, which is ending."""
        self.running_elsewhere = requests

    def account(self) -> dict[str, float]:
        """Recent use by rate, for `restore`."""
        now = self._clock()
        return {what: bucket.used(now) for what, bucket in self._buckets.items()}

    def restore(self, account: dict[str, float], ago_seconds: float) -> None:
        """Add the use of another process, as of `ago_seconds` ago."""
        for what, bucket in self._buckets.items():
            bucket.use(account.get(what, 0.0), ago_seconds, self._clock())

    def spent(self) -> Spent:
        """The use of the budgets, for `restore_spent`."""
        return {} if self._budgets is None else self._budgets.spent()

    def restore_spent(self, spent: Spent) -> None:
        """Add the use of the budgets in another process."""
        if self._budgets is not None:
            self._budgets.restore(spent)

    def charge(self, tokens: int) -> int:
        now, amounts = self._clock(), {"requests": 1, "tokens": tokens}
        if self._most_running is not None and self.running + self.running_elsewhere >= self._most_running:
            raise RateLimited(
                f"Concurrency limit of {self._most_running} requests (running and queued) reached for this API key."
                " Retry when one of them has completed.",
                retry_after_seconds=self._ended.seconds_for(1, now),
            )
        for what, bucket in self._buckets.items():
            _check(bucket, amounts[what], what, now)
        day = 0 if self._budgets is None else self._budgets.charge(tokens)
        for what, bucket in self._buckets.items():
            bucket.take(amounts[what], now)
        self.running += 1
        return day

    def correct(self, charged_tokens: int, used_tokens: int, *, counts: bool, day: int = 0) -> None:
        """Whatever a backend reports, an answer costs at most a minute's worth more than expected, and at least 0."""
        now = self._clock()
        self.running -= 1
        self._ended.left(now)
        if "requests" in self._buckets and not counts:
            self._buckets["requests"].take(-1, now)
        if (tokens := self._buckets.get("tokens")) is not None:
            tokens.take(max(0, min(used_tokens, charged_tokens + tokens.limit)) - charged_tokens, now)
        if self._budgets is not None:
            self._budgets.correct(day, charged_tokens, used_tokens)

    def charge_line(self, tokens: int) -> int:
        return 0 if self._budgets is None else self._budgets.charge(tokens)

    def correct_line(self, charged_tokens: int, used_tokens: int, *, day: int) -> None:
        if self._budgets is not None:
            self._budgets.correct(day, charged_tokens, used_tokens)

    def spend(self, tokens: int) -> int:
        if (bucket := self._buckets.get("tokens")) is not None:
            bucket.take(tokens, self._clock())
        return 0 if self._budgets is None else self._budgets.spend(tokens)

    def check_left(self) -> None:
        if self._budgets is not None:
            self._budgets.check(1)

    def headers(self) -> bytes:
        now = self._clock()
        return "".join([bucket.headers(what, now) for what, bucket in self._buckets.items()]).encode()


def in_words(seconds: float) -> str:
    """A time as OpenAI writes it: 120ms, 1.5s, 6m0s."""
    milliseconds = -int(-seconds * 1000 // 1)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"


def _check(bucket: Bucket, amount: int, what: str, now: float) -> None:
    if amount > bucket.limit:
        raise RateLimited(
            f"Request too large for this API key: it needs about {amount} {what}, and the limit is"
            f" {bucket.limit} {what} per minute. Shorten the prompt or lower max_tokens.",
            not_retryable=True,
        )
    if wait := bucket.seconds_until(amount, now):
        left = max(0, int(bucket.level(now)))
        raise RateLimited(
            f"Rate limit of {bucket.limit} {what} per minute reached for this API key: {left} remain, this request"
            f" needs {amount}. Retry in {in_words(wait)}.",
            retry_after_seconds=wait,
        )


class ApiKeys:
    """The keys of all clients, by digest.

    A plain look-up is safe against timing attacks: digests are compared only if their hashes, which Python seeds at
    random, are equal, and a client cannot change a digest step by step, since it is the SHA-256 of the key.
    """

    def __init__(self, keys: Sequence[KeyConfig], unix_seconds: Callable[[], float]) -> None:
        self._unix_seconds = unix_seconds
        self._by_digest: dict[bytes, KeyConfig] = {}
        self._expiry: dict[bytes, float] = {}  # by digest; empty = no key expires, and none is checked
        for key in keys:
            for digest, until in key.digests.items():
                self._by_digest[digest] = key
                if until is not None:
                    self._expiry[digest] = until

    def check(self, headers: Mapping[bytes, bytes]) -> KeyConfig:
        """The API key of a request with these headers. Raises Unauthorized or KeyExpired."""
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not token:
            token = headers.get(b"x-api-key", b"")
        token = token.strip()
        digest = hashlib.sha256(token).digest()
        key = self._by_digest.get(digest)
        if key is None or not token:
            raise Unauthorized("Incorrect or missing API key. Send it as `Authorization: Bearer <key>`.")
        if self._expiry:
            until = self._expiry.get(digest)
            if until is not None and self._unix_seconds() >= until:
                raise KeyExpired("The API key has expired. Ask the operator of this server for a new one.")
        return key
