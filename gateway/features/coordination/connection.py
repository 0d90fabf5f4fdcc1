"""One connection to Redis or Valkey: commands are answered in order, and messages of channels come in between.

The bytes are packed and parsed by hiredis. Frequent messages wait for no task and no pool: a message costs a fifth of a
general client's time.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from socket import SO_KEEPALIVE, SOL_SOCKET
from ssl import create_default_context
from typing import Any, Final, cast

from hiredis import HiredisError, PushNotification, Reader, ReplyError, pack_command

from gateway.core.turns import SLICE_BYTES, Intake
from gateway.features.coordination.settings import CoordinationConfig
from gateway.features.coordination.store import StoreLost
from gateway.files import check_pem

CALL_SECONDS: Final = 0.8  # at most for a call, and for a connection: several must fail before a block lapses
_MOST_UNSENT_BYTES: Final = 1 << 20
_MOST_UNREAD_BYTES: Final = 64 << 20  # of one answer or message
_MORE: Final = object()
_WITHOUT_ANSWER: Final = pack_command((b"CLIENT", b"REPLY", b"SKIP"))  # type: ignore[arg-type]

Heard = Callable[[bytes, bytes], None]  # channel, data


class RedisConnection(asyncio.Protocol):
    """A connection for single use: any failure of a call ends it."""

    def __init__(self, heard: Heard) -> None:
        self.ended = asyncio.Event()
        self.reason = "the connection has ended"
        self._heard = heard
        self._answers: deque[asyncio.Future[Any]] = deque()  # StoreLost, if the connection has ended
        self._reader = Reader(notEnoughData=_MORE)
        self._intake = Intake()
        self._unread_bytes = 0  # of an answer or message that is not complete
        self._channels: set[bytes] = set()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._intake.begin(self._transport, self.data_received)

    def connection_lost(self, exc: Exception | None) -> None:
        self._intake.end()
        if exc is not None:
            self.reason = f"{type(exc).__name__}: {exc}"
        self.ended.set()
        for answer in self._answers:
            if not answer.done():
                answer.set_result(StoreLost(self.reason))

    def data_received(self, data: bytes) -> None:
        if len(data) > SLICE_BYTES:
            return self._intake.cut(data)
        reader = self._reader
        self._unread_bytes += len(data)
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not _MORE:
                self._unread_bytes = reader.len()
                if type(reply) is PushNotification:
                    if reply[:1] == [b"message"] and len(reply) == 3:
                        self._heard(reply[1], reply[2])
                elif not self._answers:
                    return self.close("an answer came without a command")
                elif not (answer := self._answers.popleft()).done():
                    answer.set_result(reply)
        except HiredisError as error:
            return self.close(f"no answer of Redis: {error}")
        if self._unread_bytes > _MOST_UNREAD_BYTES:
            self.close("an answer is too long")

    def close(self, reason: str) -> None:
        """End the connection; calls that wait fail."""
        if not self.ended.is_set():
            self.reason = reason
            self._intake.drop()
            self._transport.abort()

    async def ask(self, *words: str | bytes | int) -> Any:
        """The answer to a command; an error of a script that is not known is returned. Raises StoreLost."""
        if self.ended.is_set():
            raise StoreLost(self.reason)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        self._transport.write(pack_command(words))  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(CALL_SECONDS):
                reply = await answer
        except TimeoutError as error:
            self.close(f"no answer within {CALL_SECONDS} s")
            raise StoreLost(self.reason) from error
        if isinstance(reply, StoreLost):
            raise StoreLost(self.reason)
        if isinstance(reply, ReplyError) and not str(reply).startswith("NOSCRIPT"):
            self.close(str(reply))  # e.g. the server has become a replica: the next connection is to another one
            raise StoreLost(str(reply))
        return reply

    def publish(self, channel: bytes, data: bytes) -> bool:
        """Send a message and wait for nothing; returns whether it could be sent."""
        if self.ended.is_set() or self._transport.get_write_buffer_size() > _MOST_UNSENT_BYTES:
            return False
        # An answer would wake this process for nothing.
        self._transport.write(_WITHOUT_ANSWER + pack_command((b"PUBLISH", channel, data)))  # type: ignore[arg-type]
        return True

    async def listen(self, channels: Iterable[bytes]) -> None:
        """Hear these channels from now on, and no others. Raises StoreLost."""
        wanted = {*channels}
        for command, changed in ((b"SUBSCRIBE", wanted - self._channels), (b"UNSUBSCRIBE", self._channels - wanted)):
            if changed and not self.ended.is_set():
                self._transport.write(pack_command((command, *changed)))  # type: ignore[arg-type]
        self._channels = wanted
        await self.ask(b"PING")  # a refusal comes before this answer, in its place


async def connected(config: CoordinationConfig, name: str, heard: Heard) -> RedisConnection:
    """A connection to the server of the configuration, under this name in its list of clients. Raises StoreLost."""
    address = config.address
    if address.sentinel_name:
        return await _connected_by_sentinels(config, name, heard)
    return await _opened(config, address.hosts[0] if address.hosts else None, name, heard)


async def _connected_by_sentinels(config: CoordinationConfig, name: str, heard: Heard) -> RedisConnection:
    """A connection to the primary that a Sentinel names, and that says so itself."""
    reasons = []
    for host in config.address.hosts:
        try:
            found = await _primary(config, host, name)
            connection = await _opened(config, found, name, heard)
            role = await connection.ask(b"ROLE")
            if isinstance(role, list) and role[:1] == [b"master"]:
                return connection
            connection.close("this server is no primary")
            reasons.append(f"{found[0]}:{found[1]} is no primary")
        except StoreLost as error:
            reasons.append(f"{host[0]}:{host[1]}: {error}")
    raise StoreLost("; ".join(reasons))


async def _primary(config: CoordinationConfig, sentinel: tuple[str, int], name: str) -> tuple[str, int]:
    connection = await _connection(config, sentinel, lambda *_: None)
    try:
        await _greet(connection, name, "", config.sentinel_password)
        found = await connection.ask(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", config.address.sentinel_name)
        try:
            address, port = found
            return address.decode(), int(port)
        except (AttributeError, TypeError, ValueError) as error:
            raise StoreLost(f"no primary is known as {config.address.sentinel_name!r}") from error
    finally:
        connection.close("the Sentinel has answered")


async def _opened(config: CoordinationConfig, host: tuple[str, int] | None, name: str, heard: Heard) -> RedisConnection:
    connection = await _connection(config, host, heard)
    try:
        await _greet(connection, name, config.username, config.password)
        if config.address.database:
            await connection.ask(b"SELECT", config.address.database)
        return connection
    except BaseException:
        connection.close("the server refused this gateway")
        raise


async def _greet(connection: RedisConnection, name: str, username: str, password: str) -> None:
    credentials = ("AUTH", username or "default", password) if username or password else ()
    await connection.ask("HELLO", "3", *credentials, "SETNAME", name)


async def _connection(config: CoordinationConfig, host: tuple[str, int] | None, heard: Heard) -> RedisConnection:
    loop, address = asyncio.get_running_loop(), config.address
    try:
        async with asyncio.timeout(CALL_SECONDS):
            if host is None:
                _, connection = await loop.create_unix_connection(lambda: RedisConnection(heard), address.socket_path)
                return connection
            tls = create_default_context(cafile=check_pem(config.ca) if config.ca else None) if address.tls else None
            transport, connection = await loop.create_connection(lambda: RedisConnection(heard), *host, ssl=tls)
    except OSError as error:  # includes TimeoutError and errors of TLS
        raise StoreLost(f"{type(error).__name__}: {error}".rstrip(": ")) from error
    if (socket := transport.get_extra_info("socket")) is not None:
        socket.setsockopt(SOL_SOCKET, SO_KEEPALIVE, 1)
    return connection
