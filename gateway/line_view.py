"""What operators see of the waiting line: by model, tenant and class."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gateway.admission.fairness import Tenant, Tenants
from gateway.admission.line import TenantQueue
from gateway.admission.placement import Placement
from gateway.admission.queue import Queue
from gateway.observe.metrics import Labels, Metrics
from gateway.request import Ask

_MOST_LABELS = 100  # names of tenants in metrics; those of keys first
_MOST_SHOWN = 100  # tenants of a model in the answer
_OTHER = "other"


class LineView:
    """Reads the queue; changes nothing. `names`: of tenants that are known from the start."""

    def __init__(
        self, queue: Queue, placement: Placement, models: Callable[[], Sequence[str]], names: Iterable[str],
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._queue = queue
        self._placement = placement
        self._models = models
        self._labels = set(list(names)[:_MOST_LABELS])
        self._clock = clock

    def add_gauges(self, metrics: Metrics) -> None:
        """Values that are read when metrics are scraped."""
        metrics.gauge(
            "gateway_queued_requests_by_tenant",
            "Requests waiting in the queue, by tenant; other = tenants beyond the first 100, none = no tenant name.",
            ("model", "tenant", "class"),
            self._counts,
        )

    async def document(self) -> dict[str, Any]:
        """The line of each model, live. A long line takes long to look through, so others run between tenants."""
        now = self._clock()
        shown = dict.fromkeys((*self._models(), *self._queue.models()))
        return {"waiting": len(self._queue), "models": [await self._model(model, now) for model in shown]}

    def _counts(self) -> list[tuple[Labels, float]]:
        counts: dict[Labels, float] = {}
        known = set(self._models())
        for model in self._queue.models():
            line = self._queue.line(model)
            for flow in line.flows if line is not None else ():
                labels = (model if model in known else "unknown", self._label(flow.tenant.name), _class(flow.batch))
                counts[labels] = counts.get(labels, 0.0) + len(flow.tickets)
        return list(counts.items())

    def _label(self, tenant: str) -> str:
        """The tenant's name, as long as not too many have had one."""
        if tenant not in self._labels:
            if len(self._labels) >= _MOST_LABELS:
                return _OTHER
            self._labels.add(tenant)
        return tenant

    async def _model(self, model: str, now: float) -> dict[str, Any]:
        line, tenants = self._queue.line(model), self._queue.tenants(model)
        flows = {(flow.tenant.name, flow.batch): flow for flow in line.flows} if line is not None else {}
        shown = sorted(tenants, key=lambda one: (one.waiting, one.in_flight, one.seen_seconds), reverse=True)
        rate = self._placement.prospects.service_rate(model, now)
        told = []
        for tenant in shown[:_MOST_SHOWN]:
            told.append(self._tenant(model, tenants, tenant, flows, now))
            await asyncio.sleep(0)
        return {
            "model": model,
            "waiting": tenants.waiting,
            "in_flight": tenants.in_flight,
            "line_seconds": now - line.began_seconds if line is not None else 0.0,
            "drain_requests_per_second": rate,
            "tenants": told,
        }

    def _tenant(
        self, model: str, tenants: Tenants, tenant: Tenant, flows: dict[tuple[str, bool], TenantQueue], now: float
    ) -> dict[str, Any]:
        return {
            "tenant": tenant.name,
            "weight": tenant.weight,
            "in_flight": tenant.in_flight,
            "served_tokens": round(tenant.served_tokens),
            "classes": [
                {
                    "class": _class(batch),
                    "waiting": 0 if flow is None else len(flow.tickets),
                    "oldest_wait_seconds": 0.0 if flow is None else now - flow.since_seconds,
                    "tokens_ahead": round(_ahead(tenants, tenant, batch)) if flow is not None else 0,
                    "expected_wait_seconds": self._placement.prospects.wait_seconds(
                        Ask(model, tenant=tenant.name, weight=tenant.weight, batch=batch), now
                    ),
                }
                for batch, flow in ((batch, flows.get((tenant.name, batch))) for batch in (False, True))
                if flow is not None or not batch
            ],
        }


def _ahead(tenants: Tenants, tenant: Tenant, batch: bool) -> float:
    """Tokens that it was served more than others by weight; below 0 while it holds out for its best engine."""
    return (tenant.shares[batch].end - tenants.clocks[batch].now) * tenant.weight


def _class(batch: bool) -> str:
    return "batch" if batch else "interactive"
