"""One vLLM server: where it is, what is known of it, and how much it may be given."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import urlsplit

from gateway.backends.concurrency_limit import Limiter
from gateway.backends.health import Health
from gateway.config import BackendConfig, HealthConfig

DEFAULT_BLOCK_TOKENS = 16
SLOW_START_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Origin:
    """Where to connect, and the Host header to send there."""

    host: str
    port: int
    tls: bool
    host_header: bytes

    @classmethod
    def of(cls, url: str) -> "Origin":
        """The origin of a URL that `BackendConfig` accepted."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        if not parts.hostname:
            raise ValueError(f"{url!r} has no host")
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, parts.netloc.encode("idna"))


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of a backend's /v1/models."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """Where one engine (data-parallel rank) publishes its KV events, as the backend states it."""

    rank: int
    publisher: str | None
    endpoint: str | None
    replay_endpoint: str | None
    topic: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What a backend said of itself; None = it has not said. Sums are over its engines (data-parallel ranks)."""

    version: str | None = None
    models: tuple[ModelCard, ...] = ()
    block_size_tokens: int | None = None
    kv_cache_tokens: int | None = None  # sum
    prefix_caching: bool | None = None
    max_num_seqs: int | None = None  # of one engine
    engines: int = 1
    kv_event_sources: tuple[KvEventSource, ...] | None = None
    process_start_seconds: float | None = None  # Unix time
    can_admin: bool = False  # vLLM's development endpoints answer


@dataclass(frozen=True, slots=True)
class Telemetry:
    """The load that a backend's /metrics showed. Sums are over its engines; counters start with its process."""

    at_seconds: float
    running: int
    waiting: int
    kv_usage: float  # 0..1, the fullest engine's
    prefix_queries_tokens: float
    prefix_hits_tokens: float
    preemptions: float
    waiting_for_capacity: int | None = None  # of those who wait; None = the engine does not tell why
    generation_tokens: float | None = None


class Backend:
    """One vLLM server. Compares by identity; `index` is its place in the fleet. Changed by `Fleet` alone."""

    __slots__ = (
        "api_key",
        "config",
        "context_tokens",
        "facts",
        "health",
        "index",
        "kv_cache_tokens",
        "limiter",
        "name",
        "origin",
        "probe_error",
        "slow_since_seconds",
        "slow_start_seconds",
        "speed",
        "telemetry",
    )

    def __init__(
        self, index: int, config: BackendConfig, health: HealthConfig, random: Random, limiter: Limiter | None = None
    ) -> None:
        self.index = index
        self.config = config
        self.name = config.name
        self.origin = Origin.of(config.url)
        self.api_key = config.api_key
        self.speed = config.speed
        self.health = Health(health, random)
        self.probe_error: str | None = None  # why the last probe of /health did not succeed
        self.telemetry: Telemetry | None = None
        self.slow_start_seconds = health.slow_start_seconds
        self.slow_since_seconds: float | None = None
        self.limiter = limiter or Limiter()
        self.kv_cache_tokens: int | None = None
        self.facts = Facts()
        self.context_tokens: dict[str, int | None] = {}  # most in one sequence, by model
        self.learn(Facts())

    def learn(self, facts: Facts) -> None:
        """Take over new facts and what follows from them."""
        self.facts = facts
        lengths = {card.id: card.max_model_len for card in facts.models}
        self.context_tokens = {card.id: card.max_model_len or lengths.get(card.parent or "") for card in facts.models}
        told = self.config.max_in_flight
        found = facts.max_num_seqs * facts.engines if facts.max_num_seqs else None
        self.limiter.bind(found if told == "auto" else told, facts.engines)
        tokens = self.config.kv_cache_tokens
        self.kv_cache_tokens = facts.kv_cache_tokens if tokens == "auto" else tokens

    @property
    def cap(self) -> int:
        """Most sequences at once: configured, told by the engine, or learned."""
        return self.limiter.upper

    def lists(self, model: str) -> bool:
        """It said last that it serves this model."""
        return any(card.id == model for card in self.facts.models)

    @property
    def rank(self) -> None:
        """It is no single engine among several; see `EngineRank`."""

    @property
    def block_tokens(self) -> int:
        """Tokens of one block of its KV cache."""
        return self.facts.block_size_tokens or DEFAULT_BLOCK_TOKENS

    @property
    def caches_prefixes(self) -> bool:
        """Its prefix cache is on, or nothing is known to the contrary."""
        return self.facts.prefix_caching is not False

    def limit(self, now_seconds: float) -> int:
        """Sequences that it may be given now: the adaptive limit, less while it starts slowly."""
        since, limit = self.slow_since_seconds, self.limiter.limit
        if since is None:
            return limit
        elapsed = now_seconds - since
        if elapsed >= self.slow_start_seconds:
            return limit
        share = SLOW_START_SHARE + (1 - SLOW_START_SHARE) * max(elapsed, 0.0) / self.slow_start_seconds
        return min(limit, max(1, int(self.cap * share)))

    def __repr__(self) -> str:
        return f"<Backend {self.name} {self.health.state}, cap {self.cap}>"


@dataclass(frozen=True, slots=True, eq=False)
class EngineRank:
    """One engine of a backend that runs several (data parallel): each has a KV cache and slots of its own."""

    backend: Backend
    rank: int
    index: int

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def speed(self) -> float:
        return self.backend.speed

    @property
    def cap(self) -> int:
        """Its share of the backend's sequences."""
        return self._share(self.backend.cap)

    @property
    def kv_cache_tokens(self) -> int | None:
        """Its share of the backend's KV cache."""
        tokens = self.backend.kv_cache_tokens
        return None if tokens is None else tokens // self.backend.facts.engines

    @property
    def block_tokens(self) -> int:
        return self.backend.block_tokens

    @property
    def caches_prefixes(self) -> bool:
        return self.backend.caches_prefixes

    def limit(self, now_seconds: float) -> int:
        """Its share of what the backend may be given now."""
        return self._share(self.backend.limit(now_seconds))

    def _share(self, sequences: int) -> int:
        """Shares add up to the whole, unless that is less than one for each engine: none may be left without any."""
        engines = self.backend.facts.engines
        return max(1, (sequences + engines - 1 - self.rank) // engines)
