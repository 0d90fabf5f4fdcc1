"""Rules that look at load alone, or at nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence

from loadtest.replay.request import ReplayRequest
from loadtest.replay.view import EngineView


class RoundRobin:
    """Each engine in turn."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, request: ReplayRequest, engines: Sequence[EngineView]) -> int:  # noqa: ARG002
        self._turn = (self._turn + 1) % len(engines)
        return self._turn

    def released(self, request: ReplayRequest) -> None: ...


class LeastInFlight:
    """The engine with the fewest requests in flight; ties by lot."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: ReplayRequest, engines: Sequence[EngineView]) -> int:  # noqa: ARG002
        least = min(view.in_flight for view in engines)
        return self._rng.choice([view.index for view in engines if view.in_flight == least])

    def released(self, request: ReplayRequest) -> None: ...


class PowerOfTwoChoices:
    """The emptier of two engines drawn by lot."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: ReplayRequest, engines: Sequence[EngineView]) -> int:  # noqa: ARG002
        """The emptier one; of one engine, that one."""
        drawn = self._rng.sample(range(len(engines)), min(2, len(engines)))
        return min(drawn, key=lambda index: engines[index].in_flight)

    def released(self, request: ReplayRequest) -> None: ...
