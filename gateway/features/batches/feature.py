"""Files and batches: offline work on idle capacity."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from gateway.config import Config
from gateway.core.core import Core
from gateway.core.front.handler import LocalApi
from gateway.core.front.read import RequestReader
from gateway.core.front.routes import Route
from gateway.core.observe.metrics import Metrics
from gateway.feature import Feature
from gateway.features.batches.line_leases import LineLeases
from gateway.features.batches.metrics import BatchCounters
from gateway.features.batches.offline import OfflineQueue
from gateway.features.batches.routes import BATCH_ROUTES
from gateway.features.batches.sender import LineSender
from gateway.features.batches.service import Batches


class BatchesFeature(Feature):
    """Owner of the API of files and batches; on where `batches.path` is set."""

    def __init__(self, core: Core) -> None:
        self._core = core
        config = core.config
        self.offline = OfflineQueue(
            scheduler=core.scheduler,
            queue=core.queue,
            itl_objective_seconds=config.admission.itl_objective_seconds,
        )
        core.lower(self.offline, LineLeases(broker=core.lease_broker, offline=self.offline), self.offline.counts)
        self._sender = LineSender(
            {**core.dispatchers, "": core.feature_dispatcher},
            core.prompts.complete,
            ledger=core.ledger,
            memory=core.memory,
            clock=core.clock,
            unix_seconds=core.unix_seconds,
            new_id=core.new_id,
        )
        core.on_keys.append(self._sender.apply_keys)
        self._sender.apply_keys(core.keys, core.check_key is not None)
        counters = BatchCounters(core.metrics)
        self.batches = Batches(core, self._sender, counters, engines_of=self._engines_of)

    def routes(self) -> Mapping[tuple[bytes, bytes], Route]:
        return BATCH_ROUTES

    def apis(self) -> Mapping[str, LocalApi]:
        return {"batches": self.batches}

    def add_gauges(self, metrics: Metrics) -> None:
        runner, files = self.batches.runner, self.batches.files
        metrics.gauge(
            "gateway_batches",
            "Offline batches that have not ended, by status; paused: no room, no bucket, or no tokens left of the key.",
            ("status",),
            lambda: [((state,), count) for state, count in runner.states().items()],
        )
        metrics.gauge(
            "gateway_batches_promoted",
            "Offline batches that use more than idle capacity, by the class of their requests: time is short.",
            ("class",),
            lambda: [((name,), count) for name, count in runner.promoted().items()],
        )
        text = "Size of uploaded files and results of batches."
        metrics.gauge("gateway_batch_files_bytes", text, (), lambda: [((), files.size_bytes)])

    def apply(self, config: Config) -> None:
        self.offline.apply(config.admission.itl_objective_seconds)

    def read_with(self, config: Config, reader: RequestReader) -> None:
        self.batches.apply(config)
        self._sender.apply(config, reader)

    def exclusive(self) -> Batches:
        return self.batches

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        await self.batches.open()
        try:
            yield
        finally:
            await self.batches.stop_last()

    def _engines_of(self, name: str) -> int | None:
        """How many engines serve a model of this name at the moment; None = there is no such model."""
        fleet = self._core.fleet
        models = [model for model in self._models_named(name) if fleet.candidates(model) is not None]
        return max([len(fleet.serving(model) or ()) for model in models], default=None)

    def _models_named(self, name: str) -> Sequence[str]:
        return self._core.reader.names.listed.get(name, (name,))
