"""How fast places come free, to tell a refused client when to come back."""

_SMOOTHING = 0.1
_UNKNOWN_SECONDS = 1.0  # answers take seconds, so nobody should be back in a tenth


class DrainRate:
    """Smoothed time between two requests leaving a backend."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._between_seconds = 0.0

    def left(self, now: float) -> None:
        """A request gave its place back."""
        if self._last is not None:
            gap = now - self._last
            known = self._between_seconds
            self._between_seconds = gap if known == 0.0 else known + _SMOOTHING * (gap - known)
        self._last = now

    def seconds_for(self, places: int, now: float) -> float:
        """Expected time until this many places came free, between 0.1 and 60 seconds."""
        between = self._between_seconds
        if between == 0.0:
            return _UNKNOWN_SECONDS
        if self._last is not None:
            between = max(between, (now - self._last) / 2)  # nothing has left for a while: it became slower
        return min(60.0, max(0.1, places * between))
