"""Consistent hashing with bounded loads, as KubeAI does it: the prompt's opening has a place on a ring."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from xxhash import xxh64_intdigest

from loadtest.replay.request import ReplayRequest
from loadtest.replay.view import EngineView

_REPLICAS = 256
_LOAD_FACTOR = 1.25


class BoundedLoadRing:
    """Clockwise from the opening's hash, the first engine whose load with this request is within 1.25 of the mean.

    KubeAI hashes the first 100 characters, which lie within the first block.
    """

    def __init__(self, engines: int, replicas: int = _REPLICAS, load_factor: float = _LOAD_FACTOR) -> None:
        places = (
            (xxh64_intdigest(f"engine-{i}{copy}".encode()), i) for i in range(engines) for copy in range(replicas)
        )
        self._ring = sorted(places)
        self._hashes = [place for place, _ in self._ring]
        self._load_factor = load_factor

    def choose(self, request: ReplayRequest, engines: Sequence[EngineView]) -> int:
        """The first engine on the way round that has room; a prompt without a full block is an opening of its own."""
        opening = (f"{request.keys[0]}" if request.keys else f"prompt {request.number}").encode()
        start = bisect_left(self._hashes, xxh64_intdigest(opening)) % len(self._ring)
        total = sum(view.in_flight for view in engines)
        bound = (total + 1) / len(engines) * self._load_factor
        for step in range(len(self._ring)):
            index = self._ring[(start + step) % len(self._ring)][1]
            if total == 0 or engines[index].in_flight + 1 <= bound:
                return index
        return self._ring[start][1]

    def released(self, request: ReplayRequest) -> None: ...
