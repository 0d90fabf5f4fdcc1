"""The sockets that the gateway listens on: bound here, passed by systemd, or taken over."""

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from gateway.config import Listen, ServerConfig

BACKLOG = 4096


class Listeners(NamedTuple):
    """Bound sockets of each port; none = not bound yet. systemd's FileDescriptorName= are these names."""

    main: list[socket.socket]
    admin: list[socket.socket]
    metrics: list[socket.socket]

    def close(self) -> None:
        for each in (*self.main, *self.admin, *self.metrics):
            each.close()


NOT_BOUND = Listeners([], [], [])


def ports_of(server: ServerConfig) -> dict[str, Listen | ServerConfig]:
    """The ports that are configured, by their names in `Listeners`."""
    ports = {"main": server, "admin": server.admin, "metrics": server.metrics}
    return {name: port for name, port in ports.items() if port is not None}


def addresses_of(server: ServerConfig) -> dict[str, tuple[str, int]]:
    """Where these ports listen: host and port."""
    return {name: (port.host, port.port) for name, port in ports_of(server).items()}


async def bind(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address of the host; clients wait until they are accepted. Raises OSError."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, host, port, reuse_address=True, start_serving=False)
    try:
        bound = [socket.socket(fileno=os.dup(each.fileno())) for each in server.sockets]
    finally:
        server.close()
    try:
        for each in bound:
            each.listen(BACKLOG)
    except OSError as error:  # another process has bound the port at the same time
        address = bound[0].getsockname()[:2]
        for each in bound:
            each.close()
        raise OSError(error.errno, f"error while attempting to bind on address {address}: {error.strerror}") from error
    return bound


async def bind_all(server: ServerConfig, have: Listeners) -> Listeners:
    """Bind the missing sockets. Raises OSError."""
    try:
        for name, port in ports_of(server).items():
            if not getattr(have, name):
                have = have._replace(**{name: await bind(port.host, port.port)})
    except OSError:
        have.close()
        raise
    return have


class Acceptor:
    """Accepts connections at bound sockets, which are its own. `make`: the protocol of one, by its address family."""

    def __init__(self, sockets: Sequence[socket.socket], make: Callable[[int], asyncio.BaseProtocol]) -> None:
        self.address = sockets[0].getsockname()
        self._make = make
        self._paused = [*sockets]
        self._servers: list[asyncio.Server] = []

    @property
    def is_accepting(self) -> bool:
        return bool(self._servers)

    def copies(self) -> list[socket.socket]:
        """Duplicates of its listening sockets, owned by the caller."""
        files = [each.fileno() for server in self._servers for each in server.sockets]
        return [socket.socket(fileno=os.dup(file)) for file in files]

    async def accept(self) -> None:
        """Accept connections, including pending ones. Raises OSError."""
        loop = asyncio.get_running_loop()
        while self._paused:
            each = self._paused[0]
            create: Callable[..., Any] = loop.create_server
            if each.family == socket.AF_UNIX:
                create = loop.create_unix_server
            self._servers.append(await create(partial(self._make, each.family), sock=each, backlog=BACKLOG))
            self._paused.pop(0)

    def pause(self) -> None:
        """Let connections wait until `accept` is called again, here or in another process."""
        self._paused += self.copies()
        while self._servers:
            self._servers.pop().close()

    def stop(self) -> None:
        """Accept no more connections: they are refused, unless another process has the sockets as well."""
        self.pause()
        while self._paused:
            self._paused.pop().close()
