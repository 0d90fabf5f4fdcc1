"""The operators' interface: the admin port, the metrics port and the dashboard; and the state kept by restarts."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from aiohttp import web

from gateway.config import Config
from gateway.core.core import Core
from gateway.core.front.handler import Handler
from gateway.core.front.read import RequestReader
from gateway.core.front.server import Server
from gateway.core.listeners import Listeners
from gateway.core.observe.log import EventLog, RecentRequests
from gateway.core.resources import process_use
from gateway.feature import Feature
from gateway.features.exact.feature import ExactFeature
from gateway.features.handover.snapshot import Knowledge
from gateway.features.keys.feature import KeysFeature
from gateway.features.operate.admin import AdminPages, MetricsPages, Overview, QueueView, state_reason
from gateway.features.operate.admin_http import OperatorPort
from gateway.features.operate.control import Control
from gateway.features.operate.gauges import add_gauges
from gateway.features.operate.ports import OperatorPorts
from gateway.features.operate.reload import Reloads
from gateway.features.page.broadcast import Broadcast
from gateway.features.page.decisions import Decisions
from gateway.features.page.gateway_view import own_gauges
from gateway.features.page.live_view import LiveView, Sources
from gateway.features.page.routes import STATIC, DashboardPages
from gateway.features.page.timeline import Timeline
from gateway.features.responses.feature import ResponsesFeature

_LOOK_SECONDS = 5.0


class Operators(OperatorPorts):
    """Reads the owners of state; carries out operators' changes."""

    def __init__(
        self,
        core: Core,
        features: Mapping[str, Feature],
        *,
        server: Server,
        handler: Handler,
        reloads: Reloads,
        reader: RequestReader,
        log: EventLog | None,
    ) -> None:
        self._core, self._features, self._server, self._log = core, features, server, log
        config, fleet, clock, queue, cache_state = core.config, core.fleet, core.clock, core.queue, core.cache_state
        exact, keys, responses = (features[name] for name in ("exact", "keys", "responses"))
        assert isinstance(exact, ExactFeature)
        assert isinstance(keys, KeysFeature)
        assert isinstance(responses, ResponsesFeature)
        self.overview = Overview(
            config,
            fleet=fleet,
            membership=core.membership,
            scheduler=core.scheduler,
            queue=queue,
            cache_state=cache_state,
            exact=exact.mode,
            reader=reader,
            clock=clock,
        )
        self.queue_view = QueueView(
            queue, core.lower_queue_counts, lambda: [it.id for it in fleet.models()], names=(), clock=clock
        )
        core.on_keys.append(self._know_tenants)
        self._know_tenants()
        self.control = Control(core.membership, self.overview.backend, reloads)
        self._admin_pages = AdminPages(self.overview.document, self.overview.route, self.queue_view.document)
        self._metrics_pages = MetricsPages(core.metrics.snapshot, handler.check_ready)
        self.admin_port: OperatorPort = OperatorPort("server.admin", config.server.admin, STATIC.keys())
        self.metrics_port: OperatorPort = OperatorPort("server.metrics", config.server.metrics)
        self.knowledge = Knowledge(
            fleet=fleet,
            membership=core.membership,
            sources=lambda: [name for feature in features.values() for name in feature.origins()],
            cache_state=cache_state,
            calibrations=core.calibrations,
            queue=queue,
            limits=keys.limits,
            stored=responses.stored,
            usage=keys.usage,
            secret=lambda: core.random_secret,
            unix_seconds=core.unix_seconds,
        )
        self._build_dashboard(reloads)
        self.overview.add_gauges(core.metrics)
        self.queue_view.add_gauges(core.metrics)
        add_gauges(
            core.metrics,
            fleet,
            calibrations=core.calibrations,
            memory=core.memory,
            access_log=core.access_log,
            log=log,
            supervisor=core.supervisor,
        )

    def _build_dashboard(self, reloads: Reloads) -> None:
        core, fleet, clock = self._core, self._core.fleet, self._core.clock
        self._started_seconds = clock()
        self.recent = RecentRequests(core.offset_seconds)
        if core.config.server.admin:
            core.finished.consume_all(self.recent.add)
        self.timeline = Timeline(lambda: fleet.backends, lambda backend: state_reason(backend, clock()), clock)
        fleet.on_change.append(self.timeline.look)
        fleet.on_limit.append(self.timeline.limit_moved)
        fleet.on_restart.append(self.timeline.restarted)
        self._decisions = Decisions(core.dispatcher, core.lease_broker.explain, clock)
        self.dashboard_sources = Sources(
            fleet=fleet,
            queue=core.queue,
            offline_counts=core.lower_queue_counts,
            metrics=core.metrics,
            recent=self.recent,
            timeline=self.timeline,
            settle=core.finished.settle,
            describer=self.overview.describer,
            trust=core.cache_state.hit_accuracy.share,
            explain=core.lease_broker.explain,
            config=lambda: core.config,
            gauges=self._own_gauges,
            use=process_use,
            clock=clock,
            offset_seconds=core.offset_seconds,
        )
        self.dashboard: Broadcast = Broadcast(
            LiveView(self.dashboard_sources), self._watched, core.supervisor, clock=clock
        )
        config, port = lambda: core.config, lambda: self._server.port
        self._dashboard_pages = DashboardPages(
            self.dashboard, self._decisions, config, port=port, preview=reloads.preview
        )

    def _watched(self, is_watched: bool) -> None:
        """Record placement decisions while the dashboard has watchers."""
        core, decisions = self._core, self._decisions
        if is_watched:
            core.watch(decisions, decisions.bound)
        else:
            core.watch(None, None)
            decisions.forget()

    def _own_gauges(self) -> dict[str, Any]:
        core = self._core
        return own_gauges(
            core.clock() - self._started_seconds,
            self._server,
            retries=core.retry_budget,
            memory=core.memory,
            supervisor=core.supervisor,
            logs=(core.access_log, self._log),
            broadcast=self.dashboard,
        )

    def _know_tenants(self, *_: object) -> None:
        self.queue_view.update([key.name for key in self._core.keys])

    def apply(self, config: Config, reader: RequestReader) -> None:
        self.overview.apply(config, reader)
        self.admin_port.apply(config.server.admin)
        self.metrics_port.apply(config.server.metrics)

    def reloaded(self) -> None:
        self.timeline.reloaded()

    @asynccontextmanager
    async def listening(self, listeners: Listeners, routes: Sequence[web.RouteDef] = ()) -> AsyncIterator[int | None]:
        async with AsyncExitStack() as stack:
            stack.enter_context(self._core.supervisor.looking("timeline", self.timeline.look, _LOOK_SECONDS))
            enter = stack.enter_async_context
            await enter(self.metrics_port.listening(self._metrics_pages.routes(), listeners.metrics))
            admin = await enter(self.admin_port.listening([*self.admin_routes(), *routes], listeners.admin))
            stack.callback(self.dashboard.stop)
            yield admin

    def admin_routes(self) -> list[web.RouteDef]:
        """The routes of the admin port, except for a restart of the process."""
        own = self._metrics_pages, self._admin_pages, self.control, self._dashboard_pages
        more = [route for feature in self._features.values() for route in feature.admin_routes()]
        return [*(route for pages in own for route in pages.routes()), *more]
