"""How many requests and bytes wait (queued, for a batch, or as lists of documents), and how fast they are served."""

from math import exp

_GUARDED_SHARE = 16  # one of so many places is kept from those who have much, or are not told apart by tenant


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
        """Whether no more of this size may wait. `guarded`: the last places are kept from it."""
        most, most_bytes = self._max_requests, self._max_bytes
        if guarded:
            most, most_bytes = most - most // _GUARDED_SHARE, most_bytes - most_bytes // _GUARDED_SHARE
        return self.requests >= most or self.size_bytes + size_bytes > most_bytes

    def join(self, size_bytes: int) -> None:
        self.requests += 1
        self.size_bytes += size_bytes

    def leave(self, size_bytes: int) -> None:
        """One of this size waits no more."""
        self.requests -= 1
        self.size_bytes -= size_bytes


_MEMORY_SECONDS = 10.0
_UNKNOWN_SECONDS = 1.0  # answers take seconds, so nobody should be back in a tenth


class ServiceRate:
    """Mean time between two requests leaving, over the last ten seconds or so: they often leave in bursts."""

    __slots__ = ("_count", "_last", "_seconds")

    def __init__(self) -> None:
        self._last: float | None = None
        self._seconds = 0.0  # both fade with time
        self._count = 0.0

    def left(self, now: float) -> None:
        """A request gave its place back."""
        if self._last is not None:
            gap = now - self._last
            fading = exp(-gap / _MEMORY_SECONDS)
            self._seconds = self._seconds * fading + gap
            self._count = self._count * fading + 1
        self._last = now

    def seconds_for(self, places: int, now: float) -> float:
        """Expected time until this many places came free, between 0.1 and 60 seconds."""
        between = self.between_seconds(now)
        return _UNKNOWN_SECONDS if between is None else min(60.0, max(0.1, places * between))

    def between_seconds(self, now: float) -> float | None:
        """The mean; None = not known yet."""
        if self._last is None or self._seconds == 0.0:
            return None
        silence = now - self._last
        fading = exp(-silence / _MEMORY_SECONDS)
        if_now = (self._seconds * fading + silence) / (self._count * fading + 1)  # if another left at this moment
        return max(self._seconds / self._count, if_now)


class ServiceRates:
    """The rate of each model's line."""

    def __init__(self) -> None:
        self._rates: dict[str, ServiceRate] = {}

    def left(self, model: str, now: float) -> None:
        """A request for this model gave its place back."""
        rate = self._rates.get(model)
        if rate is None:
            rate = self._rates[model] = ServiceRate()
        rate.left(now)

    def seconds_for(self, model: str, places: int, now: float) -> float:
        """Expected time until this many places came free for the model."""
        rate = self._rates.get(model)
        return rate.seconds_for(places, now) if rate is not None else _UNKNOWN_SECONDS

    def per_second(self, model: str, now: float) -> float | None:
        """Requests for the model that give their place back in a second; None = not known yet."""
        rate = self._rates.get(model)
        between = rate.between_seconds(now) if rate is not None else None
        return None if not between else 1 / between
