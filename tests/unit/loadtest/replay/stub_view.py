"""An engine as a rule sees it, with every figure set by the test."""

from __future__ import annotations

from loadtest.replay.engine import ReplayEngine, ReplayRequest
from loadtest.replay.router import EngineView

BLOCK = 64


class StubView(EngineView):
    """Figures are what they are set to; the cache holds the first `held` blocks of any prompt."""

    def __init__(
        self,
        engine: ReplayEngine,
        index: int,
        *,
        in_flight: int = 0,
        prefill_tokens: int = 0,
        waiting: int = 0,
        kv_usage: float = 0.0,
        held: int = 0,
    ) -> None:
        super().__init__(index, engine)
        self.in_flight = in_flight
        self.prefill_tokens = prefill_tokens
        self._waiting, self._kv_usage, self._held = waiting, kv_usage, held

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def kv_usage(self) -> float:
        return self._kv_usage

    def cached_blocks(self, request: ReplayRequest) -> int:
        return min(self._held, len(request.keys))
