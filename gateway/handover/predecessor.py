"""The process that serves, and lets another one take over. `successor` has the conversation."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog

from gateway.handover.channel import PROTOCOL, Channel, listen
from gateway.handover.slots import SlotSharing, uses_of
from gateway.handover.snapshot import FORMAT, Knowledge, in_memory
from gateway.listeners import Listeners

_HELLO_SECONDS = 5.0
_READY_SECONDS = 150.0

log = structlog.get_logger("gateway")


@dataclass
class Predecessor:
    """Waits for the process that takes over. `began` is set once it has.

    `addresses`: as configured, by port (`main`, `admin`, `metrics`), with the sockets in `listeners`. `stop_listening`:
    on all.
    """

    knowledge: Knowledge
    sharing: SlotSharing
    stop_listening: Callable[[], Awaitable[None]]
    addresses: dict[str, tuple[str, int]]
    listeners: Listeners
    breathe: Callable[[], None]
    began: asyncio.Event = field(default_factory=asyncio.Event)
    successor_pid: int = 0
    _channel: Channel | None = None
    _reported: tuple[int, dict[str, int]] = (0, {})  # number of the last needs, and requests by key
    _sent_stored: int = 0  # responses that the other process knows
    _sent_use: dict[str, Any] = field(default_factory=dict)  # of keys, as far as the other process knows it

    @asynccontextmanager
    async def waiting(self, address: bytes) -> AsyncIterator[None]:
        """Let another process take over while the block runs."""
        try:
            listener = listen(address)
        except OSError as error:
            log.warning("no_handover", reason=f"another process waits for its successor: {error.strerror}")
            yield
            return
        task = asyncio.get_running_loop().create_task(self._accept(listener), name="handover")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while not self.began.is_set():
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptor is left
                log.error("handover_failed", error=str(error))
                await asyncio.sleep(1.0)
                continue
            channel = Channel(connection)
            try:
                await self._talk(channel, listener)
            except Exception as error:
                log.exception("handover_failed", error=str(error))
            finally:
                if self._channel is not channel:
                    channel.post({"is": "refusal", "reason": "the handover failed, or the process stops"})
                    channel.close()

    async def _talk(self, channel: Channel, listener: socket.socket) -> None:
        if not channel.is_own:
            return
        async with asyncio.timeout(_HELLO_SECONDS):
            hello = await channel.receive()
        if hello is None:
            return
        hello.close()
        if hello.content["protocol"] != PROTOCOL:
            channel.post({"is": "refusal", "reason": "its version cannot hand over to this one; stop it first"})
            return
        log.info("handing_over", pid=channel.pid)
        await self._offer(channel, with_snapshot=hello.content["format"] == FORMAT)
        async with asyncio.timeout(_READY_SECONDS):
            ready = await channel.receive()
        if ready is not None:
            ready.close()
        if ready is None or ready.content["is"] != "ready":
            log.error("handover_failed", pid=channel.pid, hint="the new process gave up; this one goes on")
            return
        self.successor_pid = channel.pid
        listener.close()  # the other process waits for its own successor from now on
        await self.stop_listening()
        self._channel = channel
        self.sharing.hand_over()
        self._post("go")
        self.began.set()

    async def _offer(self, channel: Channel, *, with_snapshot: bool) -> None:
        offered = [(name, each) for name, sockets in self.listeners._asdict().items() for each in sockets]
        snapshot: list[int] = []
        if with_snapshot:
            sections, self._sent_stored = await self.knowledge.take(), self.knowledge.stored.noted
            self._sent_use = {
                "spent": sections["spent"],
                "usage": (sections["usage"]["day"], sections["usage"]["rows"]),
            }
            snapshot.append(await asyncio.to_thread(in_memory, sections, self.breathe))
        files = [os.dup(each.fileno()) for _, each in offered] + snapshot
        names = [name for name, _ in offered]
        channel.post({"is": "offer", "addresses": self.addresses, "listeners": names}, files)

    def _post(self, kind: str, *, is_last: bool = False) -> None:
        assert self._channel is not None
        knowledge, sharing = self.knowledge, self.sharing
        stored, self._sent_stored = knowledge.stored_since(self._sent_stored), knowledge.stored.noted
        self._reported = sharing.number, knowledge.handler.running()
        news = {"number": sharing.number, "needs": sharing.needs, "running": self._reported[1], "stored": stored}
        if kind == "go":  # what was changed by hand since the offer
            news["membership"] = knowledge.membership.state()
        if kind == "go" or is_last:
            news["use"], self._sent_use = knowledge.use_since(self._sent_use), knowledge.use()
        self._channel.post({"is": kind, **news})

    def report(self) -> None:
        """Report what is needed to the process that took over, if that has changed."""
        if self._channel is not None and self._reported != (self.sharing.number, self.knowledge.handler.running()):
            self._post("needs")

    def give_client(self, file: int) -> None:
        """Pass the connection of a client on to the process that took over."""
        assert self._channel is not None
        self._channel.post({"is": "client"}, [file])

    async def part(self) -> None:
        """Wait until all that was given is sent; the other process ends the conversation when it has read it."""
        assert self._channel is not None
        self._post("needs", is_last=True)
        await self._channel.part()

    async def follow(self) -> None:
        """Use what the process that took over lends, until it ends or this is cancelled."""
        assert self._channel is not None
        try:
            while (message := await self._channel.receive()) is not None:
                if message.content["is"] == "lent":
                    self.sharing.borrow(message.content["number"], uses_of(message.content["lent"]))
                message.close()
        finally:
            self.sharing.go_on_alone()
            self._channel.close()
