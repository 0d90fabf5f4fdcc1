"""A backend's reports of itself and of its load: values, read by `vllm_api` and `vllm_metrics`."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of a backend's /v1/models."""

    id: str
    root: str | None = None
    parent: str | None = None
    _: KW_ONLY
    max_model_len: int | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def plain(self) -> list[Any]:
        return [self.id, self.root, self.parent, self.max_model_len, dict(self.raw)]

    @classmethod
    def of_plain(cls, plain: list[Any]) -> "ModelCard":
        name, root, parent, max_model_len, raw = plain
        return cls(name, root, parent, max_model_len=max_model_len, raw=raw)


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """Where one engine (data-parallel rank) publishes its KV events, as the backend states it."""

    rank: int
    publisher: str | None
    endpoint: str | None
    _: KW_ONLY
    replay_endpoint: str | None
    topic: str

    def plain(self) -> list[Any]:
        return [self.rank, self.publisher, self.endpoint, self.replay_endpoint, self.topic]

    @classmethod
    def of_plain(cls, plain: list[Any]) -> "KvEventSource":
        rank, publisher, endpoint, replay_endpoint, topic = plain
        return cls(rank, publisher, endpoint, replay_endpoint=replay_endpoint, topic=topic)


@dataclass(frozen=True, slots=True)
class Facts:
    """A backend's report of itself; None = not reported. Sums are over its engines (data-parallel ranks)."""

    version: str | None = None
    models: tuple[ModelCard, ...] = ()
    _: KW_ONLY
    block_size_tokens: int | None = None
    kv_cache_tokens: int | None = None  # sum
    prefix_caching: bool | None = None
    max_num_seqs: int | None = None  # of one engine
    engines: int = 1
    kv_event_sources: tuple[KvEventSource, ...] | None = None
    process_start_seconds: float | None = None  # Unix time
    can_admin: bool = False  # vLLM's development endpoints answer

    def plain(self) -> list[Any]:
        """The same as lists, dictionaries and single values; `of_plain` takes them."""
        cards, sources = [card.plain() for card in self.models], self.kv_event_sources
        return [
            self.version,
            cards,
            self.block_size_tokens,
            self.kv_cache_tokens,
            self.prefix_caching,
            self.max_num_seqs,
            self.engines,
            None if sources is None else [source.plain() for source in sources],
            self.process_start_seconds,
            self.can_admin,
        ]

    @classmethod
    def of_plain(cls, plain: list[Any]) -> "Facts":
        """Facts that another process has read."""
        version, cards, block_size, kv_cache, caches, seqs, engines, sources, start, can_admin = plain
        models = tuple(ModelCard.of_plain(card) for card in cards)
        events = None if sources is None else tuple(KvEventSource.of_plain(source) for source in sources)
        return cls(
            version,
            models,
            block_size_tokens=block_size,
            kv_cache_tokens=kv_cache,
            prefix_caching=caches,
            max_num_seqs=seqs,
            engines=engines,
            kv_event_sources=events,
            process_start_seconds=start,
            can_admin=can_admin,
        )


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """LoRA adapters of a backend's running requests, and the most that an engine runs together; None = unknown."""

    running: frozenset[str]
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Telemetry:
    """The load that a backend's /metrics showed. Sums are over its engines; counters start with its process."""

    at_seconds: float
    _: KW_ONLY
    running: int
    waiting: int  # for capacity only, if the engine exposes reasons
    preemptions: float
    kv_usage: float  # 0..1, the fullest engine's
    in_flight: int = 0  # sequences, by the gateway's own count
    sent: int = 0  # requests so far, by the gateway's own count
    behind_prefill: int = 0  # sequences that wait for a long prefill, by the gateway's own count
    generation_tokens: float | None = None  # None = not exposed
    prefix_queries_tokens: float = 0.0
    sleep_state: str | None = None  # None = not exposed
    adapters: AdapterReport | None = None  # None = not exposed
