"""Clients whose requests have spoilt a batch: for a while their requests travel alone."""

_SECONDS = 10.0
_MOST = 1024


class Solo:
    """Who travels alone, and until when."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}  # soonest first

    def __len__(self) -> int:
        return len(self._until)

    def send(self, client: str, now: float) -> None:
        """This client's request was refused after it had spoilt a batch."""
        self._until.pop(client, None)
        if len(self._until) >= _MOST:
            del self._until[next(iter(self._until))]
        self._until[client] = now + _SECONDS

    def holds(self, client: str, now: float) -> bool:
        """Whether this client's requests travel alone now."""
        while self._until:
            first = next(iter(self._until))
            if self._until[first] > now:
                break
            del self._until[first]
        return client in self._until
