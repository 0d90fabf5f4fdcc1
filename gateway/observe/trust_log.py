"""Tells in the log when predictions of cached prefixes fail on an engine, and when they hold again."""

import math
from collections.abc import Callable
from typing import Protocol

import structlog

_QUIET_SECONDS = 60.0  # between two warnings of one engine; where its predictions waver, the metric tells enough


class Engine(Protocol):
    """What is told of an engine."""

    @property
    def name(self) -> str:
        """Its backend's."""

    @property
    def rank(self) -> int | None:
        """Which of the backend's engines it is."""


class TrustLog:
    """Hears of every fall and rise; a rise is told if its fall was."""

    def __init__(self, engine_of: Callable[[int], Engine | None], clock: Callable[[], float]) -> None:
        self._engine_of = engine_of
        self._clock = clock
        self._told_seconds: dict[int, float] = {}
        self._fallen: set[int] = set()  # engines whose fall was told
        self._log = structlog.get_logger("gateway")

    def changed(self, seat: int, share: float, holds: bool) -> None:
        """Predictions have begun to fail there, or hold again."""
        now = self._clock()
        if holds:
            if seat not in self._fallen:
                return
            self._fallen.remove(seat)
        else:
            if now - self._told_seconds.get(seat, -math.inf) < _QUIET_SECONDS:
                return
            self._told_seconds[seat] = now
            self._fallen.add(seat)
        tell = self._log.info if holds else self._log.warning
        if engine := self._engine_of(seat):
            tell("prefix_trust", backend=engine.name, rank=engine.rank, confirmed_share=round(share, 2))
