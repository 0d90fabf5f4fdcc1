"""Carries the messages between gateways over Redis or Valkey, and agrees on the secret of cache salts there.

Requests never wait for any of this. Updates are published on a channel that all gateways of the fleet hear, snapshots
on a channel of the gateway that asked. What is lost meanwhile is noticed by the numbers of updates. Streams would keep
updates for those who come later, but reading one costs more than twice the CPU of a published message.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from gateway.backends.backend import Backend
from gateway.backends.fleet import Fleet
from gateway.config.coordination import CoordinationConfig
from gateway.coordination.exchange import Exchange
from gateway.coordination.redis_client import CALL_SECONDS, heed_cancellation, open_client, shared_name
from gateway.handover.slots import engines_by_key
from gateway.observe.metrics import Metrics
from gateway.routing.announced_record import AnnouncedIndex
from gateway.supervisor import Supervisor

if TYPE_CHECKING:
    from redis.asyncio import Redis

UPDATE_SECONDS = 0.05
_RETRY_SECONDS = 0.5
_SILENCE_SECONDS = 5.0  # a gateway hears its own updates every second: the connection is dead
_LONG_BYTES = 2048  # of a message that takes a while; of shorter ones a few are read in a row
_LOOK_SECONDS = 0.25  # for questions
_PART_SECONDS = 0.002  # between parts of a snapshot
_SECRET_SECONDS = 10.0  # a server that restarted empty has lost it
_LEAST_SECRET_BYTES, _MOST_SECRET_BYTES = 16, 1024


class CacheSharing:
    """The exchange of one gateway, over the network. `is_followed`: see `Exchange`.

    `secret`: of cache salts, until others have one in common; `follow_secret` takes that over, None = it is configured.
    """

    def __init__(
        self,
        config: CoordinationConfig,
        fleet: Fleet,
        index: AnnouncedIndex,
        is_followed: Callable[[int], bool],
        clock: Callable[[], float],
        supervisor: Supervisor,
        secret: bytes,
        *,
        follow_secret: Callable[[bytes], None] | None,
    ) -> None:
        self._config = config
        self._channel = partial(shared_name, config)
        self._clock = clock
        self._supervisor = supervisor
        self._secret, self._follow_secret = secret, follow_secret
        self._secret_seconds = -math.inf
        named = lambda: [(key, engine) for key, _, engine in engines_by_key(fleet.backends)]  # noqa: E731
        self.exchange = Exchange(token_hex(8), index, named, is_followed)
        fleet.on_change.append(self.exchange.follow_fleet)
        fleet.on_leave.append(self._left)

    def add_gauges(self, metrics: Metrics) -> None:
        counts = self.exchange.counts
        metrics.counter(
            "gateway_cache_updates_total",
            "Messages of gateways about prefix caches and loads, by what was done with them.",
            ("result",),
            lambda: [((result,), count) for result, count in counts.items()],
        )
        text = "Other gateways whose prefix caches and loads are known."
        metrics.gauge("gateway_cache_update_peers", text, (), lambda: [((), self.exchange.live_peers)])

    def _left(self, backend: Backend) -> None:
        self.exchange.left(backend.all_engines)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Exchange messages with others while the block runs."""
        self.exchange.begin()
        name = f"{self._config.name}:{self.exchange.own}:caches"
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(open_client(self._config, name))
            for task, step in (
                ("cache_updates", self._publish),
                ("cache_updates_received", self._receive),
                ("cache_snapshots", self._answer),
            ):
                await stack.enter_async_context(
                    self._supervisor.repeating(task, partial(self._connected, step, client), _RETRY_SECONDS)
                )
            yield

    async def _connected(self, step: "Callable[[Redis], Awaitable[None]]", client: "Redis") -> None:
        """A step that fails with the connection is no defect: it is repeated in a while."""
        from redis.exceptions import RedisError  # of a package that few need

        try:
            await step(client)
        except (RedisError, OSError):
            heed_cancellation()
            self.exchange.counts["disconnects"] += 1
            await asyncio.sleep(_RETRY_SECONDS)

    async def _publish(self, client: "Redis") -> None:
        await asyncio.sleep(UPDATE_SECONDS)
        now = self._clock()
        messages = self.exchange.due(now)
        if messages:
            async with asyncio.timeout(CALL_SECONDS):
                for message in messages:
                    await client.publish(self._channel("caches"), message)
        if self._follow_secret is not None and now - self._secret_seconds >= _SECRET_SECONDS:
            async with asyncio.timeout(CALL_SECONDS):
                await self._agree_on_secret(client, self._follow_secret)
            self._secret_seconds = now

    async def _agree_on_secret(self, client: "Redis", follow: Callable[[bytes], None]) -> None:
        key = self._channel("secret")
        await client.set(key, self._secret, nx=True)
        found = await client.get(key)
        if type(found) is bytes and _LEAST_SECRET_BYTES <= len(found) <= _MOST_SECRET_BYTES and found != self._secret:
            self._secret = found
            follow(found)

    async def _receive(self, client: "Redis") -> None:
        """Listen to all channels until the connection fails."""
        loop = asyncio.get_running_loop()
        async with client.pubsub() as pubsub, asyncio.timeout(_SILENCE_SECONDS) as limit:
            await pubsub.subscribe(self._channel("caches"), self._channel(f"caches:{self.exchange.own}"))
            message: dict[str, Any]
            async for message in pubsub.listen():
                limit.reschedule(loop.time() + _SILENCE_SECONDS)
                if message["type"] == "message":
                    self.exchange.receive(message["data"], self._clock())
                    if len(message["data"]) > _LONG_BYTES:
                        await asyncio.sleep(0)  # there may be more already, and requests come between

    async def _answer(self, client: "Redis") -> None:
        await asyncio.sleep(_LOOK_SECONDS)
        if (answer := self.exchange.next_answer()) is None:
            return
        asker, parts = answer
        for part in parts:
            async with asyncio.timeout(CALL_SECONDS):
                await client.publish(self._channel(f"caches:{asker}"), part)
            await asyncio.sleep(_PART_SECONDS)
