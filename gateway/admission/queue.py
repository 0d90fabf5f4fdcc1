"""The waiting line: bounded by count and bytes, one queue a model, oldest first."""

from collections import OrderedDict
from collections.abc import Iterator

from gateway.errors import QueueFull
from gateway.request import Ask
from gateway.routing.matrix import Hit


class Ticket:
    """A place in the line."""

    __slots__ = (
        "arrived_seconds",
        "ask",
        "avoid",
        "goes_anywhere",
        "hits",
        "hits_of",
        "hits_seconds",
        "opening",
        "prefill_seconds",
        "turn",
    )

    def __init__(self, ask: Ask, arrived_seconds: float, avoid: frozenset[str], prefill_seconds: float) -> None:
        self.ask = ask
        self.arrived_seconds = arrived_seconds
        self.avoid = avoid
        self.goes_anywhere = not avoid and ask.pinned is None and ask.rank is None and ask.sequences == 1
        self.prefill_seconds = prefill_seconds  # on the backend that holds most of its prompt
        self.turn = prefill_seconds  # who comes first: the least prefill, and what was waited for counts against it
        self.opening = ask.keys[0] if ask.keys else 0
        self.hits: Hit | None = None  # predicted, for each of the seats `hits_of`, at `hits_seconds`
        self.hits_of: object = None
        self.hits_seconds = 0.0


class Queue:
    """Owner of who waits."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._lines: dict[str, OrderedDict[Ticket, None]] = {}
        self._requests = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._requests

    def __repr__(self) -> str:
        lines = ", ".join(f"{model} {len(line)}" for model, line in self._lines.items())
        return f"<Queue {self._requests} waiting, {self._bytes} bytes: {lines or 'empty'}>"

    def waiting(self, model: str) -> int:
        """How many wait for a model."""
        return len(self._lines.get(model, ()))

    def models(self) -> list[str]:
        """Models that somebody waits for."""
        return list(self._lines)

    def oldest(self, model: str, count: int) -> list[Ticket]:
        """The tickets that have waited longest, oldest first."""
        return [ticket for ticket, _ in zip(self._lines.get(model, ()), range(count), strict=False)]

    def __iter__(self) -> Iterator[Ticket]:
        for line in self._lines.values():
            yield from line

    def join(self, ticket: Ticket, retry_after_seconds: float) -> None:
        """Take a place. Raises QueueFull when the line is at its bound of requests or bytes."""
        if self._requests >= self._max_requests or self._bytes + ticket.ask.size_bytes > self._max_bytes:
            raise QueueFull(
                f"All backends of model {ticket.ask.model!r} are busy and {self._requests} requests are waiting"
                " already. Retry after the time in the retry-after header.",
                retry_after_seconds=retry_after_seconds,
            )
        self._lines.setdefault(ticket.ask.model, OrderedDict())[ticket] = None
        self._requests += 1
        self._bytes += ticket.ask.size_bytes

    def leave(self, ticket: Ticket) -> bool:
        """Give the place back; False if it was given back before."""
        line = self._lines.get(ticket.ask.model)
        if line is None or ticket not in line:
            return False
        del line[ticket]
        if not line:
            del self._lines[ticket.ask.model]
        self._requests -= 1
        self._bytes -= ticket.ask.size_bytes
        return True
