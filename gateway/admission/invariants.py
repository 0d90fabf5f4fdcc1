"""What must hold of the books of admission at any moment: each sum is that of what it sums up. Pure.

A look costs some tens of microseconds: it goes on with the next engines where the one before has stopped.
"""

from collections.abc import Callable, Iterator, Sequence

from gateway.admission.fairness import Tenants
from gateway.admission.kv_ledger import KvLedger
from gateway.admission.queue import Queue
from gateway.routing.load import Load
from gateway.routing.seat import Seat

_ENOUGH = 150  # requests to look at in one go
_MOST_COUNTED_WAITING = 300  # beyond that only what costs little is compared


def broken_in_load(load: Load) -> Iterator[str]:
    """Which counts of what is in flight on an engine are not those of its requests."""
    works = load.works
    if load.in_flight != sum([work.sequences for work in works]):
        yield "in_flight"
    if load.context_tokens != sum([work.prompt_tokens for work in works]):
        yield "context_tokens"
    if load.decoding < 0 or load.decoding != load.in_flight - sum([work.sequences for work in load.pending]):
        yield "decoding"
    if not works.issuperset(load.pending):
        yield "prefilling"


def broken_in_ledger(ledger: KvLedger, requests: int) -> Iterator[str]:
    """Which counts of what is reserved on an engine with so many requests are not those of its reservations."""
    if ledger.taken_tokens != ledger.recount():
        yield "kv_tokens"
    if len(ledger) != requests:
        yield "reservations"
    if ledger.taken_tokens < 0 or (not requests and ledger.taken_tokens):
        yield "kv_tokens_when_idle"


def broken_in_queue(queue: Queue) -> Iterator[str]:
    """Which counts of who waits are not those of the lines."""
    lines = [line for model in queue.models() if (line := queue.line(model)) is not None]
    if len(queue) != sum(map(len, lines)) or any(len(line) == 0 for line in lines):
        yield "queued_requests"
    for line in lines:
        if len(line) != sum([len(flow.tickets) for flow in line.flows]):
            yield "queued_by_tenant"
    if len(queue) <= _MOST_COUNTED_WAITING and queue.size_bytes != sum([ticket.ask.size_bytes for ticket in queue]):
        yield "queued_bytes"


def broken_in_tenants(tenants: Tenants) -> Iterator[str]:
    """Which counts of a model's tenants are not those of each tenant."""
    if len(tenants) > _MOST_COUNTED_WAITING:
        return
    if tenants.in_flight != sum([tenant.in_flight for tenant in tenants]):
        yield "in_flight_by_tenant"
    if tenants.waiting != sum([tenant.waiting for tenant in tenants]):
        yield "waiting_by_tenant"
    if tenants.waiting_tenants != sum([tenant.waiting > 0 for tenant in tenants]):
        yield "waiting_tenants"
    if any(tenant.in_flight < 0 or tenant.waiting < 0 for tenant in tenants):
        yield "tenant"


class Invariants:
    """Looks at the queue, and at engines in turn."""

    def __init__(self, books: Callable[[], Sequence[tuple[Seat, KvLedger]]], queue: Queue) -> None:
        self._books = books
        self._queue = queue
        self._next = 0

    def look(self) -> list[tuple[str, str]]:
        """What does not hold, and where: a backend's name, or empty for the queue."""
        found = [(what, "") for what in broken_in_queue(self._queue)]
        found += [(what, "") for tenants in self._queue.all_tenants for what in broken_in_tenants(tenants)]
        books = self._books()
        looked = 0
        for _ in books:
            seat, ledger = books[self._next % len(books)]
            self._next = self._next % len(books) + 1
            found += [(what, seat.name) for what in broken_in_load(seat.load)]
            found += [(what, seat.name) for what in broken_in_ledger(ledger, len(seat.load.works))]
            looked += len(seat.load.works) + 5  # one that is idle costs as much as a few requests
            if looked >= _ENOUGH:
                break
        return found
