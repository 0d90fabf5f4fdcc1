"""Several gateways in front of one fleet: replicas share the engines through Redis or Valkey."""

import secrets
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from gateway.core.core import Core
from gateway.core.observe.metrics import Metrics
from gateway.feature import Feature
from gateway.features.coordination.announced_record import AnnouncedIndex
from gateway.features.coordination.coordinator import Coordinator
from gateway.features.coordination.demand import Demands
from gateway.features.coordination.link import RedisLink
from gateway.features.coordination.replica import ReplicaBlocks
from gateway.features.coordination.responses import ResponseExchange
from gateway.features.coordination.sharing import CacheSharing
from gateway.features.responses.stored import StoredResponses

_NAME_BYTES = 8


class CoordinationFeature(Feature):
    """This gateway among others; on where `coordination.url` is set."""

    def __init__(self, core: Core) -> None:
        config, fleet, index, stored = core.config, core.fleet, core.cache_state.index, core.store
        assert isinstance(index, AnnouncedIndex)
        assert isinstance(stored, StoredResponses)
        new_name = partial(secrets.token_hex, _NAME_BYTES)
        link = RedisLink(config.coordination, new_name(), core.supervisor)
        blocks = ReplicaBlocks(link.replica, config.coordination.expected_replicas, new_name)
        follow_secret = None if config.auth.cache_salt_secret else core.share_secret
        sharing = CacheSharing(
            link,
            fleet=fleet,
            index=index,
            is_followed=core.prompts.covers,
            responses=ResponseExchange(stored),
            clock=core.clock,
            supervisor=core.supervisor,
            secret=core.random_secret,
            follow_secret=follow_secret,
        )
        demands = Demands(
            fleet, core.queue, core.cache_state.output_lengths, kv_headroom=lambda: core.config.admission.kv_headroom
        )
        self.coordinator = Coordinator(
            link,
            blocks=blocks,
            sharing=sharing,
            fleet=fleet,
            demands=demands,
            broker=core.lease_broker,
            counted=core.replicas_changed,
            clock=core.clock,
            supervisor=core.supervisor,
        )
        core.count_replicas(lambda: blocks.live)

    def add_gauges(self, metrics: Metrics) -> None:
        self.coordinator.add_gauges(metrics)

    def running(self) -> AbstractAsyncContextManager[None]:
        return self.coordinator.taking_part()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with self.coordinator.sharing.running():
            yield
