"""How many requests and bytes wait (queued, for a batch, or as lists of documents), and how fast they are served."""

from math import exp

_GUARDED_SHARE = 16  # one place in 16 is kept from tenants over their share and from requests of unknown tenant


class Backlog:
    """The one count of requests and bytes that wait."""

    __slots__ = ("_max_bytes", "_max_requests", "requests", "size_bytes")

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self.requests = 0
        self.size_bytes = 0

    def __repr__(self) -> str:
        return f"<Backlog {self.requests} requests, {self.size_bytes} bytes>"

    def is_full_for(self, size_bytes: int, *, guarded: bool) -> bool:
        """Whether one more request of this size would be too much. `guarded`: it may not take the last places."""
        most, most_bytes = self._max_requests, self._max_bytes
        if guarded:
            most, most_bytes = most - most // _GUARDED_SHARE, most_bytes - most_bytes // _GUARDED_SHARE
        return self.requests >= most or self.size_bytes + size_bytes > most_bytes

    def join(self, size_bytes: int) -> None:
        self.requests += 1
        self.size_bytes += size_bytes

    def leave(self, size_bytes: int) -> None:
        self.requests -= 1
        self.size_bytes -= size_bytes


_MEMORY_SECONDS = 10.0
UNKNOWN_SECONDS = 1.0  # answers take seconds, so a retry after a tenth is too early


class ServiceRate:
    """Mean time between two completed requests of one model, over the last ten seconds or so: they come in bursts."""

    __slots__ = ("_count", "_last", "_seconds")

    def __init__(self) -> None:
        self._last: float | None = None
        self._seconds = 0.0  # both fade with time
        self._count = 0.0

    def left(self, now: float) -> None:
        if self._last is not None:
            gap = now - self._last
            fading = exp(-gap / _MEMORY_SECONDS)
            self._seconds = self._seconds * fading + gap
            self._count = self._count * fading + 1
        self._last = now

    def seconds_for(self, places: int, now: float) -> float:
        """Expected time until this many slots are released, between 0.1 and 60 seconds."""
        between = self.between_seconds(now)
        return UNKNOWN_SECONDS if between is None else min(60.0, max(0.1, places * between))

    def between_seconds(self, now: float) -> float | None:
        """The mean; None = not known yet."""
        if self._last is None or self._seconds == 0.0:
            return None
        silence = now - self._last
        fading = exp(-silence / _MEMORY_SECONDS)
        if_now = (self._seconds * fading + silence) / (self._count * fading + 1)  # if another left at this moment
        return max(self._seconds / self._count, if_now)
