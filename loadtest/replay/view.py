"""One engine as a router's rule sees it: what was sent there, and what the engine itself says, without delay."""

from __future__ import annotations

from loadtest.replay.engine import ReplayEngine
from loadtest.replay.request import ReplayRequest


class EngineView:
    """`in_flight` and `prefill_tokens` (uncached, no first token yet) are the router's own counts."""

    def __init__(self, index: int, engine: ReplayEngine) -> None:
        self.index = index
        self.in_flight = 0
        self.prefill_tokens = 0
        self._scheduler = engine.scheduler
        self._block_tokens = engine.scheduler.limits.block_size

    @property
    def waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache's blocks that sequences refer to."""
        pool = self._scheduler.pool
        return pool.num_used / pool.num_blocks

    def cached_blocks(self, request: ReplayRequest) -> int:
        """Leading blocks of the prompt that the engine's cache holds."""
        return len(self._scheduler.pool.find(request.keys, len(request.keys)))

    def uncached_tokens(self, request: ReplayRequest) -> int:
        """Tokens of the prompt that it would have to compute; at least one."""
        return max(1, request.prompt_tokens - self._block_tokens * self.cached_blocks(request))
