"""One vLLM server: its address, what is known of it, and its concurrency limit."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from urllib.parse import urlsplit

from gateway.backends.concurrency_limit import LimitChange, Limiter
from gateway.backends.facts import Facts, Telemetry
from gateway.backends.health import Health
from gateway.backends.kv_cache_size import KvCacheSize, held_tokens
from gateway.config import AdmissionConfig, HealthConfig
from gateway.config.backends import BackendConfig
from gateway.routing.adapters import AdapterSlots
from gateway.routing.engine import DEFAULT_BLOCK_TOKENS, Engine

SLOW_START_SHARE = 0.1
OFFLOADED, FALLING_ASLEEP = "weights_offloaded", "falling_asleep"  # the former is vLLM's word
_QUARANTINE_SECONDS = 60.0  # of an engine's number; records of requests and KV events come later than its last request


@dataclass(frozen=True, slots=True)
class Origin:
    """Where to connect, and the Host header to send there."""

    host: str
    port: int
    tls: bool
    host_header: bytes

    @classmethod
    def of(cls, url: str) -> "Origin":
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        return cls(parts.hostname or "", parts.port or (443 if tls else 80), tls, parts.netloc.encode("idna"))


class EngineNumbers:
    """The numbers of engines, from 0 on. Other parts keep a bit for each, so those of engines that left are used again,
    once nothing late can come from them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next = 0
        self._freed: deque[tuple[float, int]] = deque()

    def take(self) -> int:
        if self._freed and self._clock() - self._freed[0][0] >= _QUARANTINE_SECONDS:
            return self._freed.popleft()[1]
        self._next += 1
        return self._next - 1

    def free(self, number: int) -> None:
        self._freed.append((self._clock(), number))


class Backend:
    """One vLLM server, and the engines that it runs now. Compares by identity. Changed by `Fleet` alone."""

    def __init__(
        self, index: int, config: BackendConfig, health: HealthConfig, random: Random, limiter: Limiter | None = None
    ) -> None:
        self.config = config
        self.name = config.name
        self.origin = Origin.of(config.url)
        self.health = Health(health, random)
        self.telemetry: Telemetry | None = None
        self.sleep_state = ""  # of vLLM's sleep mode; empty = awake
        self.slow_start_seconds = health.slow_start_seconds
        self.slow_since_seconds: float | None = None
        self.state_since_seconds: float | None = None
        self.joins_others = False  # it came while the fleet had others: it starts slowly
        self.draining = ""  # why it gets no new requests; empty = it gets them
        self.limiter = limiter or Limiter()
        self._kv_cache = KvCacheSize()
        self.facts = Facts()
        self.context_tokens: dict[str, int | None] = {}  # most in one sequence, by listed model
        self.missing: set[str] = set()  # models reported as missing since their list was read
        self._whole = Engine(index, config.name, slowness=config.relative_cost**0.5)
        self._ranks: list[Engine] = []  # every one that it ever ran: engine numbers are permanent
        self.engines: tuple[Engine, ...] = (self._whole,)
        self.learn(Facts())

    def learn(self, facts: Facts) -> None:
        self.facts = facts
        lengths = {card.id: card.max_model_len for card in facts.models}
        self.context_tokens = {card.id: card.max_model_len or lengths.get(card.parent or "") for card in facts.models}
        configured = self.config.max_in_flight
        found = facts.max_num_seqs * facts.engines if facts.max_num_seqs else None
        self.limiter.bind(found if configured == "auto" else configured, facts.engines)
        self._kv_cache.report(facts.kv_cache_tokens)

    @property
    def why_not(self) -> str:
        """Why it gets no requests now, in words; empty = it may get some."""
        health = self.health
        if self.draining:
            return "draining"
        if health.state == "ejected":
            return "ejected after failed requests"
        if health.gone or health.state == "down":
            return health.probe_error or "connection refused"
        if health.state == "unknown":
            return "not probed yet"
        if self.sleep_state:
            return f"asleep ({self.sleep_state})"
        return "" if self.facts.models else "it has listed no models"

    def reconfigure(self, config: BackendConfig) -> None:
        """Follow other settings of the same server. What was learned of it stays, but a relative cost that changed."""
        if config.relative_cost != self.config.relative_cost:
            for engine in self.all_engines:
                engine.start_at(config.relative_cost)
        self.config = config
        self.learn(self.facts)

    def follow(self, health: HealthConfig, admission: AdmissionConfig) -> None:
        """Take over the settings of all backends. A slow start goes on, if there still are any."""
        self.health.follow(health)
        self.limiter.follow(adaptive=admission.adaptive, itl_objective_seconds=admission.itl_objective_seconds)
        self.slow_start_seconds = health.slow_start_seconds
        self.start_slowly(self.slow_since_seconds)

    def start_slowly(self, since_seconds: float | None) -> None:
        """Begin a slow start, if the configuration wants any; None = end it."""
        self.slow_since_seconds = since_seconds if self.slow_start_seconds > 0 else None

    def measured(self, telemetry: Telemetry | None) -> LimitChange | None:
        """Keep the last reading of /metrics, which may change the limit; None = there is none that is recent."""
        self.telemetry = None
        if telemetry:
            sent = sum(engine.placed for engine in self.all_engines)
            behind = sum(engine.load.behind_prefill(telemetry.at_seconds) for engine in self.all_engines)
            self.telemetry = replace(telemetry, in_flight=self.in_flight, sent=sent, behind_prefill=behind)
            self._kv_cache.observe(held_tokens(self.engines), telemetry.kv_usage)
            if (report := telemetry.adapters) is not None:
                running = report.running if len(self.engines) == 1 else frozenset()  # it says nothing of ranks
                for adapters in self._adapters():
                    adapters.report(running, report.most)
        return self.limiter.observe(self.telemetry)

    def restarted(self, now_seconds: float) -> LimitChange | None:
        """Another process answers: forget the load of the old one, and start slowly."""
        self.telemetry, self.sleep_state = None, ""
        self._kv_cache.forget()
        for adapters in self._adapters():
            adapters.forget()
        self.start_slowly(now_seconds)
        return self.limiter.restarted(now_seconds)

    def slept(self, state: str) -> None:
        """It sleeps, or is awake again (no state)."""
        self.sleep_state = state

    @property
    def can_wake(self) -> bool:
        """Whether the gateway may wake it from a sleep that keeps its weights."""
        config = self.config.sleep
        return self.sleep_state == OFFLOADED and config is not None and config.wake and not self.draining

    @property
    def kv_cache_tokens(self) -> int | None:
        """Tokens in the KV cache: configured, else reported by the engine, and more if its usage shows that."""
        configured = self.config.kv_cache_tokens
        return self._kv_cache.tokens if configured == "auto" else configured

    @property
    def cap(self) -> int:
        """Most sequences at once: configured, reported by the engine, or learned."""
        return self.limiter.upper

    def limit(self, now_seconds: float) -> int:
        """Most sequences in flight now: the adaptive limit, less during a slow start."""
        since, limit = self.slow_since_seconds, self.limiter.limit
        if since is None:
            return limit
        elapsed_share = min(1.0, max(0.0, now_seconds - since) / self.slow_start_seconds)
        share = SLOW_START_SHARE + (1 - SLOW_START_SHARE) * elapsed_share
        return min(limit, max(1, int(self.cap * share)))

    def __repr__(self) -> str:
        return f"<Backend {self.name} {self.health.state}, cap {self.cap}>"

    def resize_engines(self, now_seconds: float, new_number: Callable[[], int]) -> None:
        """Create its engines, and give each its share of the slots and of the KV cache."""
        facts, count = self.facts, self.facts.engines
        while count > 1 and len(self._ranks) < count:
            self._ranks.append(Engine(new_number(), self.name, len(self._ranks), slowness=self._whole.slowness))
        self.engines = (self._whole,) if count == 1 else tuple(self._ranks[:count])
        cap, limit, tokens = self.cap, self.limit(now_seconds), self.kv_cache_tokens
        block_tokens = facts.block_size_tokens or DEFAULT_BLOCK_TOKENS
        caches_prefixes = facts.prefix_caching is not False
        listed = frozenset(card.id for card in facts.models if card.parent)
        for place, engine in enumerate(self.engines):
            engine.configure(_share(cap, place, count), block_tokens, caches_prefixes=caches_prefixes)
            engine.resize(_share(limit, place, count), None if tokens is None else tokens // count)
            engine.list_adapters(listed)

    def _adapters(self) -> list[AdapterSlots]:
        return [engine.adapters for engine in self.engines if engine.adapters is not None]

    @property
    def all_engines(self) -> tuple[Engine, ...]:
        """Engines that it runs now or ran before: requests may still be in flight there."""
        return (self._whole, *self._ranks)

    @property
    def in_flight(self) -> int:
        return sum(engine.load.in_flight for engine in self.all_engines)

    @property
    def kv_tokens_reserved(self) -> int:
        return sum(engine.kv.taken_tokens for engine in self.all_engines)


def _share(sequences: int, place: int, engines: int) -> int:
    """The engine's share of the sequences, at least 1. Shares add up to the whole unless that raises one."""
    return max(1, (sequences + engines - 1 - place) // engines)
