"""The configuration of API keys: secrets, permissions and limits."""

import hashlib
from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gateway.settings import Count, Instant, Secret, Section, default, refuse, twice

_NO_DIGESTS = (bytes(32), hashlib.sha256(b"").digest())  # placeholders


_ModelPattern = Annotated[str, Field(min_length=1, max_length=1024)]


class PreviousKey(Section):
    """An earlier secret of a rotated key, which is valid until it expires."""

    key_sha256: str = Field(description="SHA-256 of the earlier key in hex.", pattern=r"^[0-9a-f]{64}$")
    expires_at: Instant = Field(description="When it becomes invalid (RFC 3339).")

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.key_sha256)


class KeyConfig(Section):
    """An API key that clients may use."""

    name: str = Field(min_length=1, max_length=64, description="Unique name in logs, metrics and reports.")
    key: Secret = default("", "API key in plain text; alternative to `key_sha256`.")
    key_sha256: str = default("", "SHA-256 of the API key in hex; alternative to `key`.", pattern=r"^([0-9a-f]{64})?$")
    previous: tuple[PreviousKey, ...] = default(
        (), "Earlier secrets that are still valid, as `gateway keys rotate` adds."
    )
    expires_at: Instant | None = default(None, "When the key expires (RFC 3339); then 401. null = never.")
    models: tuple[_ModelPattern, ...] | None = default(
        None,
        "Models that the key may use, by the names that clients use; `*` at the end = any ending. null = all.",
        min_length=1,
    )
    isolate_cache: bool = default(False, "Use a KV-cache salt of its own, to share no cached prefixes with other keys.")
    weight: float = default(1.0, "Relative share of tokens while other tenants also wait.", gt=0)
    priority: Literal["interactive", "batch"] = default(
        "interactive", "batch = after queued interactive requests; a request header can lower the priority."
    )
    requests_per_minute: Count | None = default(None, "Maximum requests per minute; more get 429. null = unlimited.")
    tokens_per_minute: Count | None = default(
        None, "Maximum prompt and output tokens per minute, as estimated, later by usage; null = no limit."
    )
    max_concurrent_requests: Count | None = default(
        None, "Maximum running and queued requests; more get 429. null = unlimited."
    )
    tokens_per_day: Count | None = default(None, "Maximum prompt and output tokens per day (UTC); null = no limit.")
    tokens_per_month: Count | None = default(None, "Maximum prompt and output tokens per month (UTC); null = no limit.")

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if bool(self.key) == bool(self.key_sha256):
            raise ValueError("set either key or key_sha256, not both")
        if self.digest in _NO_DIGESTS:
            raise ValueError("key_sha256 is a placeholder (zeros or the digest of an empty string); set a key's digest")
        if any("*" in name[:-1] for name in self.models or ()):
            raise ValueError("models may have a * only at the end of a name")
        return self

    @cached_property
    def digest(self) -> bytes:
        return bytes.fromhex(self.key_sha256) or hashlib.sha256(self.key.encode()).digest()

    def divided(self, replicas: int) -> "KeyConfig":
        """The limits of one of `replicas` gateways: an equal part of each rate and budget, at least 1."""
        limits = (
            "requests_per_minute", "tokens_per_minute", "max_concurrent_requests", "tokens_per_day", "tokens_per_month",
        )  # fmt: skip
        if replicas == 1:
            return self
        found = {limit: getattr(self, limit) for limit in limits}
        parts = {limit: max(1, most // replicas) for limit, most in found.items() if most is not None}
        return self.model_copy(update=parts) if parts else self

    @property
    def is_limited(self) -> bool:
        """Whether this key has limits to count for."""
        limits = (self.requests_per_minute, self.tokens_per_minute, self.max_concurrent_requests)
        return any(limits) or self.has_budget

    @property
    def has_budget(self) -> bool:
        return self.tokens_per_day is not None or self.tokens_per_month is not None

    @cached_property
    def digests(self) -> dict[bytes, float | None]:
        """Every digest of the key, with the Unix time at which it expires; None = never."""
        own = None if self.expires_at is None else self.expires_at.timestamp()
        digests: dict[bytes, float | None] = {}
        for each in self.previous:
            until = each.expires_at.timestamp()
            digests[each.digest] = until if own is None else min(own, until)
        digests[self.digest] = own
        return digests

    @cached_property
    def _allowed(self) -> tuple[frozenset[str], tuple[str, ...]]:
        """Whole names, and beginnings of names."""
        models = self.models or ()
        return frozenset(models), tuple(name[:-1] for name in models if name.endswith("*"))

    def allows(self, model: str) -> bool:
        """Whether the key may use a model, by the name that clients use."""
        if self.models is None:
            return True
        names, beginnings = self._allowed
        return model in names or model.startswith(beginnings)


class AuthConfig(Section):
    """Authentication of clients."""

    keys: tuple[KeyConfig, ...] = default(
        (), "API keys of clients; empty = no authentication, unless there is a `keys_file`."
    )
    keys_file: str | None = default(
        None, "File with more keys, hashed; followed while it changes, and written by `gateway keys`. null = none."
    )
    cache_salt_secret: Secret = default("", "Secret of all cache salts, of isolate_cache too; empty = random at start.")

    @model_validator(mode="after")
    def _has_distinct_keys(self) -> Self:
        return refuse(self, conflicts(self.keys))

    @property
    def is_open(self) -> bool:
        """Whether clients may call without a key."""
        return not self.keys and self.keys_file is None


def conflicts(keys: Iterable[KeyConfig]) -> list[str]:
    """A message for each name, key or digest that two keys share."""
    owners: dict[bytes, str] = {}
    keys = tuple(keys)
    wrong = [f"duplicate key name {name!r}; key names must be unique" for name in twice(key.name for key in keys)]
    pairs = [(owners.setdefault(digest, key.name), key.name) for key in keys for digest in key.digests]
    return wrong + [f"{a!r} and {b!r} are the same key; remove one of them" for a, b in pairs if a != b]
