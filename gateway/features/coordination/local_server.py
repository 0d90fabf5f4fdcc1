"""Serves the table of a fleet, and the messages of its replicas, on a Unix socket of this machine.

Workers of one parent use it as other gateways use Redis, by the same link: it answers the few commands of `link.py`,
`redis_store.py` and `sharing.py`, in the protocol of Redis, and keeps nothing on disk.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final, cast

from hiredis import ProtocolError, Reader

from gateway.core.turns import SLICE_BYTES, Intake
from gateway.features.coordination.redis_store import DIGEST
from gateway.features.coordination.store import SharedTable, Stamp, TableChange

_MOST_UNSENT_BYTES: Final = 8 << 20  # to a replica that does not read
_MOST_UNREAD_BYTES: Final = 64 << 20  # of one command
_MORE: Final = object()
_READ: Final = Stamp("", "")


class CommandRefused(Exception):
    """An error that is sent as the answer to a command."""


class TableServer:
    """The table, the values and the channels that replicas share; `run` is never the same for two of them."""

    def __init__(self, run: str) -> None:
        self._shared = SharedTable(run)
        self._values: dict[bytes, bytes] = {}
        self._heard: dict[bytes, set[ReplicaConnection]] = {}  # by channel
        self._connections: set[ReplicaConnection] = set()

    def __repr__(self) -> str:
        return f"<TableServer {self._shared!r}, {len(self._connections)} connections>"

    @asynccontextmanager
    async def serving(self, path: str) -> AsyncIterator[None]:
        """Serve at this path while the block runs. Raises OSError."""
        server = await asyncio.get_running_loop().create_unix_server(lambda: ReplicaConnection(self), path)
        try:
            yield
        finally:
            server.close()
            for connection in [*self._connections]:
                connection.close()

    def connected(self, connection: "ReplicaConnection") -> None:
        self._connections.add(connection)

    def disconnected(self, connection: "ReplicaConnection") -> None:
        self._connections.discard(connection)
        self.unsubscribe(connection, [*self._heard])

    def subscribe(self, connection: "ReplicaConnection", channels: Iterable[bytes]) -> None:
        for channel in channels:
            self._heard.setdefault(channel, set()).add(connection)

    def unsubscribe(self, connection: "ReplicaConnection", channels: Iterable[bytes]) -> None:
        for channel in channels:
            if (heard := self._heard.get(channel)) is not None:
                heard.discard(connection)
                if not heard:
                    del self._heard[channel]

    def publish(self, channel: bytes, data: bytes) -> int:
        """Send a message to all that hear the channel; returns how many do."""
        heard = self._heard.get(channel, ())
        if heard:
            message = b">3\r\n" + _bulk(b"message") + _bulk(channel) + _bulk(data)
            for each in [*heard]:
                each.send(message)
        return len(heard)

    def set_if_new(self, key: bytes, value: bytes) -> bool:
        is_new = key not in self._values
        if is_new:
            self._values[key] = value
        return is_new

    def value(self, key: bytes) -> bytes | None:
        return self._values.get(key)

    def change(self, here: bytes, me: bytes, arguments: list[bytes]) -> list[Any]:
        """The local equivalent of the script in `redis_store.py`. `here`: prefix of the channels that show presence."""
        run, version, new_version, settled, count, *words = arguments
        pairs = 2 * int(count)
        records = {words[at].decode(): words[at + 1] for at in range(0, pairs, 2)}
        removed = tuple(each.decode() for each in words[pairs:])
        expected, shared = Stamp(run.decode(), version.decode()), self._shared
        if expected != _READ:
            shared.swap(TableChange(expected, new_version.decode(), settled == b"1", records=records, removed=removed))
        fields = [each for name, record in shared.records.items() for each in (name.encode(), record)]
        if shared.version:
            fields += [b":settled", b"%d" % shared.settled, b":era", shared.era.encode()]
        names = dict.fromkeys((me, *[name.encode() for name in shared.records]))
        present = [name for name in names if here + name in self._heard]
        return [shared.run.encode(), shared.version.encode(), fields, present]


class ReplicaConnection(asyncio.Protocol):
    """One connection of a replica. Any command that replicas do not use gets an error."""

    def __init__(self, server: TableServer) -> None:
        self._server = server
        self._reader = Reader(notEnoughData=_MORE)
        self._intake = Intake()
        self._unread_bytes = 0  # of a command that is not complete
        self._is_silent = False  # about the next command
        self._transport: asyncio.Transport
        self._commands: dict[bytes, Callable[[list[bytes]], bytes]] = {
            b"HELLO": lambda _: b"+OK\r\n",
            b"PING": lambda _: b"+PONG\r\n",
            b"CLIENT": self._be_silent,
            b"SUBSCRIBE": self._subscribe,
            b"UNSUBSCRIBE": self._unsubscribe,
            b"PUBLISH": self._publish,
            b"SET": self._set,
            b"GET": lambda words: _packed(self._server.value(words[1])),
            b"EVALSHA": self._run_script,
        }

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._intake.begin(self._transport, self.data_received)
        self._server.connected(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._intake.end()
        self._server.disconnected(self)

    def close(self) -> None:
        self._intake.drop()
        self._transport.abort()

    def send(self, data: bytes) -> None:
        """Send an answer or a message. A replica that reads none of them is cut off, and may connect again."""
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > _MOST_UNSENT_BYTES:
            self.close()

    def data_received(self, data: bytes) -> None:
        if len(data) > SLICE_BYTES:
            return self._intake.cut(data)
        reader, answers = self._reader, list[bytes]()
        self._unread_bytes += len(data)
        try:
            reader.feed(data)
            while (words := reader.gets()) is not _MORE:
                self._unread_bytes = reader.len()
                if answer := self._answer(words):
                    answers.append(answer)
        except ProtocolError:
            return self.close()
        if answers:
            self.send(b"".join(answers))
        if self._unread_bytes > _MOST_UNREAD_BYTES:
            self.close()

    def _answer(self, words: Any) -> bytes:
        try:
            answer = self._commands[words[0].upper()](words)
        except CommandRefused as error:
            return f"-{error}\r\n".encode()
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            return b"-ERR this store has no such command\r\n"
        if words[0] != b"CLIENT" and self._is_silent:
            self._is_silent = False
            return b""
        return answer

    def _be_silent(self, words: list[bytes]) -> bytes:
        if words[1:] != [b"REPLY", b"SKIP"]:
            raise CommandRefused("ERR only CLIENT REPLY SKIP is known")
        self._is_silent = True
        return b""

    def _subscribe(self, words: list[bytes]) -> bytes:
        self._server.subscribe(self, words[1:])
        return b""  # the answer to the PING after it is enough

    def _unsubscribe(self, words: list[bytes]) -> bytes:
        self._server.unsubscribe(self, words[1:])
        return b""

    def _publish(self, words: list[bytes]) -> bytes:
        _, channel, data = words
        return b":%d\r\n" % self._server.publish(channel, data)

    def _set(self, words: list[bytes]) -> bytes:
        _, key, value, condition = words
        if condition != b"NX":
            raise CommandRefused("ERR only SET with NX is known")
        return b"+OK\r\n" if self._server.set_if_new(key, value) else b"_\r\n"

    def _run_script(self, words: list[bytes]) -> bytes:
        _, digest, keys, _, here, me, *arguments = words
        if digest != DIGEST.encode() or keys != b"1":
            raise CommandRefused("ERR only the script of the table is known")
        return _packed(self._server.change(here, me, arguments))


def _bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


def _packed(answer: Any) -> bytes:
    """A text, nothing, or a list of such answers."""
    if answer is None:
        return b"_\r\n"
    if isinstance(answer, bytes):
        return _bulk(answer)
    return b"*%d\r\n" % len(answer) + b"".join(map(_packed, answer))
