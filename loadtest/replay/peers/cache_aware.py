"""The cache-aware rule of SGLang's router and vllm-router: a tree of what was sent where, and two thresholds."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.replay.request import ReplayRequest
from loadtest.replay.view import EngineView

_TREE_TOKENS = (1 << 26) // 4  # the routers bound a tree at 2^26 characters


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The routers' defaults: share of the prompt that must match; loads that count as out of balance."""

    match: float = 0.3
    absolute: int = 64
    relative: float = 1.5


class CacheAware:
    """Out of balance: the emptiest engine. Else the best match if it is good enough, else the smallest tree."""

    def __init__(self, engines: int, block_tokens: int, rng: random.Random, limits: Thresholds | None = None) -> None:
        self._limits = limits or Thresholds()
        self._rng = rng
        self._block_tokens = block_tokens
        self._trees: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(engines)]
        self._tokens = [0] * engines  # of text in each tree, partial blocks too

    def choose(self, request: ReplayRequest, engines: Sequence[EngineView]) -> int:
        """The engine; the prompt joins its tree."""
        loads = [view.in_flight for view in engines]
        least, most = min(loads), max(loads)
        if most - least > self._limits.absolute and most > self._limits.relative * least:
            chosen = loads.index(least)
        else:
            chosen = self._by_match(request)
        self._insert(request, chosen)
        return chosen

    def released(self, request: ReplayRequest) -> None:
        """The trees forget by size alone."""

    def _by_match(self, request: ReplayRequest) -> int:
        depths = [self._depth(tree, request.keys) for tree in self._trees]
        deepest = max(depths)
        if deepest * self._block_tokens > self._limits.match * request.prompt_tokens:
            return self._rng.choice([index for index, depth in enumerate(depths) if depth == deepest])
        return self._tokens.index(min(self._tokens))

    @staticmethod
    def _depth(tree: OrderedDict[int, None], keys: Sequence[int]) -> int:
        for depth, key in enumerate(keys):
            if key not in tree:
                return depth
        return len(keys)

    def _insert(self, request: ReplayRequest, engine: int) -> None:
        tree, block = self._trees[engine], self._block_tokens
        known = len(tree)
        for key in reversed(request.keys):
            tree[key] = None
            tree.move_to_end(key)
        added = len(tree) - known
        self._tokens[engine] += added * block + (request.prompt_tokens - len(request.keys) * block if added else 0)
        while len(tree) * block > _TREE_TOKENS:
            tree.popitem(last=False)
            self._tokens[engine] -= block
