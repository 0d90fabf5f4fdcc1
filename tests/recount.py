"""Recounts the sums that admission keeps, from the requests that they are the sums of. Pure."""

from collections.abc import Iterable, Iterator, Set

from gateway.core.routing.engine import Engine, EngineLoad
from gateway.core.routing.kv_reservations import KvLedger, Reservation
from gateway.core.scheduling.fair_share import Tenants
from gateway.core.scheduling.wait_queue import Queue


def mismatches(engines: Iterable[Engine], queue: Queue) -> list[tuple[str, str]]:
    """Each sum that differs from its recount, and its backend; the backend is empty for sums of the queue."""
    found = [(what, "") for what in queue_mismatches(queue)]
    found += [(what, "") for _, tenants in queue.tenants.items() for what in tenant_mismatches(tenants)]
    for engine in engines:
        found += [(what, engine.name) for what in load_mismatches(engine.load, engine.kv.held)]
        found += [(what, engine.name) for what in ledger_mismatches(engine.kv)]
    return found


def load_mismatches(load: EngineLoad, held: Set[Reservation]) -> Iterator[str]:
    """Sums of an engine's load that differ from those of its requests in flight, which are those held."""
    if load.in_flight != sum(request.sequences for request in held):
        yield "in_flight"
    if load.context_tokens != sum(request.demand.prompt_tokens + request.streamed_tokens for request in held):
        yield "context_tokens"
    if load.decoding < 0 or load.decoding != load.in_flight - sum(request.sequences for request in load.pending):
        yield "decoding"
    if not held >= load.pending.keys():
        yield "prefilling"


def ledger_mismatches(ledger: KvLedger) -> Iterator[str]:
    """Sums of an engine's KV ledger that differ from those of its reservations."""
    if ledger.taken_tokens != taken_tokens(ledger):
        yield "kv_tokens"
    if ledger.margins_squared != sum(reservation.margin_squared for reservation in ledger.held):
        yield "kv_margins"
    if ledger.taken_tokens < 0 or (not ledger.held and ledger.taken_tokens):
        yield "kv_tokens_when_idle"


def taken_tokens(ledger: KvLedger) -> int:
    """The tokens that the ledger's reservations hold, shared prefixes once."""
    stretches: dict[int, int] = {}
    for reservation in ledger.held:
        node = reservation.node
        while node is not None and id(node) not in stretches:
            stretches[id(node)] = node.tokens
            node = node.parent
    return sum(stretches.values()) + sum(reservation.own_tokens for reservation in ledger.held)


def queue_mismatches(queue: Queue) -> Iterator[str]:
    """Sums of the queue that differ from those of its lines."""
    lines = [line for model in queue.models() if (line := queue.of_model(model)) is not None]
    if len(queue) != sum(map(len, lines)) or any(len(line) == 0 for line in lines):
        yield "queued_requests"
    for line in lines:
        if len(line) != sum(len(flow.tickets) for flow in line.flows):
            yield "queued_by_tenant"
    if queue.size_bytes != sum(ticket.demand.size_bytes for ticket in queue):
        yield "queued_bytes"


def tenant_mismatches(tenants: Tenants) -> Iterator[str]:
    """Sums over a model's tenants that differ from those of each tenant."""
    if tenants.in_flight != sum(tenant.in_flight for tenant in tenants):
        yield "in_flight_by_tenant"
    if tenants.waiting != sum(tenant.waiting for tenant in tenants):
        yield "waiting_by_tenant"
    if tenants.waiting_tenants != sum(tenant.waiting > 0 for tenant in tenants):
        yield "waiting_tenants"
    if any(tenant.in_flight < 0 or tenant.waiting < 0 for tenant in tenants):
        yield "tenant"
