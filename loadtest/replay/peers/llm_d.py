"""llm-d's scorers, each from 0 to 1, and their weighted sum: the highest wins, ties by lot."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from loadtest.replay.request import ReplayRequest
from loadtest.replay.view import EngineView

Scorer = Callable[[ReplayRequest, Sequence[EngineView]], list[float]]


def prefix_scores(request: ReplayRequest, engines: Sequence[EngineView]) -> list[float]:
    """The share of the prompt's blocks that an engine holds."""
    total = len(request.keys)
    return [view.cached_blocks(request) / total if total else 0.0 for view in engines]


def queue_scores(request: ReplayRequest, engines: Sequence[EngineView]) -> list[float]:  # noqa: ARG001
    """1 for the shortest queue in an engine, 0 for the longest; 1 for all if they are equal."""
    lengths = [view.waiting for view in engines]
    least, most = min(lengths), max(lengths)
    return [(most - length) / (most - least) if most > least else 1.0 for length in lengths]


def kv_scores(request: ReplayRequest, engines: Sequence[EngineView]) -> list[float]:  # noqa: ARG001
    """The share of the KV cache that is free."""
    return [1.0 - view.kv_usage for view in engines]


def active_request_scores(request: ReplayRequest, engines: Sequence[EngineView]) -> list[float]:  # noqa: ARG001
    """1 for an idle engine, 0 for the one with the most requests in flight."""
    counts = [view.in_flight for view in engines]
    most = max(counts)
    return [(most - count) / most if count else 1.0 for count in counts]


class WeightedScores:
    """A scheduling profile: scorers with weights."""

    def __init__(self, profile: Sequence[tuple[float, Scorer]], rng: random.Random) -> None:
        self._profile = profile
        self._rng = rng

    def choose(self, request: ReplayRequest, engines: Sequence[EngineView]) -> int:
        """The engine with the highest sum."""
        sums = [0.0] * len(engines)
        for weight, scorer in self._profile:
            sums = [total + weight * score for total, score in zip(sums, scorer(request, engines), strict=True)]
        best = max(sums)
        return self._rng.choice([index for index, total in enumerate(sums) if total == best])

    def released(self, request: ReplayRequest) -> None: ...


def default_profile(rng: random.Random) -> WeightedScores:
    """The chart's default: prefix 3, queue 2, KV cache 2."""
    return WeightedScores(((3.0, prefix_scores), (2.0, queue_scores), (2.0, kv_scores)), rng)


def active_request_profile(rng: random.Random) -> WeightedScores:
    """Prefix 2, active requests 1, KV cache 1."""
    return WeightedScores(((2.0, prefix_scores), (1.0, active_request_scores), (1.0, kv_scores)), rng)
