"""Engines whose events have ceased to arrive, though the connection stands: they answer, and tell nothing of it."""

PATIENCE_SECONDS = 3.0  # events follow an answer by tens of milliseconds


class StaleEventDetector:
    """Who is waited for, since when. Times are those at which requests ended."""

    def __init__(self) -> None:
        self._unheard: dict[int, float] = {}
        self._silent: set[int] = set()

    def __contains__(self, engine: int) -> bool:
        return engine in self._silent

    def answered(self, engine: int, now: float) -> None:
        """It has computed blocks of which it has told nothing yet."""
        self._unheard.setdefault(engine, now)

    def heard(self, engine: int) -> bool:
        """It told something. Whether it had fallen silent."""
        self._unheard.pop(engine, None)
        was_silent = engine in self._silent
        self._silent.discard(engine)
        return was_silent

    def fallen(self, now: float) -> list[int]:
        """Engines that have been waited for too long by now, each told once."""
        fallen = [engine for engine, since in self._unheard.items() if now - since > PATIENCE_SECONDS]
        for engine in fallen:
            del self._unheard[engine]
        self._silent.update(fallen)
        return fallen
