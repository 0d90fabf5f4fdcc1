"""One vLLM server: its address, its facts, its concurrency limit, and the size of its KV cache."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, replace
from random import Random
from urllib.parse import urlsplit

from gateway.config import AdmissionConfig, HealthConfig
from gateway.core.backends.concurrency_limit import LimitChange, Limiter
from gateway.core.backends.facts import Facts, Telemetry
from gateway.core.backends.health import Health
from gateway.core.backends.settings import BackendConfig
from gateway.core.routing.adapters import AdapterSlots
from gateway.core.routing.engine import DEFAULT_BLOCK_TOKENS, Engine

SLOW_START_SHARE = 0.1
OFFLOADED, FALLING_ASLEEP = "weights_offloaded", "falling_asleep"  # the former is vLLM's word
_QUARANTINE_SECONDS = 60.0  # of an engine's number; records of requests and KV events come later than its last request


@dataclass(frozen=True, slots=True)
class Origin:
    """Where to connect, and the Host header to send there."""

    host: str
    port: int
    tls: bool
    _: KW_ONLY
    host_header: bytes

    @classmethod
    def of(cls, url: str) -> "Origin":
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        return cls(
            parts.hostname or "", parts.port or (443 if tls else 80), tls, host_header=parts.netloc.encode("idna")
        )


class EngineNumbers:
    """The numbers of engines, from 0 on. Other parts keep a bit for each, so numbers of engines that left are reused,
    after late messages from them have become impossible."""

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


_LEAST_USAGE = 0.05  # of the cache, as evidence of its size
_LEAST_SAMPLES = 5
_FADE = 0.9  # of the weight of earlier samples, at each
_CONTRADICTS = 1.25  # times the reported size; prompts are measured with a smaller error
_MOVES = 0.05  # smaller changes of the size are not worth their consequences


class KvCacheSize:
    """Tokens in the KV cache of a backend, over its engines; None = unknown.

    Reported sizes can be too small: a product of blocks and block size for a model that mixes attention kinds, or a
    wrong label. Then the gateway reserves a fraction of the cache. The engine's usage contradicts such a size:
    sequences that certainly hold so many tokens fill only this share of the cache. The opposite is no evidence, because
    other traffic and uncounted data also use the cache. So a size is only ever raised.
    """

    def __init__(self) -> None:
        self.tokens: int | None = None
        self._reported: int | None = None
        self.forget()

    def report(self, tokens: int | None) -> None:
        """Follow the reported size; another one voids the evidence."""
        if tokens != self._reported:
            self._reported = self.tokens = tokens
            self.forget()

    def forget(self) -> None:
        """Void the evidence: another process answers."""
        self.tokens = self._reported
        self._samples, self._products, self._squares = 0, 0.0, 0.0

    def observe(self, held_tokens: int, usage: float) -> None:
        """Compare the tokens that requests certainly hold with the share of the cache in use (least squares)."""
        reported = self._reported
        if reported is None or usage < _LEAST_USAGE or not held_tokens:
            return
        self._samples += 1
        self._products = _FADE * self._products + held_tokens * usage
        self._squares = _FADE * self._squares + usage * usage
        if self._samples < _LEAST_SAMPLES:
            return
        shown = self._products / self._squares
        tokens = round(shown) if shown > _CONTRADICTS * reported else reported
        if self.tokens is None or abs(tokens - self.tokens) > _MOVES * self.tokens:
            self.tokens = tokens


def held_tokens(engines: Iterable[Engine]) -> int:
    """KV tokens that requests in flight certainly hold: shared prefixes once, and the streamed part of answers."""
    held = 0
    for engine in engines:
        held += engine.kv.taken_tokens
        for request in engine.kv.held:
            if request in engine.load.pending or not request.demand.streams:
                held -= request.tokens_alone  # it may still wait inside
            else:
                held -= max(0, request.output_tokens - request.streamed_tokens)
    return held


_CLOCK_SECONDS = 1.0  # by which the start of one process may differ between two readings
_APART_SECONDS = 60.0  # no engine restarts three times within this time
_SETTLED_SECONDS = 600.0  # with one process: the others are gone


class RestartEvidence:
    """The evidence about processes at one URL. With several of them, none of their changes is a restart."""

    def __init__(self) -> None:
        self.several = False
        self._changes: deque[float] = deque(maxlen=3)  # when another process answered, the last few times

    def is_restart(self, before: float | None, start: float | None, now: float) -> bool:
        """Whether a new process has replaced the last one; both by their start, None = unknown."""
        changes = self._changes
        if changes and now - changes[-1] > _SETTLED_SECONDS:
            self.several = False
        changes.append(now)
        if before is None or start is None:
            self.several |= len(changes) == changes.maxlen and now - changes[0] < _APART_SECONDS
        else:
            self.several |= start < before - _CLOCK_SECONDS
        return not self.several


class Backend:
    """One vLLM server, and the engines that it runs now. Compares by identity. Changed by `Fleet` alone."""

    def __init__(
        self,
        index: int,
        config: BackendConfig,
        *,
        health: HealthConfig,
        random: Random,
        limiter: Limiter | None = None,
        joins_others: bool = False,
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
        self.joins_others = joins_others  # it came while the fleet had others: it starts slowly
        self.draining = ""  # why it gets no new requests; empty = it gets them
        self.limiter = limiter or Limiter()
        self.restarts = RestartEvidence()
        self._kv_cache = KvCacheSize()
        self.facts = Facts()
        self.context_tokens: dict[str, int | None] = {}  # most in one sequence, by listed model
        self.missing: set[str] = set()  # models reported as missing since their list was read
        self._whole = Engine(index, config.name, slowness=config.relative_cost**0.5)
        self._ranks: list[Engine] = []  # all that it ever ran: engine numbers are permanent
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
        """Take over other settings of the same server. Learned state stays; a new relative cost replaces it."""
        if config.relative_cost != self.config.relative_cost:
            for engine in self.all_engines:
                engine.start_at(config.relative_cost)
        self.config = config
        self.learn(self.facts)

    def apply(self, health: HealthConfig, admission: AdmissionConfig) -> None:
        """Take over the settings of all backends. A slow start goes on, if there still are any."""
        self.health.apply(health)
        self.limiter.apply(adaptive=admission.adaptive, itl_objective_seconds=admission.itl_objective_seconds)
        self.slow_start_seconds = health.slow_start_seconds
        self.start_slowly(self.slow_since_seconds)

    def drain(self, why: str, now_seconds: float) -> None:
        """Send it no new requests, for this reason; empty = send them again."""
        if bool(why) != bool(self.draining):
            self.state_since_seconds = now_seconds
        self.draining = why

    def is_known(self) -> None:
        """Another process of the gateway used it before: it does not start slowly."""
        self.joins_others = False

    def changed_state(self, now_seconds: float, *, was_up: bool) -> None:
        """Its health has another state. `was_up`: it was up before."""
        self.state_since_seconds = now_seconds
        if self.health.state == "up" and (was_up or self.joins_others):
            self.start_slowly(now_seconds)

    def start_slowly(self, since_seconds: float | None) -> None:
        """Begin a slow start, if configured; None = end it."""
        self.slow_since_seconds = since_seconds if self.slow_start_seconds > 0 else None

    def measured(self, telemetry: Telemetry | None) -> LimitChange | None:
        """Keep the last reading of /metrics, which may change the limit; None = no recent one."""
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
        """The most concurrent sequences: configured, reported by the engine, or learned."""
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
