"""Data parallelism: the engines of all ranks with their KV event publishers, and vLLM's choice among them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import count
from typing import Final

from loadtest.engine.api.errors import rank_out_of_range
from loadtest.engine.choice import Choice
from loadtest.engine.config import EngineConfig
from loadtest.engine.engine_loop import EngineLoop, EngineStats, Running, TokenSink
from loadtest.engine.kv_event_publisher import KvEventLog, KvEventPublisher, KvEventPublishers
from loadtest.engine.kv_events import Address, KvEventsConfig, publish_address, replay_address
from loadtest.engine.scheduler import Scheduler

# Waiting requests weigh more the fuller the KV cache is, from half full on.
_WAITING_WEIGHT: Final = 6.0
_PRESSED_FROM: Final = 0.5


@dataclass(frozen=True, slots=True)
class RankLoad:
    """The load of one rank. `in_flight` counts this server's unfinished requests there."""

    in_flight: int
    waiting: int
    running: int
    _: KW_ONLY
    kv_usage: float

    @property
    def score(self) -> float:
        """vLLM's measure of load; the least one gets the next request."""
        pressure = max(0.0, self.kv_usage - _PRESSED_FROM)
        return max(self.in_flight, self.waiting + self.running) + self.waiting * _WAITING_WEIGHT * pressure


class RankBalancer:
    """Picks the least loaded rank; among equals, the search begins one further each time."""

    def __init__(self) -> None:
        self._first = 0

    def choose(self, loads: Sequence[RankLoad]) -> int:
        """The number of the rank for the next request."""
        count = len(loads)
        first, self._first = self._first, (self._first + 1) % count
        return min(((first + step) % count for step in range(count)), key=lambda rank: loads[rank].score)


class EngineRanks:
    """The engines of one server, in the order of their ranks."""

    def __init__(self, ranks: Sequence[EngineLoop], new_id: Callable[[], int]) -> None:
        self.ranks = ranks
        self.new_id = new_id
        # Requests refused because too many were queued.
        self.rejected = 0
        self._balancer = RankBalancer()

    @property
    def num_requests(self) -> int:
        """Sequences that have not ended, on all ranks."""
        return sum(rank.num_requests for rank in self.ranks)

    def reject(self) -> None:
        self.rejected += 1

    def submit(self, choice: Choice, sink: TokenSink, wants_every_token: bool) -> Running:
        """Queue an answer on the requested rank, else on the least loaded; ApiError if there is no such rank."""
        rank = self.ranks[self._rank_for(choice)]
        if choice.limit_tokens is not None:
            rank.stats.on_asked(choice.first_of, choice.limit_tokens)
        reason = "stop" if choice.finish_reason == "tool_calls" else choice.finish_reason  # of the engine itself
        return rank.submit(choice.sequence, sink, wants_every_token, reason)

    def abort(self, running: Running) -> None:
        """Take a sequence out immediately; nothing happens if it has ended."""
        running.loop.abort(running)

    def fail_all(self, failure: Exception) -> None:
        """The engines die: all sequences end with an error."""
        for rank in self.ranks:
            rank.fail_all(failure)

    def pause(self, paused: bool) -> None:
        """Stop or resume stepping, as hung engines would."""
        for rank in self.ranks:
            rank.pause(paused)

    def reset_prefix_cache(self) -> None:
        """Forget cached blocks, on the ranks where no sequence holds any."""
        for rank in self.ranks:
            rank.scheduler.reset_prefix_cache()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def _rank_for(self, choice: Choice) -> int:
        wanted = choice.rank
        if wanted is None:
            return self._balancer.choose([_load(rank) for rank in self.ranks])
        if not 0 <= wanted < len(self.ranks):
            raise rank_out_of_range(wanted, len(self.ranks))
        return wanted


def _load(rank: EngineLoop) -> RankLoad:
    scheduler = rank.scheduler
    usage = scheduler.pool.num_used / scheduler.pool.num_blocks
    return RankLoad(rank.num_requests, scheduler.num_waiting, scheduler.num_running, kv_usage=usage)


def new_publishers(
    config: EngineConfig, unix_seconds: Callable[[], float], earlier: KvEventPublishers | None = None
) -> KvEventPublishers | None:
    """Publishers that count from 0, at the configured addresses or their predecessors'; None without KV events."""
    events = config.kv_events
    if events is None:
        return None
    addresses = (
        [_addresses(events, rank, config.host) for rank in range(config.data_parallel_size)]
        if earlier is None
        else [publisher.addresses for publisher in earlier.by_rank]
    )
    return KvEventPublishers(
        KvEventPublisher(
            events, rank, KvEventLog(config.limits.block_size, events.hashes), unix_seconds=unix_seconds, addresses=pair
        )
        for rank, pair in enumerate(addresses)
    )


def _addresses(events: KvEventsConfig, rank: int, host: str) -> tuple[Address, Address | None]:
    published, replay = publish_address(events.endpoint, rank, host), events.replay_endpoint
    return published, None if replay is None else replay_address(replay, rank, host)


def new_engines(
    config: EngineConfig, publishers: KvEventPublishers | None, loop: asyncio.AbstractEventLoop
) -> EngineRanks:
    """Engines with empty caches, which log their changes with the publishers."""
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
    return EngineLoop(scheduler, EngineStats(config.max_model_len), config.time_scale, loop=loop, after_step=after_step)
