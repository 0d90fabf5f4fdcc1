"""Backends as the gateway's placement sees them, for engines that exist only here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ModelledBackend:
    """An engine's sizes; always up."""

    name: str
    index: int
    cap: int
    kv_cache_tokens: int | None
    block_tokens: int
    speed: float = 1.0
    caches_prefixes: bool = True
    rank: int | None = None

    def limit(self, now_seconds: float) -> int:  # noqa: ARG002
        """Sequences that it may have in flight."""
        return self.cap


def fleet(
    engines: int, cap: int, kv_cache_tokens: int, block_tokens: int, speeds: tuple[float, ...]
) -> list[ModelledBackend]:
    """As many backends as there are engines; `speeds` are their relative step times."""
    return [
        ModelledBackend(f"engine-{index}", index, cap, kv_cache_tokens, block_tokens, speeds[index])
        for index in range(engines)
    ]
