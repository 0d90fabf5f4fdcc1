"""Both ends of the handover protocol, by which a new process replaces the serving one.

The new process has a `Successor`, which asks for the sockets, the snapshot, and then the place. The serving process has
a `Predecessor`. The messages are `hello`, `offer` with the sockets and a snapshot, `ready`, `go`. At `go` the serving
process stops accepting connections, which wait; the new one accepts them and sends `serves`. If it fails before that,
the serving process simply goes on. Afterwards the old process sends `needs`, answered by `lent`, and `client` with idle
client connections, until it ends.
"""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import structlog

from gateway.config import ServerConfig
from gateway.core.listeners import Listeners, addresses_of
from gateway.core.routing.engine import EngineUse
from gateway.core.supervisor import running
from gateway.core.threads import Threads
from gateway.features.handover.channel import PROTOCOL, Channel, Message, connect, listen
from gateway.features.handover.ports import Ports
from gateway.features.handover.slots import SlotSharing, uses_of
from gateway.features.handover.snapshot import FORMAT, Knowledge, SnapshotError, in_memory, read

_HELLO_SECONDS = 5.0
_OFFER_SECONDS = 60.0
_READY_SECONDS = 150.0
_SERVES_SECONDS = 60.0  # without accepting connections, if the new process hangs
_KILLED_SECONDS = 5.0

log = structlog.get_logger("gateway")


class TakeoverRefused(Exception):
    """The serving process refuses the handover; the message says why."""


class Successor:
    """The new process's end of the protocol, and the contents of the offer."""

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
        self._number = 0  # of the predecessor's last needs
        self._lent: dict[str, EngineUse] = {}  # as last reported to the predecessor
        self.pid = channel.pid  # of the predecessor

    def serves(self) -> None:
        """Report that this process accepts connections: the predecessor may end."""
        self._channel.post({"is": "serves"})

    def listeners(self, server: ServerConfig) -> Listeners:
        """The sockets of ports with an unchanged address. Closes the others."""
        kept = Listeners([], [], [])
        wanted = addresses_of(server)
        for name, sockets in self._sockets.items():
            if name in wanted and wanted[name] == tuple(self._addresses[name]):
                kept = kept._replace(**{name: sockets})
            else:
                for each in sockets:
                    each.close()
        return kept

    async def snapshot(self) -> dict[str, Any] | None:
        """The state of the predecessor; None if its version has another format."""
        if self._snapshot is None:
            log.warning("snapshot_ignored", reason="another version of the gateway made it")
            return None
        with self._snapshot as source:
            source.seek(0)
            try:
                return await Threads("handover").run(read, source)
            except SnapshotError as error:
                log.warning("snapshot_ignored", reason=str(error))
                return None

    async def go(self, sharing: SlotSharing, heard: Callable[[dict[str, Any]], None]) -> None:
        """This process is ready: wait for permission to serve. The predecessor's load in flight is lent to it.

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

    async def lend(self, adopt: Callable[[socket.socket], Awaitable[None]]) -> None:
        """Lend slots to the predecessor and adopt its clients, until it ends."""
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
        """Report the loans to the predecessor, if they changed."""
        if self._lent != self._sharing.lent:
            self._post()

    def close(self) -> None:
        """Give up: the predecessor goes on as before."""
        self._channel.close()


async def take_over(address: bytes, table: str) -> Successor | None:
    """Connect to the gateway at this address; None = there is none. `table`: the coordination table of this process, if
    any. Raises TakeoverRefused."""
    channel = connect(address)
    if channel is None:
        return None
    pid = channel.pid
    channel.post({"is": "hello", "protocol": PROTOCOL, "format": FORMAT, "confirms": True, "table": table})
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


@dataclass
class Predecessor:
    """The serving process's end of the protocol: waits for a successor. `began` is set once it serves.

    `addresses`: as configured, by port (`main`, `admin`, `metrics`); `table`: the current coordination table of this
    process, if any. If both processes share it, it divides the engines between them, and no slots are lent.
    """

    knowledge: Knowledge
    _: KW_ONLY
    sharing: SlotSharing
    ports: Ports
    addresses: dict[str, tuple[str, int]]
    breathe: Callable[[], None]
    table: Callable[[], str]
    began: asyncio.Event = field(default_factory=asyncio.Event)
    successor_pid: int = 0
    _channel: Channel | None = None
    _reported: tuple[int, dict[str, int]] = (0, {})  # number of the last needs, and requests by key
    _sent_stored: int = 0  # number of responses known to the successor
    _sent_use: dict[str, Any] = field(default_factory=dict)  # use of keys, as known to the successor

    @asynccontextmanager
    async def waiting(self, address: bytes) -> AsyncIterator[None]:
        """Let another process take over while the block runs."""
        with listen(address) as listener:
            async with running(self._accept(listener), "handover"):
                yield

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
                await self._talk(channel)
            except Exception as error:
                log.exception("handover_failed", error=str(error))
            finally:
                if self._channel is not channel:
                    channel.post({"is": "refusal", "reason": "the handover failed, or the process stops"})
                    channel.close()

    async def _talk(self, channel: Channel) -> None:
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
        meets = hello.content.get("table", "") == self.table() != ""
        await self._give_place(channel, is_confirmed=bool(hello.content.get("confirms")), meets=meets)

    async def _give_place(self, channel: Channel, *, is_confirmed: bool, meets: bool) -> None:
        """Let the successor serve, and resume if it does not. `is_confirmed`: it sends `serves`, unlike earlier
        versions; `meets`: both processes share a coordination table."""
        pid = channel.pid
        try:
            await self.ports.pause()
            self._channel = channel
            if not meets:
                self.sharing.hand_over()
            self._post("go")
            is_serving = not is_confirmed or await self._serves(channel)
        except Exception:
            await self._take_back(channel)
            raise
        if not is_serving:
            await self._take_back(channel)
            log.error("handover_failed", pid=pid, hint="the new process did not serve; this one goes on")
            return
        self.ports.leave()
        self.successor_pid = pid
        self.began.set()

    async def _take_back(self, channel: Channel) -> None:
        self._channel = None
        self._sent_stored, self._sent_use = 0, {}
        channel.close()
        self.sharing.go_on_alone()
        await self.ports.resume()

    async def _serves(self, channel: Channel) -> bool:
        """Wait until the successor serves or ends. Kills it if it does neither."""
        for most_seconds in (_SERVES_SECONDS, _KILLED_SECONDS):
            with suppress(TimeoutError):
                async with asyncio.timeout(most_seconds):
                    while (message := await channel.receive()) is not None:
                        message.close()
                        if message.content["is"] == "serves":
                            return True
                        self._heed(message)
                    return False
            if channel.pid:  # 0 = it is in another PID namespace
                os.kill(channel.pid, signal.SIGKILL)
        return False

    def _heed(self, message: Message) -> None:
        if message.content["is"] == "lent":
            self.sharing.borrow(message.content["number"], uses_of(message.content["lent"]))

    async def _offer(self, channel: Channel, *, with_snapshot: bool) -> None:
        offered = [(name, each.detach()) for name, port in self.ports.acceptors() for each in port.copies()]
        snapshot: list[int] = []
        if with_snapshot:
            sections, self._sent_stored = await self.knowledge.take(), self.knowledge.stored.noted
            self._sent_use = {
                "spent": sections["spent"],
                "usage": (sections["usage"]["day"], sections["usage"]["rows"]),
            }
            snapshot.append(await Threads("handover").run(in_memory, sections, self.breathe))
        files = [file for _, file in offered] + snapshot
        names = [name for name, _ in offered]
        channel.post({"is": "offer", "addresses": self.addresses, "listeners": names}, files)

    def _post(self, kind: str, *, is_last: bool = False) -> None:
        assert self._channel is not None
        knowledge, sharing = self.knowledge, self.sharing
        stored, self._sent_stored = knowledge.stored_since(self._sent_stored), knowledge.stored.noted
        self._reported = sharing.number, knowledge.limits.running()
        news = {"number": sharing.number, "needs": sharing.needs, "running": self._reported[1], "stored": stored}
        if kind == "go":  # changes by hand since the offer
            news["membership"] = knowledge.membership.state()
        if kind == "go" or is_last:
            news["use"], self._sent_use = knowledge.use_since(self._sent_use), knowledge.use()
        self._channel.post({"is": kind, **news})

    def report(self) -> None:
        """Report changed needs to the successor."""
        if self._channel is not None and self._reported != (self.sharing.number, self.knowledge.limits.running()):
            self._post("needs")

    def give_client(self, file: int) -> None:
        """Pass the connection of a client to the successor."""
        assert self._channel is not None
        self._channel.post({"is": "client"}, [file])

    async def part(self) -> None:
        """Wait until everything is sent; the successor ends the conversation when it has read it."""
        assert self._channel is not None
        self._post("needs", is_last=True)
        await self._channel.part()

    async def borrow(self) -> None:
        """Use the successor's loans, until it ends or this is cancelled."""
        assert self._channel is not None
        try:
            while (message := await self._channel.receive()) is not None:
                self._heed(message)
                message.close()
        finally:
            self.sharing.go_on_alone()
            self._channel.close()
