"""Files and batches: offline work on idle capacity."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from gateway.config import Config
from gateway.core.core import Core
from gateway.core.front.handler import LocalApi
from gateway.core.front.read import RequestReader
from gateway.core.front.routes import Route
from gateway.core.threads import breather
from gateway.feature import Feature
from gateway.features.batches.line_leases import LineLeases
from gateway.features.batches.metrics import BatchMetrics
from gateway.features.batches.offline import OfflineQueue
from gateway.features.batches.routes import BATCH_ROUTES
from gateway.features.batches.run import RunParts
from gateway.features.batches.sender import LineSender
from gateway.features.batches.service import Batches
from gateway.features.batches.slots import Slots


class BatchesFeature(Feature):
    """Owner of the API of files and batches; on where `batches.path` is set."""

    def __init__(self, core: Core) -> None:
        self._core = core
        config = core.config
        assert config.batches.path is not None
        self.offline = OfflineQueue(
            scheduler=core.scheduler,
            queue=core.queue,
            itl_objective_seconds=config.admission.itl_objective_seconds,
        )
        core.lower(self.offline, LineLeases(broker=core.lease_broker, offline=self.offline), self.offline.counts)
        sender = LineSender(
            {**core.dispatchers, "": core.feature_dispatcher},
            core.prompts.complete,
            ledger=core.ledger,
            clock=core.clock,
            unix_seconds=core.unix_seconds,
            new_id=core.new_id,
        )
        metrics = BatchMetrics(core.metrics)
        parts = RunParts(
            sender,
            memory=core.memory,
            slots=Slots(config.batches.lines_in_flight),
            metrics=metrics,
            unix_seconds=core.unix_seconds,
            new_id=core.new_id,
            random=core.random,
            breather=breather,
            engines_of=self._engines_of,
            knows_model=self._knows_model,
            supervisor=core.supervisor,
        )
        self.batches = Batches(config.batches.path, config, parts)
        metrics.watch(self.batches)
        core.on_keys.append(self.batches.apply_keys)
        self.batches.apply_keys(core.keys, are_needed=core.check_key is not None)

    def routes(self) -> Mapping[tuple[bytes, bytes], Route]:
        return BATCH_ROUTES

    def apis(self) -> Mapping[str, LocalApi]:
        return {"batches": self.batches}

    def apply(self, config: Config) -> None:
        self.offline.apply(config.admission.itl_objective_seconds)

    def read_with(self, config: Config, reader: RequestReader) -> None:
        self.batches.apply(config, reader)

    def exclusive(self) -> Batches:
        return self.batches

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        await self.batches.open()
        try:
            yield
        finally:
            await self.batches.stop_last()

    def _knows_model(self, name: str) -> bool:
        return any(self._core.fleet.candidates(model) is not None for model in self._models_named(name))

    def _engines_of(self, name: str) -> int:
        return max([len(self._core.fleet.serving(model) or ()) for model in self._models_named(name)], default=0)

    def _models_named(self, name: str) -> Sequence[str]:
        return self._core.reader.names.listed.get(name, (name,))
