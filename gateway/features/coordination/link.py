"""This replica's link to Redis or Valkey: a connection for calls and messages, and another to show its presence.

Both are made again when they end. The second one carries nothing, so that only the end of this process closes it: the
server also closes the connection of a client that does not read its messages.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final

from gateway.core.supervisor import Supervisor
from gateway.features.coordination.connection import RedisConnection, connected
from gateway.features.coordination.settings import CoordinationConfig
from gateway.features.coordination.store import StoreLost

_RETRY_SECONDS: Final = 0.25
_WAIT_SECONDS: Final = 0.5  # of a call for a connection
_FAULT_SECONDS: Final = 1.0


class KeptConnection:
    """One connection, which is made again when it ends. `connect` and `prepare` may raise StoreLost."""

    def __init__(
        self, connect: Callable[[], Awaitable[RedisConnection]], prepare: Callable[[RedisConnection], Awaitable[None]]
    ) -> None:
        self.connection: RedisConnection | None = None  # while it is open
        self.is_open = asyncio.Event()
        self.reason = "not connected yet"
        self._connect, self._prepare = connect, prepare

    async def step(self) -> None:
        """Hold one connection until it ends."""
        connection = None
        try:
            connection = await self._connect()
            await self._prepare(connection)
            self.connection = connection
            self.is_open.set()
            await connection.ended.wait()
        except StoreLost as error:
            self.reason = str(error)
        finally:
            self.connection = None
            self.is_open.clear()
            if connection is not None:
                connection.close("this gateway ends it")
                self.reason = connection.reason
        await asyncio.sleep(_RETRY_SECONDS)


class RedisLink:
    """The connections of the replica with this name. A call waits for a connection as for an answer."""

    def __init__(self, config: CoordinationConfig, replica: str, supervisor: Supervisor) -> None:
        self.replica = replica
        self._config, self._supervisor = config, supervisor
        self._heard: dict[bytes, Callable[[bytes], None]] = {}
        client = f"{config.name}:{replica}"
        self._calls = KeptConnection(partial(connected, config, client, self._on_message), self._hear)
        present = partial(connected, config, f"{client}:presence", lambda *_: None)
        self._presence = KeptConnection(present, self._show)

    def name(self, what: str) -> bytes:
        """A key or a channel of the fleet; all have one hash tag."""
        return f"{{{self._config.name}}}:{what}".encode()

    @property
    def is_up(self) -> bool:
        return self._calls.is_open.is_set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Keep both connections while the block runs."""
        async with AsyncExitStack() as stack:
            for task, kept in (("coordination_link", self._calls), ("coordination_presence", self._presence)):
                await stack.enter_async_context(self._supervisor.repeating(task, kept.step, _FAULT_SECONDS))
            yield

    async def _hear(self, connection: RedisConnection) -> None:
        heard = None
        while heard is not self._heard:  # they may change meanwhile
            heard = self._heard
            await connection.listen(heard)

    async def _show(self, connection: RedisConnection) -> None:
        """Show the presence of this replica by one subscription."""
        await connection.listen([self.name("here:") + self.replica.encode()])

    def _on_message(self, channel: bytes, data: bytes) -> None:
        with self._supervisor.guard("coordination_message"):
            if (heard := self._heard.get(channel)) is not None:
                heard(data)

    async def until_present(self) -> None:
        """Wait until presence is shown, from this replica's view."""
        await self._presence.is_open.wait()

    def seen_present(self, *, is_present: bool) -> None:
        """The server sees this replica, or not: then it has closed the connection, which this end does not know."""
        if not is_present and (connection := self._presence.connection) is not None:
            connection.close("the server has ended it")

    async def ask(self, *words: str | bytes | int) -> Any:
        """The answer to a command. Raises StoreLost."""
        calls = self._calls
        if calls.connection is None:
            try:
                async with asyncio.timeout(_WAIT_SECONDS):
                    await calls.is_open.wait()
            except TimeoutError as error:
                raise StoreLost(calls.reason) from error
        if (connection := calls.connection) is None:
            raise StoreLost(calls.reason)
        return await connection.ask(*words)

    def publish(self, channel: bytes, data: bytes) -> bool:
        """Send a message, and wait for nothing; returns whether it could be sent."""
        connection = self._calls.connection
        return connection is not None and connection.publish(channel, data)

    async def listen(self, heard: Mapping[bytes, Callable[[bytes], None]]) -> None:
        """Call these functions with the messages of their channels from now on. Raises StoreLost."""
        self._heard = dict(heard)
        if (connection := self._calls.connection) is not None:
            await connection.listen(self._heard)
