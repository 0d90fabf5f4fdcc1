"""The dashboard's view of the queue: tenants by model and class, and the causes of the next requests' waits. Pure.

It has only the largest of each kind, so that the cost is bounded for a queue of thousands.
"""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from heapq import nlargest
from math import inf
from operator import itemgetter
from typing import Any, Final

from gateway.core.errors import GatewayError
from gateway.core.request import Demand
from gateway.core.routing.engine import Engine
from gateway.core.routing.policy import EngineVerdict
from gateway.core.scheduling.admission import guarded_slots, is_large_enough, slots_of
from gateway.core.scheduling.fair_share import Tenants
from gateway.core.scheduling.wait_queue import ModelQueue, Queue, TenantQueue, Ticket

_MOST_MODELS: Final = 32
_MOST_FLOWS: Final = 20  # tenants and classes of a model
_MOST_HEADS: Final = 8  # requests with priced engines, of all models
_MOST_NAMED: Final = 3  # engines of one request


@dataclass(frozen=True, slots=True)
class QueueRules:
    """Settings that explain why a request waits."""

    max_requests: int
    kv_headroom: float = 1.0
    window_seconds: float = inf  # of prefill ahead
    _: KW_ONLY
    starvation_seconds: float = inf


def queue_view(
    queue: Queue,
    explain: Callable[[Demand, frozenset[str]], list[EngineVerdict]],
    why_none: Callable[[str], str],
    rules: QueueRules,
    now: float,
) -> dict[str, Any]:
    """`explain` may raise a GatewayError; `why_none`: why no backend serves a model."""
    longest = nlargest(_MOST_MODELS, queue.models(), key=queue.waiting)
    views, heads = [], max(1, _MOST_HEADS // max(1, len(longest)))
    for model in longest:
        found = queue.of_model(model)
        if found is None:
            continue
        view = _model_view(model, queue, found, now)
        view["head"] = [
            _head(ticket, found.tenants, explain=explain, why_none=why_none, rules=rules, now=now)
            for ticket in found.in_order(heads)
        ]
        views.append(view)
    return {
        "waiting": len(queue),
        "waiting_bytes": queue.size_bytes,
        "limit": rules.max_requests,
        "models_not_shown": max(0, len(queue.models()) - len(longest)),
        "models": views,
    }


def offline_view(counts: Mapping[str, tuple[int, int]]) -> list[dict[str, Any]]:
    """Lines of batches that wait for idle capacity, or use it, by model: the largest."""
    largest = nlargest(_MOST_MODELS, counts.items(), key=itemgetter(1))
    return [{"model": model, "waiting": waiting, "in_flight": running} for model, (waiting, running) in largest]


def _model_view(model: str, queue: Queue, found: ModelQueue, now: float) -> dict[str, Any]:
    flows = list(found.flows)
    shown = nlargest(_MOST_FLOWS, flows, key=lambda flow: len(flow.tickets))
    between = found.tenants.rate.between_seconds(now)
    return {
        "model": model,
        "waiting": len(found),
        "in_flight": found.tenants.in_flight,
        "since_seconds": round(now - found.began_seconds, 1),
        "drain_per_second": round(1 / between, 2) if between else None,
        "flows_not_shown": len(flows) - len(shown),
        "flows": [_flow_view(model, queue, flow, now) for flow in shown],
    }


def _flow_view(model: str, queue: Queue, flow: TenantQueue, now: float) -> dict[str, Any]:
    tenant = flow.tenant
    expected = queue.wait_seconds(Demand(model, tenant=tenant.name, weight=tenant.weight, batch=flow.batch), now)
    return {
        "tenant": tenant.name,
        "class": "batch" if flow.batch else "interactive",
        "weight": tenant.weight,
        "waiting": len(flow.tickets),
        "in_flight": tenant.in_flight,
        "oldest_seconds": round(now - flow.since_seconds, 2),
        "expected_seconds": None if expected is None else round(expected, 2),
    }


def _head(
    ticket: Ticket,
    tenants: Tenants,
    explain: Callable[[Demand, frozenset[str]], list[EngineVerdict]],
    why_none: Callable[[str], str],
    rules: QueueRules,
    now: float,
) -> dict[str, Any]:
    demand, waited = ticket.demand, now - ticket.arrived_seconds
    guards = tenants.guards(now, batch=tenants.waiting_batch > 0)
    guarded = guards and tenants.is_over_share(tenants.of(demand), now, batch=demand.batch)
    try:
        verdicts, why = explain(demand, ticket.avoid), ""
    except GatewayError as error:
        verdicts, why = [], why_none(demand.model) or error.message
    return {
        "tenant": demand.tenant,
        "class": "batch" if demand.batch else "interactive",
        "waited_seconds": round(waited, 2),
        "prompt_tokens": demand.prompt_tokens,
        "sequences": demand.sequences,
        "starving": waited > rules.starvation_seconds,
        "deadline_seconds": None if demand.deadline_seconds is None else round(demand.deadline_seconds - now, 1),
        "why": why,
        "engines": [_priced(verdict, demand, rules, now, guarded=guarded) for verdict in verdicts[:_MOST_NAMED]],
        "open_elsewhere": sum(
            verdict.is_open and not _is_kept(verdict.engine, demand, guarded=guarded)
            for verdict in verdicts[_MOST_NAMED:]
        ),
    }


def _priced(verdict: EngineVerdict, demand: Demand, rules: QueueRules, now: float, *, guarded: bool) -> dict[str, Any]:
    engine = verdict.engine
    why = "" if verdict.is_open else why_closed(engine, demand, rules, now)
    if verdict.is_open and _is_kept(engine, demand, guarded=guarded):
        kept, whom = guarded_slots(engine.slots), "interactive requests" if demand.batch else "other tenants"
        why = f"{engine.load.in_flight} of {engine.slots} slots taken, {kept} kept for {whom}"
    return {
        "engine": verdict.name,
        "cost": round(verdict.cost * 1000, 1) if verdict.parts is not None else verdict.cost,
        "hit_tokens": verdict.hit_tokens,
        "open": verdict.is_open,
        "why": why,
    }


def _is_kept(engine: Engine, demand: Demand, *, guarded: bool) -> bool:
    """Whether the slots that an open engine has left are kept for others."""
    kept = guarded_slots(engine.slots) if guarded else 0
    return engine.load.in_flight + slots_of(demand, engine) > engine.slots - kept


def why_closed(engine: Engine, demand: Demand, rules: QueueRules, now: float) -> str:
    """The missing capacity of an engine for this request; the checks of `Capacity.admits`, in the same order."""
    load, wanted = engine.load, slots_of(demand, engine)
    if not is_large_enough(engine, demand):
        return f"{wanted} sequences exceed its cap of {engine.cap}"
    if load.in_flight + wanted > engine.slots:
        return f"{load.in_flight} of {engine.slots} slots taken" + (f", {wanted} needed" if wanted > 1 else "")
    ahead_seconds = load.prefill_ahead_seconds(now)
    if ahead_seconds > rules.window_seconds:
        return f"prefill ahead {ahead_seconds:.2f} s, limit {rules.window_seconds:g} s"
    if engine.kv_cache_tokens:
        limit = int(rules.kv_headroom * engine.kv_cache_tokens)
        return f"KV cache: {engine.kv.taken_tokens} of {limit} tokens reserved, {demand.prompt_tokens} in the prompt"
    return "no capacity"
