"""The listening side: accepts clients, closes slow ones, and shuts down without losing requests."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial

from gateway.config import ServerConfig
from gateway.core.errors import Draining
from gateway.core.front.connection import Beginnings, ClientConnection, RequestHandler
from gateway.core.listeners import Acceptor, bind
from gateway.core.resources import MemoryBudget
from gateway.core.supervisor import Supervisor
from gateway.core.tls.contexts import ServerContext
from gateway.core.tls.transport import EncryptedTransport

_LOOK_SECONDS = 1.0
_GIVEN_AT_ONCE = 256  # clients, to another process
_READ_BYTES = 65536
_UNSENT_BYTES = 131072  # buffered by the kernel for a client, besides data in flight
_UNSENT_OPTION = getattr(socket, "TCP_NOTSENT_LOWAT", None)  # Linux and macOS have it


class Server:
    """Owner of the client connections."""

    def __init__(
        self,
        config: ServerConfig,
        handler: RequestHandler,
        clock: Callable[[], float],
        *,
        memory: MemoryBudget,
        supervisor: Supervisor | None = None,
    ) -> None:
        self.config = config
        self.memory = memory
        self.read_buffer = memoryview(bytearray(_READ_BYTES))
        self.handler = handler
        self._clock = clock
        self._supervisor = supervisor or Supervisor(clock)
        self.acceptor: Acceptor  # once it listens
        self._connections: set[ClientConnection] = set()
        self._give: Callable[[int], None] | None = None  # gives a client to the process that took over
        self._tls = ServerContext(config.tls) if config.tls is not None else None
        self.beginnings = Beginnings()

    def __repr__(self) -> str:
        return f"<Server {len(self._connections)} clients, {self.answering} answers under way>"

    @property
    def port(self) -> int:
        return int(self.acceptor.address[1])

    @property
    def clients(self) -> int:
        """Connections of clients that are open now."""
        return len(self._connections)

    @property
    def answering(self) -> int:
        return sum(connection.answering for connection in self._connections)

    def apply(self, config: ServerConfig) -> None:
        """Take over limits and timeouts; where it listens stays."""
        self.config = config
        self.memory.apply(config.memory_budget_bytes)

    def connected(self, connection: ClientConnection) -> bool:
        """A client connected; False = there are too many."""
        self._connections.add(connection)
        if self._give is not None:  # adopted while another process takes over from this one
            asyncio.get_running_loop().call_soon(connection.give_when_idle, self._give)
        return len(self._connections) <= self.config.max_connections

    def disconnected(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)

    @asynccontextmanager
    async def listening(self, sockets: Sequence[socket.socket] = ()) -> AsyncIterator[None]:
        """Accept clients at these bound sockets while the block runs; then abort the connections that are left."""
        sockets = sockets or await bind(self.config.host, self.config.port)
        for each in sockets:
            if _UNSENT_OPTION is not None and each.family != socket.AF_UNIX:  # connections inherit it
                each.setsockopt(socket.IPPROTO_TCP, _UNSENT_OPTION, _UNSENT_BYTES)
        self.acceptor = Acceptor(sockets, partial(self._accepted, asyncio.get_running_loop()))
        try:
            await self.acceptor.accept()
            with self._supervisor.looking("client_watch", self._watch, _LOOK_SECONDS):
                async with self._following():
                    yield
        finally:
            self.acceptor.stop()
            await self._cut()

    def _following(self) -> AbstractAsyncContextManager[None]:
        """Follow the files of TLS while the block runs."""
        if self._tls is None:
            return nullcontext()
        return self._supervisor.repeating("certificate_watch", self._tls.step, _LOOK_SECONDS)

    def _accepted(self, loop: asyncio.AbstractEventLoop, family: int) -> asyncio.BufferedProtocol:
        """The protocol of a client that has just connected, or of another worker, which passes requests on."""
        connection = ClientConnection(self, loop)
        if self._tls is None or family == socket.AF_UNIX:
            return connection
        return EncryptedTransport(connection, self._tls.context, self.config.header_timeout_seconds, loop=loop)

    async def adopt(self, client: socket.socket) -> None:
        """Take over the connection of a client from another process."""
        if self._tls is not None:
            client.close()  # it is not encrypted: the process before this one had no TLS
            return
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: ClientConnection(self, loop), client)

    async def drain(self) -> None:
        """Shut down without losing requests: not ready, still accepting, then only finish what is in progress."""
        self.handler.start_draining()
        await asyncio.sleep(self.config.drain_delay_seconds)
        self.acceptor.stop()
        await self._wait_for_clients(self.config.drain_timeout_seconds, ClientConnection.close)

    async def give_away(self, give: Callable[[int], None]) -> None:
        """Pass every client on to another process as soon as it is idle, until all are gone."""
        self._give = give
        for number, connection in enumerate(list(self._connections), start=1):
            connection.give_when_idle(give)
            if number % _GIVEN_AT_ONCE == 0:
                await asyncio.sleep(0)
        await self._wait_for_clients(self.config.drain_timeout_seconds, ClientConnection.look_idle)

    async def _wait_for_clients(self, most_seconds: float, part: Callable[[ClientConnection], None]) -> None:
        """Part with connections that have nothing more to do, until all are gone."""
        deadline = self._clock() + most_seconds
        while self._connections and self._clock() < deadline:
            for connection in list(self._connections):
                if connection.idle:
                    part(connection)
            await asyncio.sleep(0.05)

    async def _cut(self) -> None:
        reason = "The gateway shut down before this response was complete. Retry the request."
        for connection in list(self._connections):
            connection.cut(Draining(reason, retry_after_seconds=1.0))
        await self._wait_for_clients(_LOOK_SECONDS, ClientConnection.close)
        for connection in list(self._connections):
            connection.abort()  # its client does not read; closing would wait for it
        await asyncio.sleep(0)

    def _watch(self) -> None:
        now = self._clock()
        for connection in list(self._connections):
            with self._supervisor.guard("client_watch"):
                connection.look(now)
