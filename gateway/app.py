"""The composition root: builds everything from the configuration, and runs it until a signal to stop."""

import asyncio
import gc
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from itertools import count
from random import Random
from typing import BinaryIO, TextIO

import structlog
import uvloop

from gateway.admin_views import Overview, QueueView
from gateway.backends.fleet import Fleet
from gateway.backends.probe import Watch
from gateway.config import Config
from gateway.dispatch import Dispatcher, RetryBudget
from gateway.embeddings.batches import TokenCounts
from gateway.embeddings.cache import cache_as_configured
from gateway.embeddings.coalescer import Coalescer
from gateway.embeddings.rerank import RerankSplitter
from gateway.embeddings.services import PoolServices
from gateway.embeddings.waiter import Waitlist
from gateway.feedback import CacheState, LimitChanges
from gateway.front.admin import add_prefix_routes, admin_app, admin_listening, own_hosts
from gateway.front.handler import Handler, request_ids
from gateway.front.read import RequestReader, StoredResponses
from gateway.front.server import Server
from gateway.insights.report import Making, PrefixReport
from gateway.kv_events.endpoints import plan
from gateway.kv_events.feed import KvEvents
from gateway.observe.access_log import AccessLog, PrefixHashes
from gateway.observe.log import LineWriter, logging_to
from gateway.observe.metrics import EmbeddingMetrics, Metrics, watch_lag
from gateway.observe.record import Record, RecordBatcher
from gateway.relay.relay import Relay
from gateway.resources import MemoryBudget, fitted, raise_limit
from gateway.routing.engine import CostModel
from gateway.routing.estimates import Calibrations, OutputLengths
from gateway.routing.policy import Affinity, LeastLoadedPolicy, Policy, PrefixPolicy, RoundRobinPolicy
from gateway.scheduling.leases import LeaseBroker
from gateway.scheduling.scheduler import Scheduler, SchedulerSettings
from gateway.scheduling.wait_queue import Queue
from gateway.supervisor import Supervisor
from gateway.tokenization.exact_prompts import ExactPrompts
from gateway.tokenization.tokenization import Tokenization

_SETTLE_SECONDS = 0.1
_SIZES_EVERY = 50
_IGNORED_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # without a meaning yet
_TEMPLATE_TOKENS = 32  # that a chat template adds to a prompt, until it is learned


class Gateway:
    """Everything, put together; `running` runs it."""

    def __init__(
        self, config: Config, log_out: BinaryIO | None, clock: Callable[[], float] = time.monotonic,
        log: LineWriter | None = None,
    ) -> None:  # fmt: skip
        random = Random()  # seeded by the system; not for secrets
        self.config = config
        self.clock = clock
        self.log = log
        self.supervisor = Supervisor(clock)
        self.metrics = Metrics()
        self.memory = MemoryBudget(config.server.memory_budget_bytes)
        self.fleet = Fleet(
            config.backends, config.health, config.admission, clock=clock, random=random, supervisor=self.supervisor
        )
        self.cache_state = CacheState(config, self.fleet, clock)
        self.kv_events = KvEvents(self.cache_state, self.cache_state.engine_number, clock, self.supervisor)
        self.prefix_report = PrefixReport(
            clock(), random, show_text=config.prefix_report.show_text, holders=self.cache_state.holders
        )
        self.tokenization = Tokenization(config.models, self.fleet, clock, supervisor=self.supervisor)
        self.exact_prompts = ExactPrompts(self.fleet, self.cache_state.exact, self.tokenization)
        self.queue = Queue(config.admission.max_queued_requests, config.admission.max_queued_bytes)
        model = CostModel(config.routing.seconds_per_prefill_token, config.routing.decode_weight)
        self.calibrations = Calibrations(model, config.routing.prefill_window_seconds, self.fleet.family)
        self.output_lengths = OutputLengths(prompt_excess_tokens=_TEMPLATE_TOKENS)
        self.scheduler = Scheduler(
            self.fleet.candidates, self._policy(), self.queue, self.output_lengths, self.calibrations,
            _scheduler_settings(config),
        )  # fmt: skip
        self.lease_broker = LeaseBroker(self.scheduler, self.queue, config.admission.max_wait_seconds, clock,
                         config.admission.comment_seconds)  # fmt: skip
        self.limit_changes = LimitChanges(self.fleet, self.lease_broker.scan_soon, self.metrics.limit_moves, clock)
        self.relay = Relay(self.fleet, config.upstream, clock, config.admission.comment_seconds,
                           supervisor=self.supervisor)  # fmt: skip
        self.watch = Watch(self.fleet, config.health, clock=clock, random=random, supervisor=self.supervisor)
        self.access_log = _access_log(config, log_out, clock)
        self.finished = RecordBatcher(self.supervisor, *self._consumers())
        self.metrics.before_collecting = self.finished.settle
        dispatcher = Dispatcher(
            self.fleet, self.lease_broker, self.relay, RetryBudget(config.upstream), self.metrics,
            response_headers=config.server.response_headers, holds=config.admission.hold_without_backend,
        )  # fmt: skip
        new_id = partial(next, request_ids())
        self.coalescer, self.rerank_splitter = self._batchers(dispatcher, new_id)
        stored = StoredResponses()
        salt_secret = config.auth.cache_salt_secret.encode() or secrets.token_bytes(32)
        self.reader = RequestReader(
            config, self.cache_state.estimates, stored, salt_secret, self.exact_prompts.wanted,
            self.prefix_report if config.prefix_report.enabled else None,
        )  # fmt: skip
        dry_reader = RequestReader(config, self.cache_state.estimates, stored, salt_secret, self.exact_prompts.wanted)
        self.handler = Handler(
            config, self.fleet, dispatcher, self.coalescer, self.rerank_splitter, self.reader, self.finished.add,
            clock, new_id, self.exact_prompts.complete, random,
        )  # fmt: skip
        self.server = Server(config.server, self.handler, clock, self.memory, self.supervisor)
        self._add_views(dry_reader)
        self._listen_to_fleet()
        self._add_gauges()

    def _add_views(self, dry_reader: RequestReader) -> None:
        config = self.config
        self.overview = Overview(
            config, self.fleet, self.scheduler, self.lease_broker, self.queue, self.cache_state, self.kv_events,
            self.exact_prompts, self.tokenization, dry_reader, self.clock,
        )  # fmt: skip
        self.queue_view = QueueView(
            self.queue, self.scheduler, lambda: [card.id for card in self.fleet.models()],
            [key.name for key in config.auth.keys], self.clock,
        )  # fmt: skip

    def _listen_to_fleet(self) -> None:
        self.fleet.on_change.extend((
            self.lease_broker.fleet_changed, self.cache_state.follow_sizes, self.tokenization.look_again,
            self._follow_events,
        ))  # fmt: skip
        self.fleet.on_restart.extend((
            self.cache_state.forget, self.tokenization.forget, lambda backend: self.kv_events.restarted(backend.name),
            lambda _: self.rerank_splitter.forget(),
        ))  # fmt: skip

    def _batchers(self, dispatcher: Dispatcher, new_id: Callable[[], str]) -> tuple[Coalescer, RerankSplitter]:
        config, counted = self.config, EmbeddingMetrics(self.metrics)
        self.embedding_cache = cache_as_configured(config, self.fleet, counted, secrets.token_bytes(32))
        waitlist = Waitlist(
            self.queue.backlog, config.admission.max_wait_seconds, self.lease_broker.retry_after_seconds
        )
        services = PoolServices(
            self.fleet, dispatcher.dispatch, config.embeddings, waitlist, counted, self.clock, self.memory,
            config.server.response_headers,
        )  # fmt: skip
        coalescer = Coalescer(
            services, new_id, crowded=self.queue.waiting, token_counts=TokenCounts(self.tokenization, counted),
            cache=self.embedding_cache,
        )  # fmt: skip
        return coalescer, RerankSplitter(services)

    def _policy(self) -> Policy:
        match self.config.routing.policy:
            case "prefix":
                return PrefixPolicy(
                    self.calibrations, self.cache_state.hit_predictor, self.cache_state.estimates, Affinity()
                )
            case "least_loaded":
                return LeastLoadedPolicy()
            case "round_robin":
                return RoundRobinPolicy()

    def _consumers(self) -> list[Callable[[Record], None]]:
        def learn(record: Record) -> None:
            self.cache_state.learn(record)
            if record.demand is not None and record.usage is not None:
                self.output_lengths.answered(record.demand, record.usage)

        consumers: list[Callable[[Record], None]] = [learn, self.metrics.finished, self.limit_changes.finished]
        if self.config.prefix_report.enabled:
            consumers.append(self.prefix_report.finished)
        if self.access_log is not None:
            consumers.append(self.access_log.add)
        return consumers

    def _follow_events(self) -> None:
        for backend in self.fleet.backends:
            self.kv_events.follow(backend.name, plan(backend).sources)

    def _prepared_report(self, window_seconds: float | None) -> Making:
        self.finished.settle()
        return self.prefix_report.prepare(self.clock(), window_seconds)

    async def _settle(self) -> None:
        for turn in count():
            await asyncio.sleep(_SETTLE_SECONDS)
            self.finished.settle()
            if turn % _SIZES_EVERY == 0:
                with self.supervisor.guard("follow_sizes"):
                    self.cache_state.follow_sizes()  # bytes per token have been learned

    def _add_gauges(self) -> None:
        self.overview.add_gauges(self.metrics)
        self.queue_view.add_gauges(self.metrics)
        gauge = self.metrics.gauge
        gauge("gateway_prefill_seconds_per_token", "Learned prefill time of an uncached token, by model.", ("model",),
              lambda: [((name,), self.calibrations.of(name).model.b) for name in self.fleet.families()])  # fmt: skip
        gauge("gateway_held_bytes", "Memory used by bodies, uploads, queue and buffered responses.", (),
              lambda: [((), self.memory.used_bytes)])  # fmt: skip
        gauge("gateway_embedding_cache_bytes", "Memory used by cached embedding vectors.", (),
              lambda: [((), self.embedding_cache.entries.used_bytes if self.embedding_cache else 0)])  # fmt: skip
        counter = self.metrics.counter
        counter("gateway_access_log_dropped_lines_total", "Access-log lines dropped because they could not be written.",
                (), lambda: [((), self.access_log.dropped if self.access_log else 0)])  # fmt: skip
        counter("gateway_log_dropped_lines_total", "Log lines dropped because they could not be written.", (),
                lambda: [((), self.log.dropped if self.log else 0)])  # fmt: skip
        counter("gateway_background_errors_total", "Exceptions in background tasks, which continue (a bug).", ("task",),
                lambda: [((task,), errors) for task, errors in self.supervisor.faults.items()])  # fmt: skip

    @asynccontextmanager
    async def running(self) -> AsyncIterator[int | None]:
        """Serve while the block runs; yields the admin port. On exit, responses in progress are cut."""
        async with AsyncExitStack() as stack:
            if self.access_log is not None:
                stack.enter_context(self.access_log)
            await stack.enter_async_context(self.relay.watching())
            await stack.enter_async_context(self.coalescer.running())
            await stack.enter_async_context(self.watch)
            await stack.enter_async_context(self.tokenization)
            await stack.enter_async_context(self.kv_events)
            await stack.enter_async_context(self._repeating("loop_lag", lambda: watch_lag(self.metrics.loop_lag)))
            stack.callback(self.finished.settle)
            await stack.enter_async_context(self._repeating("settle", self._settle))
            app = admin_app(
                self.metrics.snapshot, self.overview.backends, self.overview.route, self.queue_view.document,
                own_hosts(self.config.server.admin),
            )  # fmt: skip
            add_prefix_routes(app, self._prepared_report if self.config.prefix_report.enabled else None)
            admin = await stack.enter_async_context(admin_listening(app, self.config.server.admin))
            await stack.enter_async_context(self.server.listening())
            yield admin

    @asynccontextmanager
    async def _repeating(self, name: str, step: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        work = self.supervisor.repeat(name, step, _SETTLE_SECONDS)
        task = asyncio.get_running_loop().create_task(work, name=name)
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def _access_log(config: Config, out: BinaryIO | None, clock: Callable[[], float]) -> AccessLog | None:
    if out is None or not config.server.access_log:
        return None
    secret = config.auth.cache_salt_secret.encode() or secrets.token_bytes(32)
    return AccessLog(out, clock, _wall_clock, PrefixHashes(secret) if config.server.access_log_prefixes else None)


def _wall_clock() -> float:
    return datetime.now(UTC).timestamp()


def _scheduler_settings(config: Config) -> SchedulerSettings:
    routing = config.routing
    return SchedulerSettings(
        aging=routing.aging,
        kv_headroom=config.admission.kv_headroom,
        scan=routing.scan,
        starvation_seconds=routing.starvation_seconds,
        hold_without_backend=config.admission.hold_without_backend,
    )


async def _serve(config: Config, out: BinaryIO, log_writer: LineWriter) -> None:
    log = structlog.get_logger("gateway")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    for number in _IGNORED_SIGNALS:
        loop.add_signal_handler(number, _log_ignored, number)
    if ignored := config.without_effect:
        log.warning("keys_without_effect", keys=ignored, hint="remove them: version 0.3 will refuse them")
    if renamed := config.renamed:
        log.warning("keys_renamed", keys=renamed, hint="use the new names: version 0.3 will refuse the old ones")
    gateway = Gateway(config, out, log=log_writer)
    loop.set_exception_handler(lambda _, context: gateway.supervisor.on_loop_error(context))
    async with gateway.running() as admin_port:
        log.info("serving", host=config.server.host, port=gateway.server.port, admin_port=admin_port,
                 backends=[backend.name for backend in config.backends], policy=config.routing.policy)  # fmt: skip
        gc.collect()
        gc.freeze()
        await stop.wait()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)  # a second one ends the process at once
        log.info("draining", answering=gateway.server.answering)
        await gateway.server.drain()
    log.info("stopped")


def _log_ignored(number: signal.Signals) -> None:
    structlog.get_logger("gateway").warning(
        "signal_ignored",
        signal=number.name,
        hint="configuration reload is unsupported: restart the gateway to apply changes",
    )


def serve(config: Config) -> None:
    """Serve until SIGTERM or Ctrl-C, then drain. Raises OSError if a port is in use."""
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # until the event loop has handlers
    gc.set_threshold(50_000, 20, 50)  # requests make little garbage in cycles
    with _unbuffered(sys.stdout) as out, _unbuffered(sys.stderr) as errors, logging_to(errors) as log_writer:
        uvloop.run(_serve(fitted(config, raise_limit()), out, log_writer))


def _unbuffered(stream: TextIO | None) -> BinaryIO:
    """The file of a standard stream; None = closed by the parent process."""
    if stream is None:
        return open(os.devnull, "wb", buffering=0)
    return open(stream.fileno(), "wb", buffering=0, closefd=False)
