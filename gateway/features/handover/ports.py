"""Resources that only one process of a gateway has at a time, and releases to its successor: ports, and batches."""

import asyncio
import time
from collections.abc import Iterator
from typing import Final, Protocol

import structlog

from gateway.core.listeners import Acceptor

_OPEN_SECONDS: Final = 10.0  # until the folder of batches is free again
_LOOK_SECONDS: Final = 0.02


class Port(Protocol):
    """One port. Its acceptor is None while it is disabled."""

    @property
    def acceptor(self) -> Acceptor | None: ...


class Streams(Protocol):
    """The dashboard's streams."""

    def stop(self) -> None: ...

    def resume(self) -> None: ...


class Reopened(Protocol):
    """Files and batches, which can be opened again after they have stopped."""

    async def open(self) -> None: ...

    async def stop(self) -> None: ...


class Ports:
    """The ports of one gateway, with its batches, if it has any."""

    def __init__(self, main: Port, admin: Port, metrics: Port, *, streams: Streams, batches: Reopened | None) -> None:
        self._ports = {"main": main, "admin": admin, "metrics": metrics}
        self._streams = streams
        self._batches = batches

    def acceptors(self) -> Iterator[tuple[str, Acceptor]]:
        """Of the ports that are enabled, with their names in `Listeners`."""
        for name, port in self._ports.items():
            if port.acceptor is not None:
                yield name, port.acceptor

    async def pause(self) -> None:
        """Accept no more connections until `resume`. Those that are there go on; batches stop."""
        if self._batches is not None:
            await self._batches.stop()
        for _, acceptor in self.acceptors():
            acceptor.pause()
        self._streams.stop()

    async def resume(self) -> None:
        """Go on as before `pause`: the process that was to take over has ended, or is about to."""
        for _, acceptor in self.acceptors():
            await acceptor.accept()
        self._streams.resume()
        if self._batches is not None:
            await _open(self._batches)

    def leave(self) -> None:
        """Close the sockets: another process accepts connections at them now."""
        for _, acceptor in self.acceptors():
            acceptor.stop()


async def _open(batches: Reopened) -> None:
    """Open them as soon as the former owner of their folder has released it."""
    deadline = time.monotonic() + _OPEN_SECONDS
    while True:
        try:
            return await batches.open()
        except Exception as error:
            if time.monotonic() > deadline:
                structlog.get_logger("gateway").error("batches_not_opened", reason=str(error))
                return None
            await asyncio.sleep(_LOOK_SECONDS)
