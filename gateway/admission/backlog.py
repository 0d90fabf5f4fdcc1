"""How many requests and bytes may wait, wherever they do: in the queue, for a batch, or as lists of documents."""

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
        """One more waits."""
        self.requests += 1
        self.size_bytes += size_bytes

    def leave(self, size_bytes: int) -> None:
        """One of this size waits no more."""
        self.requests -= 1
        self.size_bytes -= size_bytes
