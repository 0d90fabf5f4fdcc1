"""A connection between two processes of the gateway: messages, each with open files, over a Unix socket.

The address is an abstract one, which is seen in the same network namespace alone, as the ports are. Only a process of
the same user, or of root, may connect, and only to such a process. Each process waits at its own name that begins with
the address and cannot be taken by others before; the kernel lists the names.
"""

import asyncio
import hashlib
import os
import secrets
import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

PROTOCOL = 1  # of the conversation; changes with its messages
_MOST_BYTES = 1 << 18
_CONNECT_SECONDS = 5.0
_PAUSE_SECONDS = 0.02
_BACKLOG = 64
_SEND_BUFFER_BYTES = 1 << 20
_IN_FILE = msgspec.msgpack.encode(None)  # the content of a larger message is in the last file
MOST_FILES = 200  # of one message; the kernel takes 253
_PEER = struct.Struct("3i")  # pid, uid, gid


class Message(NamedTuple):
    """A message and its open files."""

    content: dict[str, Any]
    files: list[int]

    def close(self) -> None:
        for file in self.files:
            os.close(file)


def address_of(file: Path | None, host: str, port: int) -> bytes:
    """How the names begin at which the gateway that serves this file at this address waits for the next one; without a
    file, this process."""
    name = f"{os.getuid()} {file.absolute() if file else os.getpid()} {host} {port}".encode()
    return b"\0vllm-batching-gateway-" + hashlib.sha256(name).hexdigest()[:32].encode()


def listen(address: bytes) -> socket.socket:
    """A socket at which the next process finds this one."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(b"%b-%b" % (address, secrets.token_hex(8).encode()))
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def connect(address: bytes) -> "Channel | None":
    """A channel to the process that waits there; None = there is none of this user."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        is_busy = False
        for name in _names(address):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.setblocking(False)
            try:
                connection.connect(name)
            except OSError as error:
                connection.close()
                is_busy = is_busy or isinstance(error, BlockingIOError)
                continue
            channel = Channel(connection)
            if channel.is_own:
                return channel
            channel.close()
        if not is_busy or time.monotonic() > deadline:
            return None
        time.sleep(_PAUSE_SECONDS)


def _names(address: bytes) -> list[bytes]:
    """All names that begin with this address, of sockets of any user; earlier versions wait at the address itself."""
    shown = b"@" + address[1:]
    try:
        listed = [line.rpartition(b" ")[2] for line in Path("/proc/net/unix").read_bytes().splitlines()]
    except OSError:
        return []
    return [b"\0" + name[1:] for name in dict.fromkeys(listed) if name == shown or name.startswith(shown + b"-")]


class Channel:
    """One end. `post` keeps the order, and buffers messages that are not read yet."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._socket = connection
        self._unsent: deque[tuple[bytes, Sequence[int]]] = deque()
        self._is_closed = False
        self._is_broken = False  # sending is over; earlier messages of the other end can still be read

    @property
    def is_own(self) -> bool:
        """Whether the other end is a process of the same user, or of root."""
        return self._peer()[1] in (os.getuid(), 0)

    @property
    def pid(self) -> int:
        """The process at the other end."""
        return self._peer()[0]

    def _peer(self) -> tuple[int, int, int]:
        options = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        pid, uid, gid = _PEER.unpack(options)
        return pid, uid, gid

    def post(self, content: dict[str, Any], files: Sequence[int] = ()) -> None:
        """Send a message soon. Its files are closed here once they are sent, or the other end is gone."""
        data = msgspec.msgpack.encode(content)
        if len(data) > _MOST_BYTES:
            data, files = _IN_FILE, [*files, _in_file(data)]
        self._unsent.append((data, files))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._unsent:
            data, files = self._unsent[0]
            try:
                if self._is_broken:
                    raise BrokenPipeError
                socket.send_fds(self._socket, [data], files)
            except BlockingIOError:
                asyncio.get_running_loop().add_writer(self._socket, self._writable)
                return
            except OSError:
                self._is_broken = True
            self._unsent.popleft()
            for file in files:
                os.close(file)

    def _writable(self) -> None:
        asyncio.get_running_loop().remove_writer(self._socket)
        self._flush()

    async def receive(self) -> Message | None:
        """The next message; None = the other end is gone."""
        loop = asyncio.get_running_loop()
        while not self._is_closed:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(
                    _MOST_BYTES, socket.CMSG_SPACE(MOST_FILES * 4), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                await self._readable(loop)
                continue
            except ConnectionResetError:  # it left without reading all; its earlier messages can still be read
                continue
            except OSError:
                return None
            files = [file for _, kind, given in ancillary if kind == socket.SCM_RIGHTS for file in _files(given)]
            try:
                if not data:
                    return None
                if data == _IN_FILE:
                    data = _of_file(files.pop())
                message = Message(msgspec.msgpack.decode(data), files)
                files = []
                return message
            finally:
                for file in files:
                    os.close(file)
        return None

    async def _readable(self, loop: asyncio.AbstractEventLoop) -> None:
        ready: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        loop.add_reader(self._socket, wake)
        try:
            await ready
        finally:
            loop.remove_reader(self._socket)

    async def part(self) -> None:
        """Send the rest, and then the end of the stream."""
        while self._unsent:  # noqa: ASYNC110 - at the end of a process
            await asyncio.sleep(0.01)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close this end; the other one notices it. Only the first call counts."""
        if self._socket.fileno() < 0:
            return
        with suppress(RuntimeError):  # no loop runs: nothing was registered
            loop = asyncio.get_running_loop()
            loop.remove_writer(self._socket)
            loop.remove_reader(self._socket)
        self._is_closed = self._is_broken = True
        self._flush()
        self._socket.close()


def _in_file(data: bytes) -> int:
    file = os.memfd_create("gateway-message", os.MFD_CLOEXEC)
    with open(os.dup(file), "wb") as out:
        out.write(data)
    return file


def _of_file(file: int) -> bytes:
    with open(file, "rb") as source:
        source.seek(0)
        return source.read()


def _files(given: bytes) -> "array[int]":
    files = array("i")
    files.frombytes(given[: len(given) - len(given) % files.itemsize])
    return files
