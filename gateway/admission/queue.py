"""The waiting line: one line a model, within the bounds of all that waits."""

from collections.abc import Iterator

from gateway.admission.backlog import Backlog
from gateway.admission.fairness import Tenants
from gateway.admission.line import ModelQueue, Order
from gateway.admission.ticket import Ticket
from gateway.errors import QueueFull
from gateway.request import Ask

_MOST_MODELS = 1024  # more are kept only while they are in use


class Queue:
    """Owner of who waits. What waits elsewhere is counted in its `backlog`, too."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self.backlog = Backlog(max_requests, max_bytes)
        self._lines: dict[str, ModelQueue] = {}
        self._tenants: dict[str, Tenants] = {}
        self._requests = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._requests

    def __repr__(self) -> str:
        lines = ", ".join(f"{model} {len(line)}" for model, line in self._lines.items())
        return f"<Queue {self._requests} waiting, {self._bytes} bytes: {lines or 'empty'}>"

    @property
    def size_bytes(self) -> int:
        """Bodies of those who wait."""
        return self._bytes

    def tenants(self, model: str) -> Tenants:
        """A model's tenants, whether they wait or not."""
        tenants = self._tenants.get(model)
        if tenants is None:
            if len(self._tenants) >= _MOST_MODELS:
                self._forget_idle()
            tenants = self._tenants[model] = Tenants()
        return tenants

    def _forget_idle(self) -> None:
        """Clients name models, also such as do not exist: what is known of those that nobody uses is dropped."""
        for model, tenants in list(self._tenants.items()):
            if not tenants.waiting and not tenants.in_flight:
                del self._tenants[model]

    def waiting(self, model: str) -> int:
        """How many wait for a model."""
        line = self._lines.get(model)
        return 0 if line is None else len(line)

    def models(self) -> list[str]:
        """Models that somebody waits for."""
        return list(self._lines)

    def line(self, model: str) -> ModelQueue | None:
        """The line of a model that somebody waits for."""
        return self._lines.get(model)

    def in_order(self, model: str, order: Order) -> list[Ticket]:
        """The first tickets of a model's line."""
        line = self._lines.get(model)
        return [] if line is None else line.in_order(order)

    def __iter__(self) -> Iterator[Ticket]:
        for line in self._lines.values():
            yield from line

    def join(self, ticket: Ticket, retry_after_seconds: float) -> None:
        """Take a place. Raises QueueFull."""
        ask = ticket.ask
        tenants = self.tenants(ask.model)
        self.refuse_if_full(ask, ticket.arrived_seconds, retry_after_seconds)
        line = self._lines.get(ask.model)
        if line is None:
            line = self._lines[ask.model] = ModelQueue(tenants, ticket.arrived_seconds)
        line.join(ticket)
        self._requests += 1
        self._bytes += ask.size_bytes
        self.backlog.join(ask.size_bytes)

    def refuse_if_full(self, ask: Ask, now: float, retry_after_seconds: float) -> None:
        """Raises QueueFull when as many requests or bytes wait as may.

        The last places are kept from a tenant that has more than its share of them, while others have been there.
        """
        tenants = self.tenants(ask.model)
        if self.backlog.is_full_for(ask.size_bytes, guarded=tenants.waits_much(tenants.of(ask), now)):
            raise QueueFull(
                f"The queue is full: all backends for model {ask.model!r} are busy and {self.backlog.requests} requests"
                " are waiting. Retry after the time in the retry-after header.",
                retry_after_seconds=retry_after_seconds,
            )

    def serve(self, ticket: Ticket, order: Order) -> None:
        """A ticket's request goes to an engine."""
        line = self._lines.get(ticket.ask.model)
        if line is not None:
            line.serve(ticket, order)
        self.leave(ticket)

    def leave(self, ticket: Ticket) -> bool:
        """Give the place back; False if it was given back before."""
        line = self._lines.get(ticket.ask.model)
        if line is None or not line.leave(ticket):
            return False
        if not len(line):
            del self._lines[ticket.ask.model]
        self._requests -= 1
        self._bytes -= ticket.ask.size_bytes
        self.backlog.leave(ticket.ask.size_bytes)
        return True
