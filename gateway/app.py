"""The composition root: builds the core and its features from the configuration, and runs them."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import chain
from random import Random
from typing import BinaryIO, TypeVar

import structlog
from aiohttp import web

from gateway.config import Config
from gateway.core.backends.backend import Backend
from gateway.core.backends.fleet import Wanted
from gateway.core.core import Core
from gateway.core.front.handler import Handler, TraceSource
from gateway.core.front.read import ModelNames, PromptSamples, RequestReader, WorkReader
from gateway.core.front.routes import RouteTable
from gateway.core.front.server import Server
from gateway.core.listeners import NOT_BOUND, Listeners
from gateway.core.observe.log import EventLog, unix_seconds
from gateway.core.turns import Steps, at_once, in_turns
from gateway.feature import Feature
from gateway.features.handover.snapshot import Knowledge
from gateway.features.operate.ports import OperatorPorts
from gateway.features.operate.reload import Reloads
from gateway.features.table import FEATURES, OPERATORS, FeatureEntry, imported

SomeFeature = TypeVar("SomeFeature", bound=Feature)


class Gateway:
    """Everything, put together; `running` runs it."""

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
        features: Sequence[FeatureEntry] = FEATURES,
    ) -> None:
        """`secret`: of cache salts, from the process before this one; `random` is seeded by the system, and not for
        secrets."""
        self._load, self.log = load or (lambda: config), log
        index = None
        if config.coordination.url:
            from gateway.features.coordination.announced_record import AnnouncedIndex

            index = AnnouncedIndex()
        core = self.core = Core(
            config,
            clock=clock,
            unix_seconds=unix_seconds,
            random=random or Random(),
            secret=secret,
            log_out=log_out,
            index=index,
        )
        self._entries = features
        self.features: dict[str, Feature] = {}
        self._running_features = AsyncExitStack()
        self._build(config)
        core.read_with(self._new_reader(config))
        self.handler = Handler(
            config,
            fleet=core.fleet,
            dispatchers=core.dispatchers,
            reader=core.reader,
            ledger=core.ledger,
            clock=clock,
            new_id=core.new_id,
            complete=core.prompts.complete,
            random=core.random,
            traces=self._traces(),
            sources=core.sources,
            apis=core.apis,
            routes=self._routes(),
        )
        core.on_keys.append(self._use_keys)
        self._use_keys()
        self.server = Server(config.server, self.handler, clock, memory=core.memory, supervisor=core.supervisor)
        self.reloads = Reloads(config, self._read, self.reload)
        operators: Callable[..., OperatorPorts] = imported(OPERATORS)
        self.operators = operators(
            core,
            self.features,
            server=self.server,
            handler=self.handler,
            reloads=self.reloads,
            reader=self._new_reader(config, is_dry=True),
            log=log,
        )
        core.fleet.on_leave.append(self._left)
        core.on_secret.append(lambda: self.apply(core.config))
        for feature in self.features.values():
            feature.read_with(config, core.reader)

    @property
    def knowledge(self) -> Knowledge:
        return self.operators.knowledge

    def feature(self, kind: type[SomeFeature]) -> SomeFeature:
        """The feature of this class. Raises LookupError if it is off."""
        for each in self.features.values():
            if isinstance(each, kind):
                return each
        raise LookupError(kind.__name__)

    def _new_reader(self, config: Config, *, is_dry: bool = False) -> RequestReader:
        """A reader of requests; dry runs are not sampled."""
        core, features = self.core, self.features.values()
        names: ModelNames | None = None
        samples: PromptSamples | None = None
        works: dict[str, WorkReader] = {}
        for feature in features:
            names = names if (given := feature.names(config)) is None else given
            samples = samples if (sampled := feature.samples()) is None else sampled
            works.update(feature.works(config))
        return RequestReader(
            config,
            estimates=core.cache_state.estimates,
            stored=core.store,
            salt_secret=core.salt_secret,
            tokenized=core.prompts.tokenized,
            report=None if is_dry else samples,
            memory=core.memory,
            names=ModelNames(core.fleet.names.first, config.models.by_name) if names is None else names,
            weights=core.fleet.names.weights,
            works=works,
        )

    def _traces(self) -> TraceSource | None:
        return next((traces for each in self.features.values() if (traces := each.traces()) is not None), None)

    def _use_keys(self, *_: object) -> None:
        self.handler.apply_keys(self.core.check_key)
        self._read_records()

    def _read_records(self) -> None:
        """Give records to those features that want them at present."""
        features = self.features.values()
        self.core.finished.consume_at_present(
            chain.from_iterable(each.consumers() for each in features),
            chain.from_iterable(each.batch_consumers() for each in features),
        )

    def _switched_on(self, config: Config) -> list[FeatureEntry]:
        """The features of a configuration that are not built yet."""
        return [each for each in self._entries if each.name not in self.features and each.is_on(config)]

    def _build(self, config: Config) -> list[Feature]:
        """Build the features that a configuration switches on. Those that it switches off stay, and do nothing."""
        built = list[Feature]()
        for entry in self._switched_on(config):
            feature = self.features[entry.name] = entry.found()(self.core)
            self.core.connect(feature)
            built.append(feature)
        return built

    def _routes(self) -> RouteTable:
        off = [each.off_paths for each in self._entries if each.name not in self.features]
        return RouteTable(self.core.routes, {path: why for paths in off for path, why in paths.items()})

    def _read(self) -> Config:
        """The configuration anew, in a thread, where new features are imported. Raises ConfigError."""
        config = self._load()
        for entry in self._switched_on(config):
            entry.found()
        for feature in self.features.values():
            feature.read_ahead(config)
        return config

    async def reload(self, config: Config) -> None:
        """Take over another configuration, a little at a time, and run the features that it switches on."""
        if built := self._build(config):
            self.handler.apply_routes(self._routes())
        await in_turns(self.apply_in_steps(config))
        for feature in built:
            await self._running_features.enter_async_context(feature.running())
            await self._running_features.enter_async_context(feature.serving())

    def apply(self, config: Config) -> None:
        at_once(self.apply_in_steps(config))

    def apply_in_steps(self, config: Config) -> Steps[None]:
        """Take over all but listening addresses (`reload.NEEDS_RESTART`); many backends change some at a time. Requests
        in flight are not disturbed."""
        core = self.core
        core.apply(config)
        for feature in self.features.values():
            feature.apply(config)
        if self.log is not None:
            self.log.apply(config.log.level, config.log.format)
        core.read_with(self._new_reader(config))
        self.handler.apply(config, core.reader, self._traces())
        for feature in self.features.values():
            feature.read_with(config, core.reader)
        self._read_records()
        self.server.apply(config.server)
        self.operators.apply(config, self._new_reader(config, is_dry=True))
        yield from core.membership.reconcile("file", [Wanted(backend) for backend in config.backends])
        self.operators.reloaded()

    def _left(self, backend: Backend) -> None:
        structlog.get_logger("gateway").info("backend_left", backend=backend.name, why=backend.draining)
        if backend.name not in self.core.fleet.by_name:
            self.core.metrics.forget_backend(backend.name)

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
            await enter(self.core.running())
            for feature in self.features.values():
                await enter(feature.running())
            await enter(self._running_features)
            stack.callback(self.core.finished.settle)  # the last records, while features still take them
            if ready is not None:
                await ready()
            for feature in self.features.values():
                await enter(feature.serving())
            admin = await enter(self.operators.listening(listeners, routes))
            await enter(self.server.listening(listeners.main))
            yield admin
