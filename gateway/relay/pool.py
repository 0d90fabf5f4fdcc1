"""Connections to one backend: the most recently used first, none older or longer idle than is safe."""

import asyncio
import ssl
from collections.abc import Callable

from gateway.backends.backend import Backend
from gateway.config import UpstreamConfig
from gateway.descriptors import are_used_up
from gateway.errors import ConnectFailed, OutOfDescriptors
from gateway.relay.connection import BackendConnection

_RETRY_AFTER_SECONDS = 1.0


class Pool:
    """Owner of a backend's connections."""

    def __init__(self, backend: Backend, config: UpstreamConfig, clock: Callable[[], float]) -> None:
        self.backend = backend
        self._config = config
        self._clock = clock
        self._idle: list[BackendConnection] = []
        self._tls = ssl.create_default_context() if backend.origin.tls else None
        self._heads: dict[tuple[bytes, bytes], bytes] = {}
        self.open = 0  # in use

    def __repr__(self) -> str:
        return f"<Pool {self.backend.name} {self.open} in use, {len(self._idle)} idle>"

    def request_head(self, method: bytes, target: bytes) -> bytes:
        """The constant first lines of a request to this backend."""
        head = self._heads.get((method, target))
        if head is None:
            key = self.backend.api_key
            authorization = b"authorization: Bearer " + key.encode() + b"\r\n" if key else b""
            host = self.backend.origin.host_header
            head = b"%b %b HTTP/1.1\r\nhost: %b\r\naccept-encoding: identity\r\n%b" % (
                method,
                target,
                host,
                authorization,
            )
            if len(self._heads) < 256:  # targets with an id in them must not pile up
                self._heads[method, target] = head
        return head

    async def take(self, *, fresh: bool = False) -> BackendConnection:
        """A usable connection; `fresh` = not one that was used before. Raises ConnectFailed or OutOfDescriptors."""
        if not fresh:
            now = self._clock()
            while self._idle:
                connection = self._idle.pop()
                if self._still_good(connection, now):
                    self.open += 1
                    return connection
                connection.abort()
        connection = await self._connect()
        self.open += 1
        return connection

    def give_back(self, connection: BackendConnection, *, answered: bool = False) -> None:
        """After an exchange: keep the connection if its answer was complete, else close it.

        `answered`: the client has its whole answer, so only the end of its framing can be missing.
        """
        self.open -= 1
        if answered and connection.busy:
            connection.finish(self._keep)
        else:
            self._keep(connection)

    def _keep(self, connection: BackendConnection) -> None:
        if not connection.reusable:
            connection.abort()
            return
        connection.resume_reading()  # a slow client may have paused it
        idle = self._idle
        now = connection.idle_since = self._clock()
        idle.append(connection)
        while idle and now - idle[0].idle_since >= self._config.keep_alive_seconds:
            idle.pop(0).abort()

    def close(self) -> None:
        """Close what is idle."""
        while self._idle:
            self._idle.pop().abort()

    def _still_good(self, connection: BackendConnection, now: float) -> bool:
        return (
            connection.usable
            and now - connection.idle_since < self._config.keep_alive_seconds
            and now - connection.made_at < self._config.max_connection_age_seconds
        )

    async def _connect(self) -> BackendConnection:
        origin, loop = self.backend.origin, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._config.connect_timeout_seconds):
                _, connection = await loop.create_connection(
                    lambda: BackendConnection(self._clock()), origin.host, origin.port, ssl=self._tls
                )
        except TimeoutError as error:
            raise ConnectFailed(
                f"Timeout: backend {self.backend.name!r} did not accept a connection"
                f" within {self._config.connect_timeout_seconds:g} s."
            ) from error
        except OSError as error:
            if are_used_up(error):
                raise OutOfDescriptors(
                    "The gateway has reached its limit of open files. Retry later, or raise the nofile limit.",
                    retry_after_seconds=_RETRY_AFTER_SECONDS,
                ) from error
            raise ConnectFailed(f"Could not connect to backend {self.backend.name!r}: {error}.") from error
        return connection
