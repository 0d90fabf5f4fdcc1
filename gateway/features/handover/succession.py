"""The exchange of this process with its predecessor and its successor, from its start to its end."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import structlog

from gateway.core.core import Core
from gateway.core.front.server import Server
from gateway.core.supervisor import running
from gateway.features.handover.conversation import Predecessor, Successor, TakeoverRefused
from gateway.features.handover.slots import SlotSharing
from gateway.features.handover.snapshot import Knowledge
from gateway.features.handover.systemd import notify_systemd
from gateway.features.responses.background import BackgroundResponses

_KNOWN_SECONDS = 10.0  # most time until all backends are probed, before this process takes over
_LOOK_SECONDS = 0.02
_SHARE_SECONDS = 0.05
_SHARE_TIMES = 20  # times the duration of a step: for thousands of engines, tens of milliseconds
_PARTING_SECONDS = 10.0  # until the process that took over has taken the last clients


class Serving(Protocol):
    """The parts of a gateway that take part in a hand-over."""

    core: Core
    server: Server

    @property
    def knowledge(self) -> Knowledge: ...


class Handover:
    """This process as a successor, and as a predecessor."""

    def __init__(
        self,
        gateway: Serving,
        sharing: SlotSharing,
        predecessor: Predecessor,
        *,
        background: BackgroundResponses,
        successor: Successor | None,
        stop: asyncio.Event,
    ) -> None:
        self._stop = stop
        self._gateway = gateway
        self._sharing = sharing
        self._background = background
        self._predecessor = predecessor  # this process as predecessor
        self._successor = successor  # this process as successor
        self._before_has_ended = asyncio.Event()
        self._log = structlog.get_logger("gateway")

    async def take_place(self) -> None:
        """Wait until the backends are known, then take the place of the process before, if there is one."""
        if self._successor is None:
            return
        gateway, loop = self._gateway, asyncio.get_running_loop()
        until = loop.time() + _KNOWN_SECONDS
        while not (gateway.core.fleet.is_known or self._stop.is_set()):
            if loop.time() > until:
                break
            await asyncio.sleep(_LOOK_SECONDS)
        if self._stop.is_set():
            raise TakeoverRefused("this process was told to stop before it took over")

        def heard(news: dict[str, Any]) -> None:
            gateway.knowledge.limits.run_elsewhere(news["running"])
            gateway.knowledge.restore_stored(news["stored"])
            if "membership" in news:
                gateway.core.membership.restore(news["membership"], ())
            if "use" in news:
                gateway.knowledge.restore_use(news["use"])

        await self._successor.go(self._sharing, heard)

    @asynccontextmanager
    async def sharing_slots(self) -> AsyncIterator[None]:
        """Share slots with the process before while the block runs, and take its clients."""
        async with running(self._follow_before()), self._gateway.core.supervisor.repeating("sharing", self._share, 1.0):
            yield

    async def _follow_before(self) -> None:
        if self._successor is not None:
            with self._gateway.core.supervisor.guard("handover"):
                await self._successor.lend(self._adopt)
        self._before_has_ended.set()

    async def _adopt(self, client: socket.socket) -> None:
        if self._predecessor.began.is_set():
            self._predecessor.give_client(client.detach())
        else:
            await self._gateway.server.adopt(client)

    async def _share(self) -> None:
        if self._before_has_ended.is_set():
            await self._predecessor.began.wait()
        started = time.monotonic()
        self._sharing.step()
        took = time.monotonic() - started
        self._predecessor.report()
        if self._successor is not None:
            self._successor.report()
        await asyncio.sleep(max(_SHARE_SECONDS, _SHARE_TIMES * took))

    async def wait_for_before(self) -> None:
        """Wait until the predecessor has ended its streams: a supervisor of both may end it with this process."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._gateway.core.config.server.drain_timeout_seconds):
                await self._before_has_ended.wait()

    async def hand_over(self) -> None:
        """The successor serves: end the requests in flight with the slots that it lends, and pass the clients on."""
        server, pid = self._gateway.server, self._predecessor.successor_pid
        notify_systemd(os.environ, f"MAINPID={pid}")
        self._log.info("handed_over", pid=pid, answering=server.answering)
        async with running(self._predecessor.borrow()) as following:
            await server.give_away(self._predecessor.give_client)
            with suppress(TimeoutError):
                async with asyncio.timeout(server.config.drain_timeout_seconds):
                    await self._background.all_over()  # they hold slots that this process was lent
            await self._background.stop()  # so that the cost of the rest is passed on
            await self.wait_for_before()
            with suppress(TimeoutError):
                self._gateway.core.finished.settle()
                async with asyncio.timeout(_PARTING_SECONDS):
                    await self._predecessor.part()
                    await following
