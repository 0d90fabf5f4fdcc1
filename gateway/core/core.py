# ruff: noqa: ARG002, ARG005 - the defaults without features ignore their arguments
"""The core, put together: all that a chat request runs through between its reading and its record."""

import math
import secrets
from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from random import Random
from typing import BinaryIO

from gateway.config import Config, RoutingConfig
from gateway.core.backends.backend import Backend
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.membership import Membership
from gateway.core.backends.probe import BackendWatches
from gateway.core.dispatch import Dispatcher, RetryBudget, Send
from gateway.core.feedback import CacheState, LimitChanges
from gateway.core.front.handler import LocalApi, RequestSource, request_ids
from gateway.core.front.http_request import ClientKey, KeyCheck
from gateway.core.front.read import RequestReader, ResponseStore, StoredPlace
from gateway.core.front.reply import RequestDispatcher
from gateway.core.front.routes import Route
from gateway.core.ledger import RequestLedger
from gateway.core.observe.log import AccessLog, LineForm, PrefixHashes
from gateway.core.observe.metrics import Metrics
from gateway.core.observe.record import Record, RecordBatcher
from gateway.core.relay.relay import Relay
from gateway.core.request import BackgroundRun, Demand, InferenceRequest
from gateway.core.resources import MemoryBudget
from gateway.core.routing.cache_view import PrefixIndex
from gateway.core.routing.engine import Engine
from gateway.core.routing.estimates import Calibrations, CostModel
from gateway.core.routing.policy import Affinity, LeastLoadedPolicy, Options, Policy, PrefixPolicy, RoundRobinPolicy
from gateway.core.scheduling.leases import LeaseBroker, LowerQueue
from gateway.core.scheduling.scheduler import Lease, LeaseSource, Scheduler, SchedulerSettings
from gateway.core.scheduling.wait_queue import Queue
from gateway.core.supervisor import Supervisor
from gateway.feature import Feature, Prompts

_SIZES_SECONDS = 5.0  # between looks at sizes


class NoPrompts(Prompts):
    """Without tokenizers, estimates do for prompts."""

    tokenized: Container[str] = ()

    async def complete(self, request: InferenceRequest) -> InferenceRequest:
        return replace(request, document=None)

    def covers(self, engine: int) -> bool:
        return False

    def configured(self, model: str) -> bool:
        return False

    def counts_alike(self, model: str, backend: str) -> bool:
        return False

    async def count(self, model: str, texts: list[str], size_bytes: int, *, special: bool) -> list[int] | str:
        raise NotImplementedError


class NoStore:
    """Knows of no stored response."""

    def find(self, response_id: str, owner: tuple[str, str]) -> StoredPlace | None:
        return None

    def noting(
        self, model: str, owner: tuple[str, str], run: BackgroundRun | None, alias: str = ""
    ) -> Callable[[str, bytes], None]:
        return lambda backend, opening: None

    def cancelled(self, response_id: str) -> None: ...


class Core:
    """Owner of the parts, which features read and call."""

    def __init__(
        self,
        config: Config,
        *,
        clock: Callable[[], float],
        unix_seconds: Callable[[], float],
        random: Random,
        secret: bytes | None = None,
        log_out: BinaryIO | None = None,
        index: PrefixIndex | None = None,
    ) -> None:
        """`secret`: of cache salts, from the process before this one; `index`: the record of prompts, if it is not that
        of a gateway alone."""
        self.config, self.clock, self.unix_seconds, self.random = config, clock, unix_seconds, random
        self.random_secret = secret or secrets.token_bytes(32)
        self.new_id = request_ids()
        admission = config.admission
        supervisor = self.supervisor = Supervisor(clock)
        self.metrics = Metrics()
        self.memory = MemoryBudget(config.server.memory_budget_bytes)

        fleet = self.fleet = Fleet(
            config.backends, config.health, clock=clock, random=random, admission=admission, supervisor=supervisor
        )
        fleet.expect(config.named_models)
        self.watches = BackendWatches(fleet, config.health, clock, random=random, supervisor=supervisor)
        self.membership = Membership(fleet)
        cache_state = self.cache_state = CacheState(config.routing, fleet, clock, index=index)

        queue = self.queue = Queue(admission.max_queued_requests, admission.max_queued_bytes)
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
        broker = self.lease_broker = LeaseBroker(
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

        self.access_log: AccessLog | None = None
        if log_out is not None:
            self.access_log = AccessLog(log_out, clock, unix_seconds)
            self._apply_access_log(config)
        limit_changes = LimitChanges(fleet, broker.scan_soon, self.metrics.limit_moves, clock=clock)
        self.finished = RecordBatcher(supervisor)
        self.finished.consume(cache_state.learn, limit_changes.finished)
        self.finished.consume_all(self.metrics.finished, *([self.access_log.add] if self.access_log else []))
        self.metrics.before_collecting = self.finished.settle
        self.ledger = RequestLedger(cache_state.estimates, self.finished.add)
        self.ledger.count(self.metrics.counted)
        self.retry_budget = RetryBudget(config.upstream)
        self.dispatcher = self.new_dispatcher(self.relay.send)
        self.feature_dispatcher = self.new_dispatcher(self.relay.send)  # of features: batches, other requests
        self.lower_queue_counts: Callable[[], Mapping[str, tuple[int, int]]] = dict
        self._listen_to_fleet()

        # Dispatchers of features, by the names in requests and routes; "" is the plain dispatcher.
        self.dispatchers: dict[str, RequestDispatcher] = {"": self.dispatcher}
        self.sources: dict[str, RequestSource] = {}
        self.apis: dict[str, LocalApi] = {}
        self.routes: dict[tuple[bytes, bytes], Route] = {}
        self.prompts: Prompts = NoPrompts()
        self.store: ResponseStore = NoStore()
        # API keys, and the information that their clients get.
        self.keys: Sequence[ClientKey] = ()
        self.check_key: KeyCheck | None = None
        self.on_keys: list[Callable[[Sequence[ClientKey], bool], None]] = []
        # Gateways that share the engines.
        self.replicas: Callable[[], int] = lambda: 1
        self.on_replicas: list[Callable[[], None]] = []
        self.on_secret: list[Callable[[], None]] = []

    def connect(self, feature: Feature) -> None:
        """Put a feature's parts where the core reads them."""
        self.routes.update(feature.routes())
        self.dispatchers.update(feature.dispatchers())
        self.sources.update(feature.sources())
        self.apis.update(feature.apis())
        if (prompts := feature.prompts()) is not None:
            self.prompts = prompts
        if (store := feature.store()) is not None:
            self.store = store
        feature.add_gauges(self.metrics)

    def read_with(self, reader: RequestReader) -> None:
        """Read requests by this one from now on."""
        self.reader = reader

    def watch(
        self, dispatcher: RequestDispatcher | None, on_bound: Callable[[Demand, Options, Engine], None] | None
    ) -> None:
        """Send requests through this dispatcher, and report each that is bound to an engine. None = no longer."""
        self.dispatchers[""] = self.dispatcher if dispatcher is None else dispatcher
        self.scheduler.watch(on_bound)

    def lower(
        self, queue: LowerQueue, leases: LeaseSource, counts: Callable[[], Mapping[str, tuple[int, int]]]
    ) -> None:
        """Bind requests of this queue to idle capacity. `leases`: of the requests that features send; `counts`: by
        model, the waiting requests and the sequences in flight."""
        self.lease_broker.add_lower_queue(queue)
        self.feature_dispatcher.lease_from(leases)
        self.lower_queue_counts = counts

    def keep_with(self, keep: Callable[[InferenceRequest, Lease, Backend, Record], None]) -> None:
        """Let this take over the leases of requests that their engines go on with after the answer."""
        for dispatcher in (self.dispatcher, self.feature_dispatcher):
            dispatcher.keep_with(keep)

    def use_keys(self, keys: Sequence[ClientKey], check: KeyCheck | None) -> None:
        """Take over other API keys, and the function that finds a request's key. None = no request needs one."""
        self.keys, self.check_key = keys, check
        for changed in self.on_keys:
            changed(keys, check is not None)

    def count_replicas(self, replicas: Callable[[], int]) -> None:
        """This many gateways share the engines."""
        self.replicas = replicas

    def replicas_changed(self) -> None:
        for changed in self.on_replicas:
            changed()

    def new_dispatcher(self, send: Send) -> Dispatcher:
        """A dispatcher of requests for which `send` opens the connection."""
        config = self.config
        return Dispatcher(
            self.fleet,
            lease_broker=self.lease_broker,
            send=send,
            budget=self.retry_budget,
            metrics=self.metrics,
            response_headers=config.server.response_headers,
            holds=config.admission.hold_without_backend,
        )

    @property
    def salt_secret(self) -> bytes:
        return self.config.auth.cache_salt_secret.encode() or self.random_secret

    def share_secret(self, secret: bytes) -> None:
        """Take over the secret that all gateways of the fleet have in common."""
        self.random_secret = secret
        for changed in self.on_secret:
            changed()

    def offset_seconds(self) -> float:
        """From the loop's clock to Unix time."""
        return self.unix_seconds() - self.clock()

    def apply(self, config: Config) -> None:
        """Take over another configuration, except for the backends. Requests in flight are not disturbed."""
        self.finished.settle()  # they ended under the old settings of the logs
        self.config, admission = config, config.admission
        self.watches.apply(config.health)
        self.relay.apply(config.upstream, admission.comment_seconds)
        self.retry_budget.apply(config.upstream)
        for dispatcher in (self.dispatcher, self.feature_dispatcher):
            self.apply_to(dispatcher)
        self.cache_state.apply(config.routing)
        self.calibrations.apply(_cost_model(config.routing))
        self.queue.backlog.apply(admission.max_queued_requests, admission.max_queued_bytes)
        self.scheduler.apply(_scheduler_settings(config), self._policies[config.routing.policy])
        self.lease_broker.apply(admission.max_wait_seconds, admission.comment_seconds)
        self._apply_access_log(config)
        self.fleet.expect(config.named_models)
        self.fleet.apply_settings(config.health, admission)

    def apply_to(self, dispatcher: Dispatcher) -> None:
        """Give a dispatcher the settings of now."""
        config = self.config
        dispatcher.apply(response_headers=config.server.response_headers, holds=config.admission.hold_without_backend)

    def _apply_access_log(self, config: Config) -> None:
        if self.access_log is not None:
            hashes = PrefixHashes(self.salt_secret) if config.server.access_log_prefixes else None
            form = LineForm(config.server.access_log_fields, hashes)
            self.access_log.apply(form, enabled=config.server.access_log, style=config.log.format)

    def _listen_to_fleet(self) -> None:
        fleet, cache_state = self.fleet, self.cache_state
        fleet.on_change.append(self.lease_broker.fleet_changed)
        fleet.on_facts.append(cache_state.follow_sizes)
        fleet.on_restart.append(cache_state.forget)
        fleet.on_sleep.append(cache_state.forget)
        fleet.on_leave.append(cache_state.left)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The block within which the relay may be used, and the fleet is watched."""
        supervisor = self.supervisor
        async with AsyncExitStack() as stack:
            enter = stack.enter_context
            if self.access_log is not None:
                enter(self.access_log)
            stack.callback(self.relay.close_idle)
            enter(self.relay.watching())
            await stack.enter_async_context(self.watches)
            observe_lag = self.metrics.loop_lag.observe
            enter(supervisor.looking("loop_lag", lambda: observe_lag((), supervisor.late_seconds)))
            enter(supervisor.looking("settle", self.finished.settle))
            enter(supervisor.looking("backend_leave", self.fleet.let_go))  # after the records of its last requests
            enter(supervisor.looking("trim", self.cache_state.index.trim))
            # Bytes per token have been learned.
            enter(supervisor.looking("follow_sizes", lambda: self.cache_state.follow_sizes(), _SIZES_SECONDS))
            yield


def _cost_model(routing: RoutingConfig) -> CostModel:
    return CostModel(routing.seconds_per_prefill_token, routing.decode_weight)


def _scheduler_settings(config: Config) -> SchedulerSettings:
    routing, admission = config.routing, config.admission
    return SchedulerSettings(
        aging=routing.aging,
        kv_headroom=admission.kv_headroom,
        scan=routing.scan,
        starvation_seconds=routing.starvation_seconds,
        hold_without_backend=admission.hold_without_backend,
        prefill_window_seconds=math.inf if routing.prefill_window_seconds is None else routing.prefill_window_seconds,
    )
