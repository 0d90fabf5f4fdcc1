"""A fleet and what the gateway records of its caches."""

from random import Random
from typing import Any

from gateway._native import prefix_keys
from gateway.config import HealthConfig, RoutingConfig
from gateway.core.backends.facts import Facts, ModelCard
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.settings import BackendConfig
from gateway.core.feedback import CacheState
from gateway.core.observe.record import Record
from gateway.core.request import Demand, Usage
from gateway.core.routing.engine import Engine
from gateway.core.routing.prompt_blocks import seed
from gateway.features.exact.index import packed, token_keys, token_seed

BLOCK_TOKENS = 16
KV_TOKENS = 10_000


class Scene:
    """Backends a and b; b may run two engines."""

    def __init__(self, engines: int = 1, **facts: Any) -> None:
        configs = tuple(BackendConfig(url=f"http://10.0.0.{number}:1", name="ab"[number]) for number in range(2))
        self.fleet = Fleet(configs, HealthConfig(), clock=lambda: 0.0, random=Random(1))
        self.cache_state = CacheState(RoutingConfig(index_memory_bytes=1 << 22), self.fleet, lambda: 0.0)
        self.fleet.on_change.append(self.cache_state.follow_sizes)
        self.fleet.on_restart.append(self.cache_state.forget)
        self.a, self.b = self.fleet.backends
        self.learn_facts(engines, **facts)

    def learn_facts(self, engines: int = 1, **facts: Any) -> None:
        known = {"models": (ModelCard("m"),), "kv_cache_tokens": KV_TOKENS, **facts}
        self.fleet.learned(self.a, Facts(**known))
        self.fleet.learned(self.b, Facts(**known | {"engines": engines, "kv_cache_tokens": engines * KV_TOKENS}))

    def hits(self, ask: Demand) -> list[int]:
        return self.cache_state.hit_predictor.predict(ask, self.fleet.engines())

    def sent(self, ask: Demand, engine: int) -> None:
        """The request is placed there."""
        self.cache_state.hit_predictor.placed(ask, Engine(engine, "?"))

    def answered(self, ask: Demand, engine: int, predicted: int, cached: int | None, output: int = 1) -> None:
        record = Record("id", "chat", 0.0)
        record.model, record.demand, record.engine_index, record.predicted_hit_tokens = (
            ask.model,
            ask,
            engine,
            predicted,
        )
        record.usage = Usage(ask.prompt_tokens, output, cached)
        self.cache_state.learn(record)


def asking(text: str, exact: bool = False) -> Demand:
    """A prompt of four bytes a token; `exact`: its tokens are known."""
    keys, edges, _ = prefix_keys([text.encode()], seed("m"))
    size = len(text)
    blocks = token_keys(packed(list(text.encode()[::4])), BLOCK_TOKENS, token_seed()) if exact else ()
    return Demand(
        "m", keys=keys, edges=edges, prompt_size=size, prompt_tokens=size // 4, learnable_bytes=size, token_keys=blocks
    )
