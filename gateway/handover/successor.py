"""The process that takes over: it asks the one that serves for its sockets and its knowledge, and then for its place.

The conversation: `hello`, `offer` with the sockets and a snapshot, `ready`, `go`. From then on this process serves. The
other one sends `needs`, answered by `lent`, and `client` with the connections of clients that wait for no answer, until
it has ended. Before `go` the other one serves as if nothing had happened: a new process that fails costs nothing.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import structlog

from gateway.config import ServerConfig
from gateway.handover.channel import PROTOCOL, Channel, Message, connect
from gateway.handover.slots import SlotSharing, uses_of
from gateway.handover.snapshot import FORMAT, SnapshotError, read
from gateway.listeners import Listeners, ports_of
from gateway.routing.engine import EngineUse

_OFFER_SECONDS = 60.0

log = structlog.get_logger("gateway")


class TakeoverRefused(Exception):
    """The process that serves does not let this one take over; the message says why."""


class Successor:
    """This process's end of the conversation, and what came with the offer."""

    _sharing: SlotSharing
    _heard: Callable[[dict[str, Any]], None]

    def __init__(self, channel: Channel, offer: Message) -> None:
        self._channel = channel
        self._addresses: dict[str, tuple[str, int]] = offer.content["addresses"]
        self._sockets: dict[str, list[socket.socket]] = {}
        files = [*offer.files]
        for name in offer.content["listeners"]:
            self._sockets.setdefault(name, []).append(socket.socket(fileno=files.pop(0)))
        self._snapshot = open(files.pop(0), "rb") if files else None  # noqa: SIM115 - `snapshot` closes it
        self._number = 0  # of the other process's last needs
        self._lent: dict[str, EngineUse] = {}  # as the other process knows it
        self.pid = channel.pid  # of the process that this one takes over from

    def listeners(self, server: ServerConfig) -> Listeners:
        """The sockets of the ports that are configured as they were. The others are closed."""
        kept = Listeners([], [], [])
        wanted = {name: [port.host, port.port] for name, port in ports_of(server).items()}
        for name, sockets in self._sockets.items():
            if name in wanted and wanted[name] == [*self._addresses[name]]:
                kept = kept._replace(**{name: sockets})
            else:
                for each in sockets:
                    each.close()
        return kept

    async def snapshot(self) -> dict[str, Any] | None:
        """What the other process knows; None if its version has it in another form."""
        if self._snapshot is None:
            log.warning("snapshot_ignored", reason="another version of the gateway made it")
            return None
        with self._snapshot as source:
            source.seek(0)
            try:
                return await asyncio.to_thread(read, source)
            except SnapshotError as error:
                log.warning("snapshot_ignored", reason=str(error))
                return None

    async def go(self, sharing: SlotSharing, heard: Callable[[dict[str, Any]], None]) -> None:
        """This process could serve now: wait until it may. What the other one has in flight is lent to it.

        `heard` gets the other news that come with its needs.
        """
        self._sharing, self._heard = sharing, heard
        self._channel.post({"is": "ready"})
        go = await self._channel.receive()
        if go is not None and go.content["is"] != "go":
            raise TakeoverRefused(go.content["reason"])
        if go is not None:
            self._sharing.take_place(uses_of(go.content["needs"]))
            self._follow_news(go.content)

    async def follow(self, adopt: Callable[[socket.socket], Awaitable[None]]) -> None:
        """Lend slots to the other process and take its clients, until it has ended."""
        try:
            while (message := await self._channel.receive()) is not None:
                if message.content["is"] == "needs":
                    self._sharing.need(uses_of(message.content["needs"]))
                    self._follow_news(message.content)
                for file in message.files:
                    with suppress(OSError):  # the client has left meanwhile
                        await adopt(socket.socket(fileno=file))
        finally:
            self._sharing.need({})
            self._heard({"running": {}, "stored": []})
            self._channel.close()
        log.info("predecessor_ended", pid=self.pid)

    def _follow_news(self, news: dict[str, Any]) -> None:
        self._heard(news)
        self._number = news["number"]
        self._post()

    def _post(self) -> None:
        self._lent = self._sharing.lent
        self._channel.post({"is": "lent", "number": self._number, "lent": self._lent})

    def report(self) -> None:
        """Report what is lent, if that has changed."""
        if self._lent != self._sharing.lent:
            self._post()

    def close(self) -> None:
        """Give up: the other process goes on as before."""
        self._channel.close()


async def take_over(address: bytes) -> Successor | None:
    """Ask the gateway that waits at this address; None = there is none. Raises TakeoverRefused."""
    channel = connect(address)
    if channel is None:
        return None
    pid = channel.pid
    channel.post({"is": "hello", "protocol": PROTOCOL, "format": FORMAT})
    try:
        async with asyncio.timeout(_OFFER_SECONDS):
            offer = await channel.receive()
    except TimeoutError:
        offer = None
    if offer is None or offer.content["is"] != "offer":
        channel.close()
        reason = "it does not answer" if offer is None else offer.content["reason"]
        raise TakeoverRefused(f"a gateway (process {pid}) serves this file already: {reason}")
    return Successor(channel, offer)
