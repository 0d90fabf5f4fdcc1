"""The composition root: builds everything from the configuration, and runs it."""

import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, BinaryIO

import structlog
from aiohttp import web

from gateway import __version__
from gateway.admin import AdminPages, MetricsPages, Overview, QueueView, breather, state_reason
from gateway.admin_http import OperatorPort
from gateway.backends.backend import Backend
from gateway.backends.fleet import Fleet, Wanted
from gateway.backends.membership import Membership
from gateway.backends.probe import BackendWatches
from gateway.background import BackgroundResponses
from gateway.config import Config, RoutingConfig
from gateway.control import Control
from gateway.coordination.configured import ReplicaParts, configured_coordinators
from gateway.discovery.follow import Discovery
from gateway.dispatch import Dispatcher, RetryBudget
from gateway.embeddings.batcher import Batcher
from gateway.embeddings.cache import configured_cache
from gateway.embeddings.kinds import Coalescer, RerankSplitter
from gateway.embeddings.metrics import EmbeddingMetrics
from gateway.feedback import CacheState, LimitChanges
from gateway.front.handler import Handler, request_ids
from gateway.front.read import RequestReader
from gateway.front.server import Server
from gateway.front.stored_responses import StoredResponses
from gateway.gauges import add_gauges
from gateway.handover.snapshot import Knowledge
from gateway.insights.families import Breathe
from gateway.insights.report import make_report
from gateway.insights.samples import PrefixReport
from gateway.keys.client_keys import ClientKeys
from gateway.keys.ledger import KeyLedger
from gateway.keys.usage import KeyUsage
from gateway.keys.usage_page import UsagePage
from gateway.kv_events.endpoints import plan
from gateway.kv_events.feed import KvEvents
from gateway.listeners import NOT_BOUND, Listeners
from gateway.models.adapter_loader import AdapterLoader
from gateway.models.fallback import Fallbacks
from gateway.models.settings import models_of
from gateway.models.sleep import Sleeper
from gateway.observe.access_log import AccessLog, LineForm, PrefixHashes
from gateway.observe.log import EventLog, unix_seconds
from gateway.observe.metrics import Metrics
from gateway.observe.record import RecordBatcher
from gateway.page.broadcast import Broadcast
from gateway.page.decisions import Decisions
from gateway.page.gateway_view import own_gauges
from gateway.page.live_view import LiveView, Sources
from gateway.page.recent import RecentRequests
from gateway.page.routes import STATIC, DashboardPages
from gateway.page.timeline import Timeline
from gateway.realtime.sessions import RealtimeSessions
from gateway.realtime.tunnel import Tunnels
from gateway.relay.relay import Relay
from gateway.reload import Reloads
from gateway.resources import MemoryBudget, process_use
from gateway.routing.announced_record import AnnouncedIndex
from gateway.routing.engine import CostModel
from gateway.routing.estimates import Calibrations
from gateway.routing.policy import LeastLoadedPolicy, NotedPolicy, Policy, RoundRobinPolicy
from gateway.routing.prefix_policy import Affinity, PrefixPolicy
from gateway.scheduling.leases import LeaseBroker
from gateway.scheduling.scheduler import Scheduler, SchedulerSettings
from gateway.scheduling.wait_queue import Queue
from gateway.supervisor import Supervisor
from gateway.tokenization.tokenization import Tokenization
from gateway.tracing.tracing import Tracing
from gateway.turns import Steps, at_once
from gateway.uploads.audio import Uploads

if TYPE_CHECKING:
    from gateway.batches.service import Batches
    from gateway.coordination.coordinator import Coordinator

_SIZES_SECONDS = 5.0  # between looks at sizes


class Gateway:
    """Everything, put together; `running` runs it."""

    _is_watched = False  # on the dashboard
    coordinators: "tuple[Coordinator, ...]" = ()  # one, if this gateway is not alone

    def __init__(
        self,
        config: Config,
        log_out: BinaryIO | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        log: EventLog | None = None,
        random: Random | None = None,
        load: Callable[[], Config] | None = None,
        secret: bytes | None = None,
        unix_seconds: Callable[[], float] = unix_seconds,
    ) -> None:
        """`secret`: of cache salts, from the process before this one."""
        self._load = load or (lambda: config)
        admission = config.admission
        self._random_secret = secret or secrets.token_bytes(32)
        random = self.random = random or Random()  # seeded by the system; not for secrets
        self.config, self.clock, self.log, self._unix_seconds = config, clock, log, unix_seconds
        supervisor = self.supervisor = Supervisor(clock)
        self.metrics = Metrics()
        self.memory = MemoryBudget(config.server.memory_budget_bytes)

        fleet = self.fleet = Fleet(
            config.backends, config.health, clock=clock, random=random, admission=admission, supervisor=supervisor
        )
        fleet.expect(config.named_models)
        self.watches = BackendWatches(fleet, config.health, clock, random=random, supervisor=supervisor)
        self.membership = Membership(fleet)
        self.discovery = Discovery(config.discovery, self.membership, supervisor, random=random)
        index = AnnouncedIndex() if config.coordination.url else None  # of this gateway and others
        cache_state = self.cache_state = CacheState(config.routing, fleet, clock, index=index)
        self.kv_events = KvEvents(cache_state, cache_state.engine_number, clock, supervisor=supervisor)
        self.tokenization = Tokenization(
            config.models, fleet, exact=cache_state.exact, clock=clock, supervisor=supervisor
        )

        queue = self.queue = Queue(admission.max_queued_requests, admission.max_queued_bytes)
        self.sleeper = Sleeper(fleet, queue.waiting, clock, supervisor=supervisor)
        self.adapter_loader = AdapterLoader(fleet, queue.waiting, clock, supervisor=supervisor)
        self.adapter_loader.follow(config.models.adapters)
        calibrations = self.calibrations = Calibrations(_cost_model(config.routing), fleet.family)
        self._policies: dict[str, Policy] = {
            "prefix": PrefixPolicy(cache_state.hit_predictor, cache_state.estimates, Affinity()),
            "least_loaded": LeastLoadedPolicy(),
            "round_robin": RoundRobinPolicy(),
        }
        policy, settings = self._policies[config.routing.policy], _scheduler_settings(config)
        scheduler = self.scheduler = Scheduler(
            fleet.candidates,
            policy,
            queue=queue,
            lengths=cache_state.output_lengths,
            calibrations=calibrations,
            settings=settings,
        )
        self.lease_broker = LeaseBroker(
            scheduler, queue, admission.max_wait_seconds, clock=clock, keep_alive_seconds=admission.comment_seconds
        )
        self.relay = Relay(
            fleet,
            config.upstream,
            clock=clock,
            memory=self.memory,
            comment_seconds=admission.comment_seconds,
            supervisor=supervisor,
        )

        self._build_records(log_out)
        self._build_front()
        self._build_pages()
        self._build_dashboard()
        self._listen_to_fleet()
        self._add_gauges()

    def _build_records(self, log_out: BinaryIO | None) -> None:
        """What counts, logs and learns from finished requests."""
        config, clock, cache_state, report = self.config, self.clock, self.cache_state, self.config.prefix_report
        self.access_log: AccessLog | None = None
        if log_out is not None:
            self.access_log = AccessLog(log_out, clock, self._unix_seconds)
            self._follow_access_log(config)
        self.prefix_report = PrefixReport(clock(), self.random, holders=cache_state.holders)
        self.prefix_report.follow(enabled=report.enabled, show_text=report.show_text)
        limit_changes = LimitChanges(self.fleet, self.lease_broker.scan_soon, self.metrics.limit_moves, clock=clock)
        self.tracing = Tracing(config.tracing, __version__, clock, wall_clock=self._unix_seconds, url_of=self._url_of)
        self.usage = KeyUsage(self._unix_seconds)
        self.recent = RecentRequests(self._offset_seconds)
        batch_consumers = [
            self.metrics.finished,
            self.usage.finished,
            *([self.access_log.add] if self.access_log else []),
            *([self.recent.add] if config.server.admin else []),
            self.tracing.finished,
        ]
        self.finished = RecordBatcher(
            self.supervisor,
            cache_state.learn,
            limit_changes.finished,
            self.prefix_report.finished,
            batch_consumers=batch_consumers,
        )
        self.metrics.before_collecting = self.finished.settle
        self.ledger = KeyLedger(
            cache_state.estimates,
            clock,
            self._unix_seconds,
            finished=self.finished.add,
            counted=(self.usage.counted, self.metrics.counted),
        )

    def _offset_seconds(self) -> float:
        return self._unix_seconds() - self.clock()

    def _policy(self, config: Config) -> Policy:
        """What is configured; its choices are noted while somebody watches."""
        policy = self._policies[config.routing.policy]
        return NotedPolicy(policy, self._decisions.bound) if self._is_watched else policy

    def _url_of(self, name: str) -> str:
        backend = self.fleet.by_name.get(name)
        return "" if backend is None else backend.config.url

    def _follow_secret(self, secret: bytes) -> None:
        """Take over the secret that all gateways of the fleet have in common."""
        self._random_secret = secret
        self.follow(self.config)

    def _secret(self, config: Config) -> bytes:
        return config.auth.cache_salt_secret.encode() or self._random_secret

    def _follow_access_log(self, config: Config) -> None:
        if self.access_log is not None:
            hashes = PrefixHashes(self._secret(config)) if config.server.access_log_prefixes else None
            form = LineForm(config.server.access_log_fields, hashes)
            self.access_log.follow(form, enabled=config.server.access_log, style=config.log.format)

    def _new_reader(self, config: Config, *, is_dry: bool = False) -> RequestReader:
        """A reader of requests; what one for dry runs reads is not in the prefix report."""
        report = None if is_dry or not config.prefix_report.enabled else self.prefix_report.samples
        tokenized = self.tokenization if self.tokenization.is_used else ()
        secret, estimates = self._secret(config), self.cache_state.estimates
        return RequestReader(
            config,
            estimates=estimates,
            stored=self._stored_responses,
            salt_secret=secret,
            tokenized=tokenized,
            report=report,
            memory=self.memory,
            names=self.fleet.names,
        )

    def _build_front(self) -> None:
        """What reads requests, and what answers them: alone, in batches, or in pieces."""
        config, fleet, clock, tokenization = self.config, self.fleet, self.clock, self.tokenization
        queue, new_id, headers = self.queue, partial(next, request_ids()), config.server.response_headers
        broker, holds = self.lease_broker, config.admission.hold_without_backend
        send, retries = self.relay.send, RetryBudget(config.upstream)
        self.retry_budget = retries
        over = self.ledger.over
        background = self.background = BackgroundResponses(
            broker, send, config=config.upstream, clock=clock, supervisor=self.supervisor, over=over
        )
        dispatcher = self.dispatcher = Dispatcher(
            fleet,
            lease_broker=broker,
            send=send,
            budget=retries,
            metrics=self.metrics,
            keep=background.keep,
            response_headers=headers,
            holds=holds,
        )
        counted, retry_after = EmbeddingMetrics(self.metrics), broker.retry_after_seconds
        batcher = self.batcher = Batcher(
            fleet,
            dispatch=dispatcher.dispatch,
            config=config.embeddings,
            backlog=queue.backlog,
            max_wait_seconds=config.admission.max_wait_seconds,
            retry_after=retry_after,
            metrics=counted,
            clock=clock,
            memory=self.memory,
            crowded=queue.waiting,
            response_headers=headers,
        )
        self.embedding_cache = configured_cache(config, fleet, counted, secrets.token_bytes(32))
        self.coalescer = Coalescer(batcher, new_id, tokenization, cache=self.embedding_cache)
        self.rerank_splitter = RerankSplitter(batcher)
        self._stored_responses = StoredResponses(background.look)
        reader = self.reader = self._new_reader(config)
        fallbacks = Fallbacks(
            fleet, dispatcher, tokenization.complete, fell_back=self.metrics.fallbacks.add, clock=clock
        )
        waits = config.admission.max_wait_seconds
        uploads = Uploads(
            fleet,
            dispatcher,
            backlog=queue.backlog,
            max_wait_seconds=waits,
            max_buffered_bytes=config.server.max_buffered_upload_bytes,
            clock=clock,
        )
        self.uploads, self.sessions = uploads, self._new_sessions(retries, new_id)
        path = config.batches.path
        self.batches = None if path is None else self._new_batches(path, new_id, fallbacks)
        self.handler = Handler(
            config,
            fleet=fleet,
            dispatcher=dispatcher,
            coalescer=self.coalescer,
            rerank_splitter=self.rerank_splitter,
            fallbacks=fallbacks,
            uploads=uploads,
            realtime=self.sessions,
            reader=reader,
            ledger=self.ledger,
            clock=clock,
            new_id=new_id,
            complete=tokenization.complete,
            random=self.random,
            unix_seconds=self._unix_seconds,
            tracer=self.tracing.tracer,
            batches=self.batches,
        )
        self.client_keys = ClientKeys(config.auth, self._follow_keys)
        self.server = Server(config.server, self.handler, clock, memory=self.memory, supervisor=self.supervisor)

    def _build_pages(self) -> None:
        """What operators see and change, and what is kept over restarts."""
        config, fleet, clock, queue, cache_state = self.config, self.fleet, self.clock, self.queue, self.cache_state
        self.overview = Overview(
            config,
            fleet=fleet,
            membership=self.membership,
            scheduler=self.scheduler,
            queue=queue,
            cache_state=cache_state,
            kv_events=self.kv_events,
            tokenization=self.tokenization,
            reader=self._new_reader(config, is_dry=True),
            clock=clock,
        )
        reloads = self.reloads = Reloads(config, self._read, self.follow_in_steps)
        self.control = Control(self.membership, self.overview.backend, reloads)
        self.queue_view = QueueView(
            queue, self.scheduler.offline, lambda: [it.id for it in fleet.models()], names=(), clock=clock
        )
        self._follow_keys()
        self._admin_pages = AdminPages(
            self.overview.document, self.overview.route, self.queue_view.document, prepare=self._prepared_report
        )
        self._usage_page = UsagePage(self._usage_now, self.usage.last_days, self._unix_seconds)
        self._metrics_pages = MetricsPages(self.metrics.snapshot, self.handler.check_ready)
        self.admin_port = OperatorPort("server.admin", config.server.admin, STATIC.keys())
        self.metrics_port = OperatorPort("server.metrics", config.server.metrics)
        sources, secret = lambda: self.discovery.names, lambda: self._random_secret
        self.knowledge = Knowledge(
            fleet,
            membership=self.membership,
            sources=sources,
            cache_state=cache_state,
            calibrations=self.calibrations,
            queue=queue,
            ledger=self.ledger,
            stored=self._stored_responses,
            usage=self.usage,
            secret=secret,
            unix_seconds=self._unix_seconds,
        )

    def _new_sessions(self, retries: RetryBudget, new_id: Callable[[], str]) -> RealtimeSessions:
        config, fleet = self.config, self.fleet
        headers, holds = config.server.response_headers, config.admission.hold_without_backend
        self.tunnels = Tunnels(self.relay, config.realtime, self.clock, random_key=partial(secrets.token_bytes, 16))
        opener = self.session_dispatcher = Dispatcher(
            fleet,
            lease_broker=self.lease_broker,
            send=self.tunnels.send,
            budget=retries,
            metrics=self.metrics,
            response_headers=headers,
            holds=holds,
        )
        return RealtimeSessions(
            fleet,
            opener,
            new_id=new_id,
            unix_seconds=self._unix_seconds,
            spend=self.ledger.spend,
            cors_origins=config.server.cors_origins,
        )

    def _build_dashboard(self) -> None:
        fleet, clock, dispatcher = self.fleet, self.clock, self.dispatcher
        self._started_seconds = clock()
        self.timeline = Timeline(lambda: fleet.backends, lambda backend: state_reason(backend, clock()), clock)
        decisions = self._decisions = Decisions(dispatcher, self.lease_broker.explain, clock)

        def watched(is_watched: bool) -> None:
            self._is_watched = is_watched
            self.handler.use(decisions if is_watched else dispatcher)
            self.scheduler.follow(_scheduler_settings(self.config), self._policy(self.config))
            if not is_watched:
                decisions.forget()

        self.dashboard_sources = Sources(
            fleet,
            queue=self.queue,
            offline=self.scheduler.offline,
            metrics=self.metrics,
            recent=self.recent,
            timeline=self.timeline,
            settle=self.finished.settle,
            describer=self.overview.describer,
            trust=self.cache_state.hit_accuracy.share,
            explain=self.lease_broker.explain,
            config=lambda: self.config,
            gauges=self._own_gauges,
            use=process_use,
            clock=clock,
            offset_seconds=self._offset_seconds,
        )
        self.dashboard = Broadcast(LiveView(self.dashboard_sources), watched, self.supervisor, clock=clock)
        config, port = lambda: self.config, lambda: self.server.port
        self._dashboard_pages = DashboardPages(
            self.dashboard, decisions, config, port=port, preview=self.reloads.preview
        )

    def _own_gauges(self) -> dict[str, Any]:
        return own_gauges(
            self.clock() - self._started_seconds,
            self.server,
            retries=self.retry_budget,
            memory=self.memory,
            supervisor=self.supervisor,
            logs=(self.access_log, self.log),
            broadcast=self.dashboard,
        )

    def _new_batches(self, path: str, new_id: Callable[[], str], fallbacks: Fallbacks) -> "Batches":
        """Files and batches. Their modules are imported only where they are used."""
        from gateway.batches.metrics import BatchMetrics
        from gateway.batches.sender import LineDispatchers, LineSender
        from gateway.batches.service import Batches, BatchSetting

        dispatchers = LineDispatchers(self.dispatcher, self.coalescer, self.rerank_splitter, fallbacks)
        complete = self.tokenization.complete
        sender = LineSender(
            dispatchers, complete, ledger=self.ledger, clock=self.clock, unix_seconds=self._unix_seconds, new_id=new_id
        )
        counted = BatchMetrics(self.metrics)

        def models_named(name: str) -> Sequence[str]:
            return models_of(self.config.models.aliases.get(name, name))

        setting = BatchSetting(
            sender,
            memory=self.memory,
            metrics=counted,
            supervisor=self.supervisor,
            unix_seconds=self._unix_seconds,
            new_id=new_id,
            random=self.random,
            breather=breather,
            fleet=self.fleet,
            models_named=models_named,
        )
        batches = Batches(path, self.config, self.reader, setting=setting)
        counted.watch(batches)
        return batches

    def _read(self) -> Config:
        """The configuration anew, in a thread. Raises ConfigError."""
        config = self._load()
        self.client_keys.read_ahead(config.auth)
        return config

    def follow(self, config: Config) -> None:
        at_once(self.follow_in_steps(config))

    def follow_in_steps(self, config: Config) -> Steps[None]:
        """Take over all but listening addresses (`reload.NEEDS_RESTART`); many backends change some at a time. Requests
        in flight are not disturbed."""
        self.finished.settle()  # they ended under the old settings of the logs
        self.config, admission, server, report = config, config.admission, config.server, config.prefix_report
        headers, holds = server.response_headers, admission.hold_without_backend
        self.watches.follow(config.health)
        self.relay.follow(config.upstream, admission.comment_seconds)
        self.background.follow(config.upstream)
        for dispatcher in (self.dispatcher, self.session_dispatcher):
            dispatcher.follow(config.upstream, response_headers=headers, holds=holds)
        self.tunnels.follow(config.realtime)
        self.sessions.follow(server.cors_origins)
        self.uploads.follow(admission.max_wait_seconds, server.max_buffered_upload_bytes)
        self.cache_state.follow(config.routing)
        self.calibrations.follow(_cost_model(config.routing))
        self.queue.backlog.follow(admission.max_queued_requests, admission.max_queued_bytes)
        self.scheduler.follow(_scheduler_settings(config), self._policy(config))
        self.lease_broker.follow(admission.max_wait_seconds, admission.comment_seconds)
        self.batcher.follow(config.embeddings, admission.max_wait_seconds, response_headers=headers)
        self.embedding_cache.follow(config)
        self.tokenization.follow(config.models)
        self.prefix_report.follow(enabled=report.enabled, show_text=report.show_text)
        self._follow_access_log(config)
        if self.log is not None:
            self.log.follow(config.log.level, config.log.format)
        self.reader = self._new_reader(config)
        self.tracing.follow(config.tracing)
        self.handler.follow(config, self.reader, self.tracing.tracer)
        if self.batches is not None:
            self.batches.follow(config, self.reader)
        self.server.follow(server)
        self.overview.follow(config, self._new_reader(config, is_dry=True))
        self.client_keys.follow(config.auth)
        self._follow_keys()
        self.admin_port.follow(server.admin)
        self.metrics_port.follow(server.metrics)
        self.fleet.expect(config.named_models)
        self.adapter_loader.follow(config.models.adapters)
        self.fleet.follow_settings(config.health, admission)
        yield from self.membership.follow("file", [Wanted(backend) for backend in config.backends])
        self.discovery.follow(config.discovery)
        self.timeline.reloaded()

    def _follow_keys(self) -> None:
        keys = self.client_keys
        replicas = max((each.blocks.live for each in self.coordinators), default=1)
        self.handler.follow_keys([key.divided(replicas) for key in keys.keys], are_needed=keys.are_needed)
        self.queue_view.follow(keys.names)
        self.usage.follow(has_keys=keys.are_needed)
        if self.batches is not None:
            self.batches.follow_keys(keys.keys, are_needed=keys.are_needed)

    def _usage_now(self) -> dict[str, Any]:
        self.finished.settle()
        return self.usage.state()

    def _listen_to_fleet(self) -> None:
        changed, restarted = self.fleet.on_change, self.fleet.on_restart
        changed.extend((self.lease_broker.fleet_changed, self.tokenization.look_again, self.timeline.look))
        self.fleet.on_facts.extend((self.cache_state.follow_sizes, self._follow_events))
        self.fleet.on_limit.append(self.timeline.limit_moved)
        restarted.append(self.timeline.restarted)
        restarted.extend((self.cache_state.forget, self.tokenization.forget))
        self.fleet.on_sleep.append(self.cache_state.forget)
        restarted.append(lambda backend: self.kv_events.restarted(backend.name))
        restarted.append(lambda _: self.rerank_splitter.forget())
        self.fleet.on_leave.extend((self.cache_state.left, self.tokenization.left, self._left))
        parts = ReplicaParts(
            self._stored_responses,
            fleet=self.fleet,
            queue=self.queue,
            lengths=self.cache_state.output_lengths,
            kv_headroom=lambda: self.config.admission.kv_headroom,
            broker=self.lease_broker,
            index=self.cache_state.index,
            is_followed=self.tokenization.covers,
            secret=self._random_secret,
            follow_secret=self._follow_secret,
            counted=self._follow_keys,
            new_name=partial(secrets.token_hex, 8),
            clock=self.clock,
            supervisor=self.supervisor,
        )
        self.coordinators = configured_coordinators(self.config, parts)

    def _left(self, backend: Backend) -> None:
        structlog.get_logger("gateway").info("backend_left", backend=backend.name, why=backend.draining)
        if backend.name not in self.fleet.by_name:
            self.kv_events.follow(backend.name, ())
            self.metrics.forget_backend(backend.name)

    def _follow_events(self) -> None:
        for backend in self.fleet.backends:
            self.kv_events.follow(backend.name, plan(backend).sources)

    def _prepared_report(self, window_seconds: float | None) -> Callable[[Breathe], dict[str, Any]] | None:
        if not self.prefix_report.is_enabled:
            return None
        self.finished.settle()
        return partial(make_report, self.prefix_report.snapshot(self.clock(), window_seconds))

    @contextmanager
    def _looking(self) -> Iterator[None]:
        looking = self.supervisor.looking
        with ExitStack() as stack:
            observe_lag = self.metrics.loop_lag.observe
            stack.enter_context(looking("loop_lag", lambda: observe_lag((), self.supervisor.late_seconds)))
            stack.enter_context(looking("settle", self.finished.settle))
            stack.enter_context(looking("backend_leave", self.fleet.let_go))  # after the records of its last requests
            stack.enter_context(looking("trim", self._trim))
            # Bytes per token have been learned.
            stack.enter_context(looking("follow_sizes", lambda: self.cache_state.follow_sizes(), _SIZES_SECONDS))
            stack.enter_context(looking("timeline", self.timeline.look, _SIZES_SECONDS))
            yield

    def _trim(self) -> None:
        self.cache_state.index.trim()
        self.embedding_cache.trim()

    def _add_gauges(self) -> None:
        owners: list[Any] = [self.overview, self.queue_view, self.background, self.usage, self.tracing]
        for owner in [*owners, *self.coordinators]:
            owner.add_gauges(self.metrics)
        add_gauges(
            self.metrics,
            fleet=self.fleet,
            calibrations=self.calibrations,
            memory=self.memory,
            embedding_cache=self.embedding_cache,
            access_log=self.access_log,
            log=self.log,
            supervisor=self.supervisor,
        )

    @asynccontextmanager
    async def running(
        self,
        listeners: Listeners = NOT_BOUND,
        routes: Sequence[web.RouteDef] = (),
        ready: Callable[[], Awaitable[None]] | None = None,
    ) -> AsyncIterator[int | None]:
        """Serve while the block runs; yields the admin port. On exit, responses in progress are cut.

        `routes`: more of the admin port. `ready` is awaited before the first client is accepted.
        """
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            if self.access_log is not None:
                stack.enter_context(self.access_log)
            stack.enter_context(self.tracing)
            stack.callback(self.relay.close_idle)
            stack.enter_context(self.relay.watching())
            stack.push_async_callback(self.batcher.stop)
            stack.push_async_callback(self.background.stop)
            await enter(self.watches)
            await enter(self.sleeper.commands)
            await enter(self.adapter_loader.commands)
            await enter(self.discovery)
            await enter(self.supervisor.repeating("keys_file", self.client_keys.step, 1.0))
            await enter(self.tokenization)
            await enter(self.kv_events)
            stack.callback(self.finished.settle)
            stack.enter_context(self._looking())
            for coordinator in self.coordinators:
                await enter(coordinator.taking_part())
            if ready is not None:
                await ready()
            for coordinator in self.coordinators:
                await enter(coordinator.sharing.running())
            if self.batches is not None:
                await self.batches.open()
                stack.push_async_callback(self.batches.stop_last)
            await enter(self.metrics_port.listening(self._metrics_pages.routes(), listeners.metrics))
            admin = await enter(self.admin_port.listening([*self.admin_routes(), *routes], listeners.admin))
            stack.callback(self.dashboard.stop)
            await enter(self.server.listening(listeners.main))
            yield admin

    def admin_routes(self) -> list[web.RouteDef]:
        """What the admin port serves, but for a restart of the process."""
        shown = self._metrics_pages, self._admin_pages, self._usage_page, self.control, self._dashboard_pages
        return [route for pages in shown for route in pages.routes()]


def _cost_model(routing: RoutingConfig) -> CostModel:
    return CostModel(routing.seconds_per_prefill_token, routing.decode_weight)


def _scheduler_settings(config: Config) -> SchedulerSettings:
    routing, admission = config.routing, config.admission
    window_seconds = math.inf if routing.prefill_window_seconds is None else routing.prefill_window_seconds
    return SchedulerSettings(
        routing.aging,
        admission.kv_headroom,
        scan=routing.scan,
        starvation_seconds=routing.starvation_seconds,
        hold_without_backend=admission.hold_without_backend,
        prefill_window_seconds=window_seconds,
        itl_objective_seconds=admission.itl_objective_seconds,
    )
