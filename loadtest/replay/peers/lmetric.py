"""LMetric: prefill that an engine would have before it is through, times its batch; the smallest product wins."""

from __future__ import annotations

import random
from collections.abc import Sequence

from loadtest.replay.request import ReplayRequest
from loadtest.replay.view import EngineView


class LMetric:
    """(uncached tokens in prefill + own uncached tokens) x (requests in flight with this one)."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: ReplayRequest, engines: Sequence[EngineView]) -> int:
        """The engine with the smallest product, ties by lot."""
        products = [(view.prefill_tokens + view.uncached_tokens(request)) * (view.in_flight + 1) for view in engines]
        least = min(products)
        return self._rng.choice([index for index, product in enumerate(products) if product == least])

    def released(self, request: ReplayRequest) -> None: ...
