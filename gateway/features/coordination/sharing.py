"""Carries the messages of peers over Redis or Valkey, and agrees on the secret of cache salts there.

Requests never wait for any of this. Each gateway publishes its updates on a channel of its own, which its peers hear,
and gets questions and snapshots on another one. Lost updates are detected by their numbers.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Final

from gateway.core.backends.backend import Backend
from gateway.core.backends.fleet import Fleet
from gateway.core.observe.metrics import Metrics
from gateway.core.supervisor import Supervisor
from gateway.features.coordination.announced_record import AnnouncedIndex
from gateway.features.coordination.exchange import Exchange
from gateway.features.coordination.link import RedisLink
from gateway.features.coordination.responses import ResponseExchange
from gateway.features.coordination.store import StoreLost
from gateway.features.handover.slots import engines_by_key

_RETRY_SECONDS: Final = 0.5
_LONG_BYTES: Final = 4096  # of a message that takes a while
_MOST_LONG: Final = 64  # that wait: others are lost, which is noticed
_PART_SECONDS: Final = 0.002  # between parts of a snapshot
_SECRET_SECONDS: Final = 10.0  # a server that restarted empty has lost it
_LEAST_SECRET_BYTES, _MOST_SECRET_BYTES = 16, 1024


class CacheSharing:
    """The exchange of one gateway, over the network. `is_followed`: see `Exchange`.

    `secret`: of cache salts, until others have a common one; `follow_secret` takes that over, None = it is configured.
    """

    def __init__(
        self,
        link: RedisLink,
        *,
        fleet: Fleet,
        index: AnnouncedIndex,
        is_followed: Callable[[int], bool],
        responses: ResponseExchange,
        clock: Callable[[], float],
        supervisor: Supervisor,
        secret: bytes,
        follow_secret: Callable[[bytes], None] | None,
    ) -> None:
        self._link, self._clock, self._supervisor = link, clock, supervisor
        self._secret, self._follow_secret = secret, follow_secret
        self._updates, self._places = link.name(f"caches:{link.replica}"), link.name(f"stored:{link.replica}")
        self._responses = responses
        self._peers: list[str] = []
        self._long: deque[bytes] = deque()
        self._has_long, self._has_questions = asyncio.Event(), asyncio.Event()
        named = lambda: [(key, engine) for key, _, engine in engines_by_key(fleet.backends)]  # noqa: E731
        self.exchange = Exchange(link.replica, index, named, is_followed=is_followed)
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

    def _left(self, backend: Backend) -> None:
        self.exchange.left(backend.all_engines)

    def follow_peers(self, peers: Iterable[str]) -> dict[bytes, Callable[[bytes], None]]:
        """Take over the other replicas; returns the channels to hear, and the receiver of messages."""
        known, before, name = self.exchange.follow_peers(sorted(peers)), self._peers, self._link.name
        if not {*known} <= {*before}:
            self._responses.peer_joined()
        self._peers = known
        channels = [name(f"to:{self._link.replica}"), *[name(f"caches:{peer}") for peer in known]]
        places = dict.fromkeys([name(f"stored:{peer}") for peer in known], self._on_places)
        return {**dict.fromkeys(channels, self._on_message), **places}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Exchange messages with others while the block runs."""
        self.exchange.begin()
        steps = [("cache_updates_received", self._read_long), ("cache_snapshots", self._answer)]
        if self._follow_secret is not None:
            steps.append(("cache_salt_secret", partial(self._agree_on_secret, self._follow_secret)))
        async with AsyncExitStack() as stack:
            for task, step in steps:
                await stack.enter_async_context(self._supervisor.repeating(task, step, _RETRY_SECONDS))
            stack.enter_context(self._supervisor.looking("cache_updates", self._publish))
            yield

    def _publish(self) -> None:
        link, exchange, now = self._link, self.exchange, self._clock()
        if not link.is_up:
            return exchange.missed()
        for message in exchange.due(now):
            link.publish(self._updates, message)
        if self._peers and (places := self._responses.due()) is not None and link.publish(self._places, places):
            self._responses.sent()
        if (question := exchange.next_question(now)) is not None:
            asked, message = question
            link.publish(link.name(f"to:{asked}"), message)
        if exchange.is_asked:
            self._has_questions.set()

    async def _agree_on_secret(self, follow: Callable[[bytes], None]) -> None:
        key = self._link.name("secret")
        try:
            await self._link.ask("SET", key, self._secret, "NX")
            found = await self._link.ask("GET", key)
        except StoreLost:
            return await asyncio.sleep(_RETRY_SECONDS)
        if type(found) is bytes and _LEAST_SECRET_BYTES <= len(found) <= _MOST_SECRET_BYTES and found != self._secret:
            self._secret = found
            follow(found)
        await asyncio.sleep(_SECRET_SECONDS)

    def _on_message(self, data: bytes) -> None:
        """Use it immediately; a long one when the loop is idle, with its successors after it."""
        if not self._long and len(data) <= _LONG_BYTES:
            self.exchange.receive(data, self._clock())
        elif len(self._long) < _MOST_LONG:
            self._long.append(data)
            self._has_long.set()

    def _on_places(self, data: bytes) -> None:
        if not self._responses.receive(data):
            self.exchange.counts["refused_malformed"] += 1

    async def _read_long(self) -> None:
        await self._has_long.wait()
        self._has_long.clear()
        while self._long:
            self.exchange.receive(self._long.popleft(), self._clock())
            await asyncio.sleep(0)

    async def _answer(self) -> None:
        await self._has_questions.wait()
        self._has_questions.clear()
        if (answer := self.exchange.next_answer()) is None:
            return
        asker, parts = answer
        for part in parts:
            if not self._link.publish(self._link.name(f"to:{asker}"), part):
                return  # it requests again
            await asyncio.sleep(_PART_SECONDS)
