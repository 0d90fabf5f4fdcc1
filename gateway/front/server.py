"""The listening side: accepts clients, closes slow ones, and shuts down without losing requests."""

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from gateway.config import ServerConfig
from gateway.errors import Draining
from gateway.front.connection import ClientConnection, RequestHandler
from gateway.resources import MemoryBudget
from gateway.supervisor import Supervisor

_LOOK_SECONDS = 1.0
_BACKLOG = 4096
_BEGIN_AT_ONCE = 32  # of requests that arrive together; streams get their turn before the next ones
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
        memory: MemoryBudget,
        supervisor: Supervisor | None = None,
    ) -> None:
        self.config = config
        self.memory = memory
        self.read_buffer = memoryview(bytearray(_READ_BYTES))
        self.handler = handler
        self._clock = clock
        self._supervisor = supervisor or Supervisor(clock)
        self._connections: set[ClientConnection] = set()
        self._beginning = 0
        self._put_off: deque[ClientConnection] = deque()
        self._server: asyncio.Server | None = None
        self._all_disconnected = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Server {len(self._connections)} clients, {self.answering} answers under way>"

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def answering(self) -> int:
        return sum(connection.answering for connection in self._connections)

    # What connections call.

    def connected(self, connection: ClientConnection) -> bool:
        """A client connected; False = there are too many."""
        self._connections.add(connection)
        return len(self._connections) <= self.config.max_connections

    def disconnected(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._all_disconnected.set()

    def may_begin(self, connection: ClientConnection) -> bool:
        """Whether its next answer may begin now; if not, its `proceed` is called, in order, when others have begun."""
        if self._beginning < _BEGIN_AT_ONCE:
            self._beginning += 1
            return True
        self._put_off.append(connection)
        return False

    def begun(self) -> None:
        """An answer that might begin has done so, or never will."""
        self._beginning -= 1
        while self._put_off and self._beginning < _BEGIN_AT_ONCE:
            self._put_off.popleft().proceed()

    # Starting and stopping.

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Accept clients while the block runs; then abort the connections that are left."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: ClientConnection(self, loop),
            self.config.host,
            self.config.port,
            backlog=_BACKLOG,
            reuse_address=True,
        )
        if _UNSENT_OPTION is not None:
            for listener in self._server.sockets:  # connections inherit it
                listener.setsockopt(socket.IPPROTO_TCP, _UNSENT_OPTION, _UNSENT_BYTES)
        watch = loop.create_task(self._watch(), name="client-watch")
        try:
            yield
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
            self._server.close()
            await self._cut()

    async def drain(self) -> None:
        """Shut down without losing requests: not ready, still accepting, then only finish what is in progress."""
        self.handler.start_draining()
        await asyncio.sleep(self.config.drain_delay_seconds)
        assert self._server is not None
        self._server.close()
        deadline = self._clock() + self.config.drain_timeout_seconds
        while self._connections and self._clock() < deadline:
            for connection in list(self._connections):
                if connection.idle:
                    connection.close()  # once its client has taken the answer
            await asyncio.sleep(0.05)

    async def _cut(self) -> None:
        for connection in list(self._connections):
            connection.cut(
                Draining(
                    "The gateway shut down before this response was complete. Retry the request.",
                    retry_after_seconds=1.0,
                )
            )
        self._all_disconnected = asyncio.Event()
        if self._connections:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._all_disconnected.wait()
        for connection in list(self._connections):
            connection.abort()  # its client does not read; closing would wait for it
        await asyncio.sleep(0)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            now = self._clock()
            for connection in list(self._connections):
                try:
                    connection.look(now)
                except Exception as error:
                    self._supervisor.caught("client_watch", error)
