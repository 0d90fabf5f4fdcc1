"""Embeddings in batches across clients, and long lists to score or rank in pieces."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from gateway.config import Config
from gateway.core.core import Core
from gateway.core.front.read import WorkReader
from gateway.core.front.reply import RequestDispatcher
from gateway.feature import Feature
from gateway.features.embeddings.batcher import Batcher
from gateway.features.embeddings.kinds import Coalescer, RerankSplitter
from gateway.features.embeddings.metrics import EmbeddingMetrics
from gateway.features.embeddings.reading import COALESCED, SPLIT, work_readers


class EmbeddingsFeature(Feature):
    """Owner of the batches of embeddings, and of the pieces of long lists."""

    def __init__(self, core: Core) -> None:
        config = core.config
        self.batcher = Batcher(
            fleet=core.fleet,
            dispatch=core.feature_dispatcher.dispatch,
            config=config.embeddings,
            backlog=core.queue.backlog,
            max_wait_seconds=config.admission.max_wait_seconds,
            retry_after=core.lease_broker.retry_after_seconds,
            metrics=EmbeddingMetrics(core.metrics),
            clock=core.clock,
            memory=core.memory,
            crowded=core.queue.waiting,
            response_headers=config.server.response_headers,
        )
        self.coalescer = Coalescer(self.batcher, core.new_id, core.prompts)
        self.rerank_splitter = RerankSplitter(self.batcher)
        core.fleet.on_restart.append(lambda _: self.rerank_splitter.forget())

    def dispatchers(self) -> Mapping[str, RequestDispatcher]:
        return {COALESCED: self.coalescer, SPLIT: self.rerank_splitter}

    def works(self, config: Config) -> Mapping[str, WorkReader]:
        return work_readers(config)

    def apply(self, config: Config) -> None:
        headers = config.server.response_headers
        self.batcher.apply(config.embeddings, config.admission.max_wait_seconds, response_headers=headers)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self.batcher.stop()
