"""What operators see of the running gateway: gauges, the backends, the queue, and dry runs of routing decisions."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.backends.backend import Backend
from gateway.backends.concurrency_limit import LimitChange
from gateway.backends.fleet import Fleet
from gateway.config import Config
from gateway.errors import InvalidRequest
from gateway.feedback import CacheState
from gateway.front.http_request import HttpRequest, Route, find_route
from gateway.front.json_body import in_turns, parse_body
from gateway.front.read import RequestReader
from gateway.kv_events.endpoints import plan
from gateway.kv_events.feed import KvEvents
from gateway.observe.metrics import Labels, Metrics
from gateway.request import Demand, Kind
from gateway.routing.engine import Engine
from gateway.routing.policy import as_document
from gateway.scheduling.fair_share import Tenant, Tenants
from gateway.scheduling.leases import LeaseBroker
from gateway.scheduling.scheduler import Scheduler
from gateway.scheduling.wait_queue import Queue, TenantQueue
from gateway.tokenization.tokenization import Tokenization

_BACKEND: Labels = ("backend",)


@dataclass(frozen=True, slots=True)
class Overview:
    """Reads the owners of state; changes nothing."""

    config: Config
    fleet: Fleet
    scheduler: Scheduler
    lease_broker: LeaseBroker
    queue: Queue
    cache_state: CacheState
    kv_events: KvEvents
    tokenization: Tokenization
    reader: RequestReader
    clock: Callable[[], float]

    def add_gauges(self, metrics: Metrics) -> None:
        add = metrics.gauge
        add("gateway_backend_in_flight", "Sequences in flight on a backend.", _BACKEND,
            self._of_backends(lambda backend: backend.in_flight))  # fmt: skip
        add("gateway_backend_in_flight_limit", "Current limit of sequences in flight on a backend.", _BACKEND,
            self._of_backends(lambda backend: backend.limit(self.clock())))  # fmt: skip
        add("gateway_backend_kv_tokens_reserved", "KV cache tokens reserved for requests in flight.", _BACKEND,
            self._of_backends(lambda backend: backend.kv_tokens_reserved))  # fmt: skip
        add("gateway_backend_kv_tokens_limit", "Limit of reserved KV cache tokens on a backend.", _BACKEND,
            self._of_backends(self._kv_tokens_limit))  # fmt: skip
        add("gateway_backend_up", "Backend health: 1 = up, 0 = down, ejected or unknown.", _BACKEND,
            self._of_backends(lambda backend: float(backend.health.state == "up")))  # fmt: skip
        add("gateway_backend_prefix_trust", "Share of predicted hits used for routing; 1 while confirmed.",
            _BACKEND, self._of_backends(self._hit_accuracy))  # fmt: skip
        add("gateway_kv_events_followed", "KV event stream state: 1 = complete and current.", ("backend", "rank"),
            lambda: self._streams(lambda stream: float(self.cache_state.exact.live(stream["engine"]))))  # fmt: skip
        add("gateway_kv_events_blocks", "KV cache blocks on an engine, by its KV events.", ("backend", "rank"),
            lambda: self._streams(lambda stream: stream["resident_blocks"]))  # fmt: skip
        metrics.counter("gateway_kv_events_gaps_total", "Gaps in the sequence of KV events.", ("backend", "rank"),
                        lambda: self._streams(lambda stream: stream["gaps"]))  # fmt: skip
        metrics.counter("gateway_tokenizer_prompts_total", "Tokenization attempts by result.", ("result",),
                        lambda: [((name,), value) for name, value in self.tokenization.totals.items()])  # fmt: skip
        add("gateway_queued_requests", "Requests waiting in the queue, by model.", ("model",), self._queued)

    def _queued(self) -> list[tuple[Labels, float]]:
        """By model; `unknown` for models that no backend has listed yet, whose requests may be held."""
        counts: list[tuple[Labels, float]] = [((card.id,), self.queue.waiting(card.id)) for card in self.fleet.models()]
        unknown = len(self.queue) - sum(count for _, count in counts)
        return [*counts, (("unknown",), unknown)] if unknown else counts

    def _streams(self, read: Callable[[dict[str, Any]], float]) -> list[tuple[Labels, float]]:
        return [((each["backend"], str(each["rank"])), read(each)) for each in self.kv_events.status()]

    def _of_backends(self, read: Callable[[Backend], float]) -> Callable[[], Iterable[tuple[Labels, float]]]:
        return lambda: [((backend.name,), read(backend)) for backend in self.fleet.backends]

    def _kv_tokens_limit(self, backend: Backend) -> int:
        """0 where the size of the cache is not known, so that there is no limit."""
        return int(self.config.admission.kv_headroom * (backend.kv_cache_tokens or 0))

    def _hit_accuracy(self, backend: Backend) -> float:
        return min(self.cache_state.hit_accuracy.share(engine.index) for engine in backend.engines)

    def backends(self) -> list[dict[str, Any]]:
        now = self.clock()
        streams: dict[str, list[dict[str, Any]]] = {}
        for stream in self.kv_events.status():
            used = self.cache_state.exact.live(stream["engine"])
            streams.setdefault(stream["backend"], []).append(stream | {"used": used})
        return [
            self._backend(backend, now)
            | {"kv_events": streams.get(backend.name, []), "kv_events_problem": plan(backend).problem}
            for backend in self.fleet.backends
        ]

    def _backend(self, backend: Backend, now: float) -> dict[str, Any]:
        index = self.cache_state.index
        return {
            "name": backend.name,
            "url": backend.config.url,
            "state": backend.health.state,
            "probe_error": backend.probe_error,
            "version": backend.facts.version,
            "models": [card.id for card in backend.facts.models],
            "engines": len(backend.engines),
            "in_flight": backend.in_flight,
            "limit": backend.limit(now),
            "limit_upper": backend.cap,
            "limit_moved": _limit_change(backend.limiter.last_change, now),
            "kv_cache_tokens": backend.kv_cache_tokens,
            "kv_tokens_reserved": backend.kv_tokens_reserved,
            "kv_tokens_limit": self._kv_tokens_limit(backend) or None,
            "prefix_record_bytes": sum(index.used_bytes(engine.index) for engine in backend.engines),
            "prefix_trust": self._hit_accuracy(backend),
            "tokenizers": self.tokenization.verdicts(backend.name),
        }

    async def route(self, body: bytes, path: str) -> dict[str, Any]:
        """Where a request with this body would go now. Nothing is sent and nothing is remembered.

        `path` is the endpoint, or empty: then the body's fields decide. Raises a GatewayError where the request would.
        """
        incoming, route = await self._as_request(body, path)
        request = await in_turns(self.reader.read(incoming, route, "dry-run", self._only_model))
        demand = (await self.tokenization.complete(request)).demand
        verdicts = self.lease_broker.explain(demand)
        is_open = [verdict for verdict in verdicts if verdict.is_open]
        chosen = verdicts[0] if self.scheduler.waits_for_best or not is_open else is_open[0]
        return {
            "model": demand.model,
            "policy": self.config.routing.policy,
            "prompt_tokens": demand.prompt_tokens,
            "prefix_blocks": len(demand.keys),
            "chosen": chosen.name,
            "waits": not chosen.is_open or self.queue.waiting(demand.model) > 0,
            "queued_requests": self.queue.waiting(demand.model),
            "backends": as_document(verdicts),
            "other_policies": {"least_loaded": _least_loaded([verdict.engine for verdict in is_open])},
        }

    async def _as_request(self, body: bytes, path: str) -> tuple[HttpRequest, Route]:
        if not path:
            document = await in_turns(parse_body(body, self.config.server))
            path = "/v1/chat/completions" if "messages" in document else "/v1/completions"
        incoming = HttpRequest()
        incoming.take_body(body, keep_alive=False)
        route = find_route(b"POST", path.encode())
        if route.kind not in (Kind.GENERATE, Kind.POOL):
            raise InvalidRequest(
                f"Requests to {path} are not routed by their body, so a dry run is unsupported.", param="path"
            )
        return incoming, route

    def _only_model(self) -> str | None:
        models = self.fleet.models()
        return models[0].id if len(models) == 1 else None


def _least_loaded(open_engines: list[Engine]) -> str | None:
    """The open engine that `least_loaded` would choose; None if no engine is open."""
    least = min(open_engines, key=lambda engine: engine.load.in_flight / engine.slots, default=None)
    return None if least is None else least.name


def _limit_change(change: LimitChange | None, now: float) -> dict[str, Any] | None:
    if change is None:
        return None
    seconds = round(now - change.at_seconds, 1)
    return {"reason": change.reason.value, "before": change.before, "after": change.after, "seconds_ago": seconds}


_MOST_LABELS = 100  # tenant names in metrics; those of keys first
_MOST_SHOWN = 100  # tenants of a model in the answer
_OTHER = "other"


class QueueView:
    """Reads the queue; changes nothing. `names`: of tenants that are known from the start."""

    def __init__(
        self, queue: Queue, scheduler: Scheduler, models: Callable[[], Sequence[str]], names: Iterable[str],
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._queue = queue
        self._scheduler = scheduler
        self._models = models
        self._labels = set(list(names)[:_MOST_LABELS])
        self._clock = clock

    def add_gauges(self, metrics: Metrics) -> None:
        metrics.gauge(
            "gateway_queued_requests_by_tenant",
            "Requests waiting in the queue, by tenant; other = tenants beyond the first 100, none = no tenant name.",
            ("model", "tenant", "class"),
            self._counts,
        )

    async def document(self) -> dict[str, Any]:
        """The queue of each model, live. Yields between tenants, since a long queue takes long to read."""
        now = self._clock()
        shown = dict.fromkeys((*self._models(), *self._queue.models()))
        return {"waiting": len(self._queue), "models": [await self._model(model, now) for model in shown]}

    def _counts(self) -> list[tuple[Labels, float]]:
        counts: dict[Labels, float] = {}
        known = set(self._models())
        for model in self._queue.models():
            queue = self._queue.of_model(model)
            for flow in queue.flows if queue is not None else ():
                labels = (model if model in known else "unknown", self._label(flow.tenant.name), _class(flow.batch))
                counts[labels] = counts.get(labels, 0.0) + len(flow.tickets)
        return list(counts.items())

    def _label(self, tenant: str) -> str:
        """The tenant's name, or `other` after the first 100."""
        if tenant not in self._labels:
            if len(self._labels) >= _MOST_LABELS:
                return _OTHER
            self._labels.add(tenant)
        return tenant

    async def _model(self, model: str, now: float) -> dict[str, Any]:
        queue, tenants = self._queue.of_model(model), self._queue.tenants(model)
        flows = {(flow.tenant.name, flow.batch): flow for flow in queue.flows} if queue is not None else {}
        shown = sorted(tenants, key=lambda one: (one.waiting, one.in_flight, one.seen_seconds), reverse=True)
        between = tenants.rate.between_seconds(now)
        rows = []
        for tenant in shown[:_MOST_SHOWN]:
            rows.append(self._tenant(model, tenants, tenant, flows, now))
            await asyncio.sleep(0)
        return {
            "model": model,
            "waiting": tenants.waiting,
            "in_flight": tenants.in_flight,
            "line_seconds": now - queue.began_seconds if queue is not None else 0.0,
            "drain_requests_per_second": 1 / between if between else None,
            "tenants": rows,
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
                    "expected_wait_seconds": self._queue.wait_seconds(
                        Demand(model, tenant=tenant.name, weight=tenant.weight, batch=batch), now
                    ),
                }
                for batch, flow in ((batch, flows.get((tenant.name, batch))) for batch in (False, True))
                if flow is not None or not batch
            ],
        }


def _ahead(tenants: Tenants, tenant: Tenant, batch: bool) -> float:
    """Tokens that it was served more than others by weight; below 0 while it waits for its best engine."""
    return (tenant.shares[batch].end - tenants.clocks[batch].now) * tenant.weight


def _class(batch: bool) -> str:
    return "batch" if batch else "interactive"
