"""This replica's link to Redis or Valkey: a connection for calls and messages, and one that shows its presence.

Both are made again when they end. The second one carries nothing, so that only the end of this process closes it: the
server also closes the connection of a client that does not read its messages.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from gateway.config.coordination import CoordinationConfig
from gateway.coordination.connection import RedisConnection, connected
from gateway.coordination.store import StoreLost
from gateway.supervisor import Supervisor

_RETRY_SECONDS: Final = 0.25
_WAIT_SECONDS: Final = 0.5  # of a call for a connection
_FAULT_SECONDS: Final = 1.0


class RedisLink:
    """The connections of the replica with this name. A call waits for a connection as for an answer."""

    def __init__(self, config: CoordinationConfig, replica: str, supervisor: Supervisor) -> None:
        self.replica = replica
        self._config, self._supervisor = config, supervisor
        self._heard: dict[bytes, Callable[[bytes], None]] = {}
        self._connection: RedisConnection | None = None
        self._is_connected = asyncio.Event()
        self._is_present = asyncio.Event()
        self._presence: RedisConnection | None = None
        self._reason = "not connected yet"

    def name(self, what: str) -> bytes:
        """A key or a channel of the fleet; all have one hash tag."""
        return f"{{{self._config.name}}}:{what}".encode()

    @property
    def is_up(self) -> bool:
        return self._is_connected.is_set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Keep both connections while the block runs."""
        async with AsyncExitStack() as stack:
            for task, step in (("coordination_link", self._hold), ("coordination_presence", self._show)):
                await stack.enter_async_context(self._supervisor.repeating(task, step, _FAULT_SECONDS))
            yield

    async def _hold(self) -> None:
        """Hold one connection until it ends."""
        try:
            connection = await connected(self._config, f"{self._config.name}:{self.replica}", self._on_message)
        except StoreLost as error:
            self._reason = str(error)
            return await asyncio.sleep(_RETRY_SECONDS)
        try:
            heard = None
            while heard is not self._heard:
                heard = self._heard
                await connection.listen(heard)
            self._connection = connection
            self._is_connected.set()
            await connection.ended.wait()
        except StoreLost:
            pass
        finally:
            self._connection = None
            self._is_connected.clear()
            connection.close("this gateway ends it")
            self._reason = connection.reason
        await asyncio.sleep(_RETRY_SECONDS)

    async def _show(self) -> None:
        """Show presence by one subscription, until its connection ends."""
        connection = None
        try:
            connection = await connected(self._config, f"{self._config.name}:{self.replica}:presence", lambda *_: None)
            await connection.listen([self.name("here:") + self.replica.encode()])
            self._presence = connection
            self._is_present.set()
            await connection.ended.wait()
        except StoreLost:
            pass
        finally:
            self._presence = None
            self._is_present.clear()
            if connection is not None:
                connection.close("this gateway ends it")
        await asyncio.sleep(_RETRY_SECONDS)

    def _on_message(self, channel: bytes, data: bytes) -> None:
        if (heard := self._heard.get(channel)) is not None:
            heard(data)

    async def until_present(self) -> None:
        """Wait until presence is shown, as far as this replica knows."""
        await self._is_present.wait()

    def seen_present(self, *, is_present: bool) -> None:
        """The server sees this replica, or not: then it has closed the connection, which this end does not know."""
        if not is_present and self._presence is not None:
            self._presence.close("the server has ended it")

    async def ask(self, *words: str | bytes | int) -> Any:
        """The answer to a command. Raises StoreLost."""
        if self._connection is None:
            try:
                async with asyncio.timeout(_WAIT_SECONDS):
                    await self._is_connected.wait()
            except TimeoutError as error:
                raise StoreLost(self._reason) from error
        connection = self._connection
        if connection is None:
            raise StoreLost(self._reason)
        return await connection.ask(*words)

    def publish(self, channel: bytes, data: bytes) -> bool:
        """Send a message, and wait for nothing; returns whether it could be sent."""
        return self._connection is not None and self._connection.publish(channel, data)

    async def listen(self, heard: Mapping[bytes, Callable[[bytes], None]]) -> None:
        """Call these functions with the messages of their channels from now on. Raises StoreLost."""
        self._heard = dict(heard)
        if self._connection is not None:
            await self._connection.listen(self._heard)
