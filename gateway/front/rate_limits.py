"""API keys, compared by digest in constant time, and what each may use: requests, tokens, concurrency. Pure.

Requests and tokens are counted in buckets that fill evenly and hold one minute's worth, so an idle key may use a
minute's worth at once. Tokens are charged when a request is admitted, by the expected number, and corrected when it
ends; a request that needed more leaves its key in debt.
"""

import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from gateway.config import KeyConfig
from gateway.errors import RateLimited, Unauthorized
from gateway.scheduling.backlog import ServiceRate

_HEADERS = ("limit", "remaining", "reset")


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a key may use; None = any amount."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None


class Bucket:
    """A token bucket for a rate per minute, which holds one minute's worth. A level below zero is debt."""

    __slots__ = ("_at_seconds", "_level", "_per_second", "limit")

    def __init__(self, per_minute: int, now: float) -> None:
        self.limit = per_minute
        self._per_second = per_minute / 60
        self._level = float(per_minute)
        self._at_seconds = now

    def level(self, now: float) -> float:
        """What may be taken now; below zero = debt."""
        self._level = min(self.limit, self._level + (now - self._at_seconds) * self._per_second)
        self._at_seconds = now
        return self._level

    def seconds_until(self, amount: float, now: float) -> float:
        """Seconds until this amount may be taken."""
        return max(0.0, (amount - self.level(now)) / self._per_second)

    def take(self, amount: float, now: float) -> None:
        """Take this amount, also into debt."""
        self._level = self.level(now) - amount

    def give(self, amount: float, now: float) -> None:
        self._level = min(self.limit, self.level(now) + amount)

    def headers(self, what: str, now: float) -> str:
        values = self.limit, max(0, int(self.level(now))), in_words(self.seconds_until(self.limit, now))
        lines = (f"x-ratelimit-{name}-{what}: {value}\r\n" for name, value in zip(_HEADERS, values, strict=True))
        return "".join(lines)


class KeyLimits:
    """The limits of one key, and their current use."""

    def __init__(self, key: Allowance, clock: Callable[[], float]) -> None:
        now = clock()
        self.running = 0
        self._clock = clock
        self._most_running = key.max_concurrent_requests
        self._ended = ServiceRate()
        self._requests = Bucket(key.requests_per_minute, now) if key.requests_per_minute else None
        self._tokens = Bucket(key.tokens_per_minute, now) if key.tokens_per_minute else None

    def __repr__(self) -> str:
        now = self._clock()
        levels = [f"{bucket.level(now):.0f}/{bucket.limit}" for bucket in (self._requests, self._tokens) if bucket]
        return f"<KeyLimits {self.running} running, {', '.join(levels) or 'no rates'}>"

    def charge(self, tokens: int) -> "Charge":
        """Charge what a request is expected to need; the end of the `with` block corrects it.

        Raises RateLimited, and charges nothing then.
        """
        now = self._clock()
        if self._most_running is not None and self.running >= self._most_running:
            raise RateLimited(
                f"Concurrency limit of {self._most_running} requests (running and queued) reached for this API key."
                " Retry when one of them has completed.",
                retry_after_seconds=self._ended.seconds_for(1, now),
            )
        for bucket, amount, what in ((self._requests, 1, "requests"), (self._tokens, tokens, "tokens")):
            if bucket is not None:
                _check(bucket, amount, what, now)
        if self._requests is not None:
            self._requests.take(1, now)
        if self._tokens is not None:
            self._tokens.take(tokens, now)
        self.running += 1
        return Charge(self, tokens)

    @property
    def most_tokens(self) -> int | None:
        """Tokens that one request may need; None = any number."""
        return self._tokens.limit if self._tokens is not None else None

    def correct(self, charged_tokens: int, used_tokens: int, requests_back: int) -> None:
        """A request ended: replace what it was charged by what it used.

        Whatever a backend reports, an answer costs at most a minute's worth more than expected, and at least 0.
        """
        now = self._clock()
        self.running -= 1
        self._ended.left(now)
        if self._requests is not None:
            self._requests.give(requests_back, now)
        if self._tokens is not None:
            used_tokens = max(0, min(used_tokens, charged_tokens + self._tokens.limit))
            self._tokens.give(charged_tokens - used_tokens, now)

    def headers(self) -> bytes:
        """The x-ratelimit header lines of every response."""
        now = self._clock()
        requests = self._requests.headers("requests", now) if self._requests is not None else ""
        return (requests + (self._tokens.headers("tokens", now) if self._tokens is not None else "")).encode()


class Charge:
    """What a request is charged of its key's limits, until the end of the block corrects it to what was used."""

    __slots__ = ("_counts", "_ended", "_limits", "_tokens", "_used_tokens")

    def __init__(self, limits: KeyLimits, tokens: int) -> None:
        self._limits = limits
        self._tokens = tokens
        self._ended = False
        self._used_tokens = 0
        self._counts = False

    def correct(self, used_tokens: int, *, counts: bool) -> None:
        """At the end of the block this stays charged. `counts` as a request: a backend worked, or it was answered."""
        self._used_tokens = used_tokens
        self._counts = counts

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ended:
            self._ended = True
            self._limits.correct(self._tokens, self._used_tokens, 0 if self._counts else 1)


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


class Keys:
    """The configured API keys; without any, all requests are allowed."""

    def __init__(self, keys: Sequence[KeyConfig]) -> None:
        self._keys = [(key.digest, key) for key in keys]

    def check(self, headers: Mapping[bytes, bytes]) -> KeyConfig | None:
        """The API key of a request; None where no key is needed. Raises Unauthorized.

        Every key is compared, whichever matches: the time taken reveals nothing.
        """
        if not self._keys:
            return None
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not token:
            token = headers.get(b"x-api-key", b"")
        if not token.strip():
            raise _unauthorized()
        digest = hashlib.sha256(token.strip()).digest()
        found = None
        for known, key in self._keys:
            if hmac.compare_digest(known, digest):
                found = key
        if found is None:
            raise _unauthorized()
        return found


def _unauthorized() -> Unauthorized:
    return Unauthorized("Incorrect or missing API key. Send it as `Authorization: Bearer <key>`.")
