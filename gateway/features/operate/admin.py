"""The ports for operators: metrics, the backends, the queue and dry runs of routing."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from aiohttp import web
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from gateway.config import Config
from gateway.core.backends.backend import Backend
from gateway.core.backends.concurrency_limit import LimitChange
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.health import ProbeResult
from gateway.core.backends.membership import Membership
from gateway.core.errors import InvalidRequest
from gateway.core.feedback import CacheState
from gateway.core.front.http_request import HttpRequest
from gateway.core.front.json_body import JsonLimits, parse_body
from gateway.core.front.read import RequestReader
from gateway.core.front.routes import find_route
from gateway.core.observe.metrics import Breathe, Labels, Metrics
from gateway.core.request import Demand, Kind
from gateway.core.scheduling.fair_share import Tenant, Tenants
from gateway.core.scheduling.scheduler import Scheduler
from gateway.core.scheduling.wait_queue import Queue, TenantQueue
from gateway.core.threads import Threads, breather
from gateway.core.turns import in_turns
from gateway.features.exact.endpoints import plan
from gateway.features.exact.mode import ExactMode
from gateway.features.operate.admin_http import as_json, body_of
from gateway.features.page.decisions import as_document

_MOST_LABELS = 100  # tenant names in metrics; tenants of keys come first
_STATES = ("up", "down", "ejected", "unknown", "draining")
_MOST_SHOWN = 100  # tenants of a model in the answer


def _state(backend: Backend) -> str:
    return "draining" if backend.draining else backend.health.state


def _ejections(backend: Backend) -> float:
    return float(backend.health.ejections)


def _relative_cost(backend: Backend) -> float:
    return max(engine.relative_cost for engine in backend.engines)


@dataclass(slots=True)
class Overview:
    """Reads the owners of state; changes nothing."""

    config: Config
    _: KW_ONLY
    fleet: Fleet
    membership: Membership
    scheduler: Scheduler
    queue: Queue
    cache_state: CacheState
    exact: ExactMode
    reader: RequestReader
    clock: Callable[[], float]

    def apply(self, config: Config, reader: RequestReader) -> None:
        """Take over a configuration for dry runs."""
        self.config, self.reader = config, reader

    def add_gauges(self, metrics: Metrics) -> None:
        in_flight, reserved = attrgetter("in_flight"), attrgetter("kv_tokens_reserved")
        by_backend: tuple[tuple[str, str, Callable[[Backend], float]], ...] = (
            ("in_flight", "Sequences in flight on a backend.", in_flight),
            ("in_flight_limit", "Current limit of sequences in flight on a backend.", self._limit),
            ("kv_tokens_reserved", "KV cache tokens reserved for requests in flight.", reserved),
            ("kv_tokens_limit", "Limit of reserved KV cache tokens on a backend.", self._kv_tokens_limit),
            ("up", "Backend health: 1 = up, 0 = down, ejected or unknown.", lambda it: float(it.health.state == "up")),
            ("prefix_trust", "Share of predicted hits used for routing; 1 while confirmed.", self._hit_accuracy),
            ("relative_cost", "Relative time for the same work, as learned: 2 = half as fast.", _relative_cost),
        )
        for name, documentation, read in by_backend:
            metrics.gauge(f"gateway_backend_{name}", documentation, ("backend",), partial(self._of_backends, read))
        for name, documentation, attribute in (
            ("running", "Running requests that a backend last reported.", "running"),
            ("waiting", "Waiting requests that a backend last reported.", "waiting"),
            ("kv_usage", "KV cache usage that a backend last reported, of its fullest engine: 0 to 1.", "kv_usage"),
        ):
            reports = partial(self._of_reports, attribute)
            metrics.gauge(f"gateway_backend_reported_{name}", documentation, ("backend",), reports)
        by_rank, gauge, counter = ("backend", "rank"), metrics.gauge, metrics.counter
        text = "1 while the last probe failed: refused, timeout, dns, tls, broken (connection), unwell (answered 5xx)."
        gauge("gateway_backend_unreachable", text, ("backend", "reason"), self._unreachable)
        text = "1 for the state of a backend, else 0: up, down, ejected, unknown (not probed yet), draining."
        gauge("gateway_backend_state", text, ("backend", "state"), self._states)
        text, ejections = "Ejections of a backend after failed requests.", partial(self._of_backends, _ejections)
        counter("gateway_backend_ejections_total", text, ("backend",), ejections)
        for add, name, documentation, key in (
            (gauge, "gateway_kv_events_followed", "KV event stream state: 1 = complete and current.", "used"),
            (gauge, "gateway_kv_events_blocks", "KV cache blocks on an engine, by its KV events.", "resident_blocks"),
            (counter, "gateway_kv_events_gaps_total", "Gaps in the sequence of KV events.", "gaps"),
        ):
            add(name, documentation, by_rank, partial(self._of_streams, key))
        counter("gateway_tokenizer_prompts_total", "Tokenization attempts by result.", ("result",), self._tokenized)
        gauge("gateway_queued_requests", "Requests waiting in the queue, by model.", ("model",), self._queued)

    def _queued(self) -> list[tuple[Labels, float]]:
        """By model; `unknown` for models that no backend has listed yet, whose requests may be held."""
        counts: list[tuple[Labels, float]] = [((card.id,), self.queue.waiting(card.id)) for card in self.fleet.models()]
        unknown = len(self.queue) - sum(count for _, count in counts)
        return [*counts, (("unknown",), unknown)] if unknown else counts

    def _tokenized(self) -> list[tuple[Labels, float]]:
        return [((result,), count) for result, count in self.exact.tokenized_prompts().items()]

    def _of_streams(self, key: str) -> list[tuple[Labels, float]]:
        return [((each["backend"], str(each["rank"])), float(each[key])) for each in self.exact.streams()]

    def _of_backends(self, read: Callable[[Backend], float]) -> list[tuple[Labels, float]]:
        # Another server may have taken the name of a leaving backend.
        return list({(each.name,): read(each) for each in (*self.fleet.leaving, *self.fleet.backends)}.items())

    def _unreachable(self) -> list[tuple[Labels, float]]:
        results = [(backend.name, backend.health.probe_result) for backend in self.fleet.backends]
        return [((name, result.value), 1.0) for name, result in results if result not in (None, ProbeResult.OK)]

    def _states(self) -> list[tuple[Labels, float]]:
        states = {each.name: _state(each) for each in (*self.fleet.leaving, *self.fleet.backends)}
        return [((name, each), float(each == state)) for name, state in states.items() for each in _STATES]

    def _of_reports(self, attribute: str) -> list[tuple[Labels, float]]:
        reports = [(backend.name, backend.telemetry) for backend in self.fleet.backends]
        return [((name,), float(getattr(report, attribute))) for name, report in reports if report is not None]

    def _limit(self, backend: Backend) -> int:
        return backend.limit(self.clock())

    def _kv_tokens_limit(self, backend: Backend) -> int:
        """0 where the size of the cache is not known, so that there is no limit."""
        return int(self.config.admission.kv_headroom * (backend.kv_cache_tokens or 0))

    def _hit_accuracy(self, backend: Backend) -> float:
        return min(self.cache_state.hit_accuracy.share(engine.index) for engine in backend.engines)

    def document(self) -> dict[str, Any]:
        """All backends, and the names of backends that were removed by hand."""
        return {"backends": self.backends(), "removed_by_hand": self.membership.removed}

    def backends(self) -> list[dict[str, Any]]:
        streams = self.exact.streams()
        return [self.backend(each, streams) for each in (*self.fleet.backends, *self.fleet.leaving)]

    def describer(self) -> Callable[[Backend], dict[str, Any]]:
        """Makes the documents of several backends, of one reading of the KV events' streams."""
        streams = self.exact.streams()
        return lambda backend: self.backend(backend, streams)

    def backend(self, backend: Backend, streams: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """The document of one backend. `streams`: of KV events, if they were read already."""
        index, streams, since = (
            self.cache_state.index,
            self.exact.streams() if streams is None else streams,
            backend.state_since_seconds,
        )
        telemetry = backend.telemetry
        return {
            "name": backend.name,
            "url": backend.config.url,
            "from": self.membership.origin(backend.name),
            "zone": self.membership.zone(backend.name) or None,
            "state": backend.health.state,
            "state_reason": state_reason(backend, self.clock()),
            "state_seconds": None if since is None else round(self.clock() - since, 1),
            "draining": backend.draining or None,
            "probe_error": backend.health.probe_error,
            "reported": telemetry
            and {
                "running": telemetry.running,
                "waiting": telemetry.waiting,
                "kv_usage": telemetry.kv_usage,
                "sleep_state": telemetry.sleep_state,
                "seconds_ago": round(self.clock() - telemetry.at_seconds, 1),
            },
            "version": backend.facts.version,
            "models": [card.id for card in backend.facts.models],
            "adapters_loaded": _adapters(backend),
            "engines": len(backend.engines),
            "in_flight": backend.in_flight,
            "limit": self._limit(backend),
            "limit_upper": backend.cap,
            "limit_moved": _limit_change(backend.limiter.last_change, self.clock()),
            "kv_cache_tokens": backend.kv_cache_tokens,
            "kv_tokens_reserved": backend.kv_tokens_reserved,
            "kv_tokens_limit": self._kv_tokens_limit(backend) or None,
            "prefix_record_bytes": sum(index.used_bytes(engine.index) for engine in backend.engines),
            "prefix_trust": self._hit_accuracy(backend),
            "relative_cost": round(_relative_cost(backend), 2),
            "tokenizers": self.exact.verdicts(backend.name),
            "kv_events": [each for each in streams if each["backend"] == backend.name],
            "kv_events_problem": plan(backend).problem if backend.health.state in ("up", "ejected") else None,
        }

    async def route(self, body: bytes, path: str) -> dict[str, Any]:
        """A dry run of the placement of a request with this body: nothing is sent or recorded.

        `path` is the endpoint, or empty: then the body's fields decide. Raises a GatewayError where the request would.
        """
        if not path:
            document = await in_turns(parse_body(body, JsonLimits(self.config.server)))
            path = "/v1/chat/completions" if "messages" in document else "/v1/completions"
        incoming = HttpRequest()
        incoming.take_body(body, keep_alive=False)
        route = find_route(b"POST", path.encode())
        if route.kind not in (Kind.GENERATE, Kind.POOL):
            why = f"Requests to {path} are not routed by their body, so a dry run is unsupported."
            raise InvalidRequest(why, param="path")
        request = await in_turns(self.reader.read_in_steps(incoming, route, "dry-run", self.fleet.only_model))
        demand = (await self.exact.prompts.complete(request)).demand
        verdicts = self.scheduler.explain(demand, self.clock())
        is_open = [verdict for verdict in verdicts if verdict.is_open]
        chosen = verdicts[0] if self.scheduler.waits_for_best or not is_open else is_open[0]
        engines = [verdict.engine for verdict in is_open]
        least_loaded = min(engines, key=lambda engine: engine.load.in_flight / max(1, engine.slots), default=None)
        return {
            "model": demand.model,
            "policy": self.config.routing.policy,
            "prompt_tokens": demand.prompt_tokens,
            "prefix_blocks": len(demand.keys),
            "chosen": chosen.name,
            "waits": not chosen.is_open or self.queue.waiting(demand.model) > 0,
            "queued_requests": self.queue.waiting(demand.model),
            "backends": as_document(verdicts),
            "other_policies": {"least_loaded": least_loaded and least_loaded.name},
        }


def _adapters(backend: Backend) -> list[str] | None:
    """The LoRA adapters that are thought to be on its GPUs; None if it lists none."""
    slots = [engine.adapters for engine in backend.engines if engine.adapters is not None]
    return sorted({name for each in slots for name in each.loaded}) if slots else None


def state_reason(backend: Backend, now: float) -> str:
    """Why a backend is in its state, for operators."""
    health = backend.health
    if backend.draining:
        return f"drains, {backend.in_flight} sequences in flight ({backend.draining})"
    if health.state == "ejected":
        return f"requests failed; back in {max(0.0, health.ejected_until - now):.1f} s"
    if health.state != "up":
        return health.probe_error or ("not probed yet" if health.state == "unknown" else "probes fail")
    if health.gone or health.late:
        return "refuses connections" if health.gone else "the last probe timed out; others are preferred"
    if backend.sleep_state:
        return f"asleep ({backend.sleep_state}){', woken for requests' if backend.can_wake else ''}"
    if backend.slow_since_seconds is not None:
        return f"starts slowly: {backend.limit(now)} of {backend.cap} slots"
    return "answers probes"


def _limit_change(change: LimitChange | None, now: float) -> dict[str, Any] | None:
    if change is None:
        return None
    seconds = round(now - change.at_seconds, 1)
    return {"reason": change.reason.value, "before": change.before, "after": change.after, "seconds_ago": seconds}


class QueueView:
    """Reads the queue and counts of offline lines; changes nothing. `names`: of tenants known from the start.

    `offline_counts`: lines that wait and sequences in flight, of each model that has any.
    """

    def __init__(
        self,
        queue: Queue,
        offline_counts: Callable[[], Mapping[str, tuple[int, int]]],
        models: Callable[[], Sequence[str]],
        *,
        names: Iterable[str],
        clock: Callable[[], float],
    ) -> None:
        self._queue = queue
        self._offline_counts = offline_counts
        self._models = models
        self._labels: set[str] = set()
        self._clock = clock
        self.update(names)

    def update(self, names: Iterable[str]) -> None:
        """Take over the names of other tenants; labels that exist stay."""
        for name in names:
            self._label(name)

    def add_gauges(self, metrics: Metrics) -> None:
        metrics.gauge(
            "gateway_queued_requests_by_tenant",
            "Requests waiting in the queue, by tenant; other = tenants beyond the first 100, none = no tenant name.",
            ("model", "tenant", "class"),
            self._counts,
        )
        text = "Lines of batches that wait for idle capacity, or run on it (sequences), by state."
        metrics.gauge("gateway_offline_lines", text, ("model", "state"), self._offline_lines)

    async def document(self) -> dict[str, Any]:
        """The queue of each model, live. Yields between tenants, since a long queue takes long to read."""
        now = self._clock()
        offline = self._offline_counts()
        shown = dict.fromkeys((*self._models(), *self._queue.models(), *offline))
        models = [await self._model(model, offline.get(model, (0, 0)), now) for model in shown]
        return {"waiting": len(self._queue), "models": models}

    def _offline_lines(self) -> list[tuple[Labels, float]]:
        known = set(self._models())
        return [
            ((model, state), float(count))
            for model, counts in self._offline_counts().items()
            for state, count in zip(("waiting", "running"), counts, strict=True)
            if model in known
        ]

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
                return "other"
            self._labels.add(tenant)
        return tenant

    async def _model(self, model: str, offline: tuple[int, int], now: float) -> dict[str, Any]:
        queue, tenants = self._queue.of_model(model), self._queue.tenants.of(model)
        flows = {(flow.tenant.name, flow.batch): flow for flow in queue.flows} if queue is not None else {}
        shown = sorted(tenants, key=lambda one: (one.waiting, one.in_flight, one.seen_seconds), reverse=True)
        between = tenants.rate.between_seconds(now)
        rows = []
        for tenant in shown[:_MOST_SHOWN]:
            rows.append(self._tenant(model, tenants, tenant, flows=flows, now=now))
            await asyncio.sleep(0)
        return {
            "model": model,
            "waiting": tenants.waiting,
            "in_flight": tenants.in_flight,
            "line_seconds": now - queue.began_seconds if queue is not None else 0.0,
            "drain_requests_per_second": 1 / between if between else None,
            "offline": {"waiting": offline[0], "in_flight": offline[1]},
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


class MetricsPages:
    """The metrics, and whether the process lives and is ready. `check_ready` raises a GatewayError if it is not.

    Rendering metrics may take seconds: it is done in a thread, one at a time, of a `snapshot` taken on the event loop.
    """

    def __init__(self, snapshot: Callable[[Breathe], Collector], check_ready: Callable[[], None]) -> None:
        self._snapshot = snapshot
        self._check_ready = check_ready
        self._rendering, self._threads = asyncio.Lock(), Threads("metrics")

    def routes(self) -> list[web.RouteDef]:
        """The routes of the metrics port, also served by the admin port."""
        return [
            web.get("/metrics", self._metrics),
            web.get("/livez", self._livez),
            web.get("/readyz", self._readyz),
            web.options("/livez", self._livez),
            web.options("/readyz", self._readyz),
        ]

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        async with self._rendering:
            body = await self._threads.run(encode, self._snapshot(breather()))
        return web.Response(body=body, headers={"content-type": content_type})

    async def _livez(self, _: web.Request) -> web.Response:
        return as_json({"status": "alive"})

    async def _readyz(self, _: web.Request) -> web.Response:
        self._check_ready()
        return as_json({"status": "ready"})


@dataclass
class AdminPages:
    """Serves these documents. `route` makes a dry run of a body and its endpoint; it may raise a GatewayError."""

    backends: Callable[[], dict[str, Any]]
    route: Callable[[bytes, str], Awaitable[dict[str, Any]]]
    queue: Callable[[], Awaitable[dict[str, Any]]]

    def routes(self) -> list[web.RouteDef]:
        """The routes of these documents on the admin port."""
        return [
            web.get("/admin/backends", self._backends),
            web.get("/admin/queue", self._queue),
            web.post("/admin/route", self._route),
        ]

    async def _backends(self, _: web.Request) -> web.Response:
        return as_json(self.backends())

    async def _queue(self, _: web.Request) -> web.Response:
        return as_json(await self.queue())

    async def _route(self, request: web.Request) -> web.Response:
        return as_json(await self.route(await body_of(request), request.query.get("path", "")))
