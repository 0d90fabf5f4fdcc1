"""Tells in the log when predictions of cached prefixes fail on an engine, and when they hold again."""

from collections.abc import Callable
from typing import Protocol

import structlog

from gateway.observe.log_throttle import LogThrottle


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
        self._quiet = LogThrottle(clock)  # predictions may waver
        self._fallen: set[int] = set()  # engines whose fall was told
        self._log = structlog.get_logger("gateway")

    def changed(self, seat: int, share: float, holds: bool) -> None:
        """Predictions have begun to fail there, or hold again."""
        if holds:
            if seat not in self._fallen:
                return
            self._fallen.remove(seat)
        elif self._quiet.tells(seat):
            self._fallen.add(seat)
        else:
            return
        tell = self._log.info if holds else self._log.warning
        if engine := self._engine_of(seat):
            tell("prefix_trust", backend=engine.name, rank=engine.rank, confirmed_share=round(share, 2))
