"""The dashboard's view of the fleet: a tile for each engine. Pure: reads the owners of state, changes nothing."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gateway.core.backends.backend import Backend
from gateway.core.routing.engine import Engine

MOST_TILES: Final = 256
_OF_BACKEND: Final = (
    *("name", "from", "zone", "state", "state_reason", "state_seconds", "draining", "probe_error", "reported"),
    *("version", "models", "limit", "limit_upper", "limit_moved", "kv_tokens_limit", "relative_cost", "prefix_trust"),
)
_FADE: Final = 0.98  # of the tokens counted for hit rates, each second


class HitRates:
    """The share of cached prompt tokens, by backend, over about the last minute."""

    def __init__(self) -> None:
        self._tokens: dict[str, list[float]] = {}  # prompt tokens, and the cached ones

    def fade(self, backends: Sequence[str]) -> None:
        """A second has passed. Backends that are gone are forgotten."""
        known = self._tokens
        self._tokens = {name: [_FADE * each for each in known[name]] for name in backends if name in known}

    def add(self, backend: str, prompt_tokens: int, hit_tokens: int | None) -> None:
        """Count a request. `hit_tokens`: as reported; None = not reported, and not counted."""
        if backend and hit_tokens is not None and prompt_tokens:
            known = self._tokens.setdefault(backend, [0.0, 0.0])
            known[0] += prompt_tokens
            known[1] += hit_tokens

    def of(self, backend: str) -> float | None:
        prompt_tokens, hit_tokens = self._tokens.get(backend, (0.0, 0.0))
        return round(hit_tokens / prompt_tokens, 4) if prompt_tokens >= 1 else None


def fleet_view(
    backends: Sequence[Backend],
    describe: Callable[[Backend], Mapping[str, Any]],
    hit_rates: HitRates,
    trust: Callable[[int], float],
    now: float,
) -> dict[str, Any]:
    """The tiles, and how many engines have none because there are too many. `describe`: as on /admin/backends;
    `trust`: the share of predicted hits that is used, by engine number."""
    tiles: list[dict[str, Any]] = []
    engines = sum(len(backend.engines) for backend in backends)
    for backend in backends:
        if len(tiles) >= MOST_TILES:
            break
        whole = describe(backend)
        shown = {key: whole[key] for key in _OF_BACKEND} | {"hit_rate": hit_rates.of(backend.name)}
        ranks = len(backend.engines)
        tiles += [
            shown | _of_engine(engine, ranks, trust(engine.index), whole=whole, now=now)
            for engine in backend.engines[: MOST_TILES - len(tiles)]
        ]
    return {"engines": engines, "not_shown": engines - len(tiles), "tiles": tiles}


def _of_engine(engine: Engine, ranks: int, trust: float, whole: Mapping[str, Any], now: float) -> dict[str, Any]:
    load, reported, kv_tokens = engine.load, whole["reported"], engine.kv_cache_tokens
    ahead_seconds = load.prefill_ahead_seconds(now)  # first: it may change the load
    usage = reported["kv_usage"] if reported else None
    limit = whole["kv_tokens_limit"]
    return {
        "engine": engine.index,
        "rank": engine.rank,
        "in_flight": load.in_flight,
        "slots": engine.slots,
        "cap": engine.cap,
        "decoding": load.decoding,
        "prefilling": len(load.pending),
        "prefill_ahead_ms": round(ahead_seconds * 1000, 1),
        "kv_tokens": kv_tokens,
        "kv_limit": None if limit is None else limit // ranks,
        "kv_reserved": engine.kv.taken_tokens,
        "kv_used": None if usage is None or kv_tokens is None else round(usage * kv_tokens),
        "trust": round(trust, 3),
    }
