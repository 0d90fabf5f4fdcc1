"""The configuration of API keys: who may call, and how much."""

import hashlib
from functools import cached_property
from typing import Literal, Self

from pydantic import Field, model_validator

from gateway.config.values import Count, Section, default, refuse, twice

_NO_DIGESTS = (bytes(32), hashlib.sha256(b"").digest())  # placeholders


class KeyConfig(Section):
    """An API key that clients may use."""

    name: str = Field(min_length=1, max_length=64, description="Unique name in logs, metrics and reports.")
    key: str = default("", "API key in plain text; alternative to `key_sha256`.")
    key_sha256: str = default("", "SHA-256 of the API key in hex; alternative to `key`.", pattern=r"^([0-9a-f]{64})?$")
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

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if bool(self.key) == bool(self.key_sha256):
            raise ValueError("set either key or key_sha256, not both")
        if self.digest in _NO_DIGESTS:
            raise ValueError("key_sha256 is a placeholder (zeros or the digest of an empty string); set a key's digest")
        return self

    @cached_property
    def digest(self) -> bytes:
        return bytes.fromhex(self.key_sha256) or hashlib.sha256(self.key.encode()).digest()


class AuthConfig(Section):
    """Authentication of clients."""

    keys: tuple[KeyConfig, ...] = default((), "API keys of clients; empty = no authentication.")
    cache_salt_secret: str = default("", "Secret for all cache salts, of isolate_cache too; empty = random at start.")

    @model_validator(mode="after")
    def _has_distinct_keys(self) -> Self:
        owners: dict[bytes, str] = {}
        wrong = [f"duplicate key name {name!r}; key names must be unique" for name in twice(k.name for k in self.keys)]
        pairs = [(owners.setdefault(key.digest, key.name), key.name) for key in self.keys]
        wrong += [f"{a!r} and {b!r} are the same key; remove one of them" for a, b in pairs if a != b]
        return refuse(self, wrong)
