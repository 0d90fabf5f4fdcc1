"""What a restart replaces: the engines of all ranks and the publishers of their KV events."""

import asyncio
from collections.abc import Callable
from itertools import count

from loadtest.engine.config import EngineConfig, KvEventsConfig
from loadtest.engine.data_parallel import EngineRanks
from loadtest.engine.engine_loop import EngineLoop
from loadtest.engine.engine_stats import EngineStats
from loadtest.engine.kv_event_addresses import Address, publish_address, replay_address
from loadtest.engine.kv_event_log import KvEventLog
from loadtest.engine.kv_event_publisher import KvEventPublisher, KvEventPublishers
from loadtest.engine.scheduler import Scheduler


def new_publishers(
    config: EngineConfig, unix_seconds: Callable[[], float], earlier: KvEventPublishers | None = None
) -> KvEventPublishers | None:
    """Publishers that count from 0, at the configured addresses or at those of earlier ones; None without KV events."""
    events = config.kv_events
    if events is None:
        return None
    addresses = (
        [_addresses(events, rank, config.host) for rank in range(config.data_parallel_size)]
        if earlier is None
        else [publisher.addresses for publisher in earlier.by_rank]
    )
    return KvEventPublishers(
        KvEventPublisher(events, rank, KvEventLog(config.limits.block_size, events.hashes), unix_seconds, pair)
        for rank, pair in enumerate(addresses)
    )


def _addresses(events: KvEventsConfig, rank: int, host: str) -> tuple[Address, Address | None]:
    published, replay = publish_address(events.endpoint, rank, host), events.replay_endpoint
    return published, None if replay is None else replay_address(replay, rank, host)


def new_engines(
    config: EngineConfig, publishers: KvEventPublishers | None, loop: asyncio.AbstractEventLoop
) -> EngineRanks:
    """Engines with empty caches, which tell their changes to the publishers."""
    return EngineRanks([_engine(config, publishers, rank, loop) for rank in range(config.data_parallel_size)], _ids())


def _ids() -> Callable[[], int]:
    numbers = count(1)
    return lambda: next(numbers)


def _engine(
    config: EngineConfig, publishers: KvEventPublishers | None, rank: int, loop: asyncio.AbstractEventLoop
) -> EngineLoop:
    publisher = None if publishers is None else publishers.by_rank[rank]
    scheduler = Scheduler(config.limits, config.step_time, None if publisher is None else publisher.log)
    after_step = None if publisher is None else publisher.flush
    return EngineLoop(scheduler, EngineStats(config.max_model_len), config.time_scale, loop, after_step)
