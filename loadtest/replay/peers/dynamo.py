"""NVIDIA Dynamo's KV router: blocks to prefill there, and blocks that would be active there; the fewest win."""

from __future__ import annotations

import random
from collections.abc import Sequence

from loadtest.replay.request import ReplayRequest
from loadtest.replay.view import EngineView


class DynamoCost:
    """cost = weight x (prompt tokens in prefill + own uncached ones) / block + active blocks with this request's."""

    def __init__(self, engines: int, block_tokens: int, rng: random.Random, overlap_weight: float = 1.0) -> None:
        self._block_tokens = block_tokens
        self._rng = rng
        self._weight = overlap_weight
        self._references: list[dict[int, int]] = [{} for _ in range(engines)]  # active blocks that have a key
        self._unnamed = [0] * engines  # partial blocks of active requests
        self._sent: dict[ReplayRequest, int] = {}

    def choose(self, request: ReplayRequest, engines: Sequence[EngineView]) -> int:
        """The cheapest engine, ties by lot."""
        costs = [self._cost(request, view) for view in engines]
        least = min(costs)
        chosen = self._rng.choice([index for index, cost in enumerate(costs) if cost == least])
        references = self._references[chosen]
        for key in request.keys:
            references[key] = references.get(key, 0) + 1
        self._unnamed[chosen] += self._blocks(request) - len(request.keys)
        self._sent[request] = chosen
        return chosen

    def released(self, request: ReplayRequest) -> None:
        """Its blocks are active no more."""
        engine = self._sent.pop(request)
        references = self._references[engine]
        for key in request.keys:
            if references[key] == 1:
                del references[key]
            else:
                references[key] -= 1
        self._unnamed[engine] -= self._blocks(request) - len(request.keys)

    def _cost(self, request: ReplayRequest, view: EngineView) -> float:
        references = self._references[view.index]
        shared = 0
        for key in request.keys:
            if key not in references:
                break
            shared += 1
        active = len(references) + self._unnamed[view.index] + self._blocks(request) - shared
        prefill = (view.prefill_tokens + view.uncached_tokens(request)) / self._block_tokens
        return self._weight * prefill + active

    def _blocks(self, request: ReplayRequest) -> int:
        return -(-request.prompt_tokens // self._block_tokens)
