"""A worker's end of the pipe to its parent."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Self

from loadtest.drive.messages import FromWorker, ToWorker

if TYPE_CHECKING:
    Channel = Connection[FromWorker, ToWorker]


class Pipe:
    """Reads and writes in threads of its own; leaving the block waits until everything is written.

    The event loop must not watch the channel: uvloop would make it non-blocking, and a message that is larger than
    the socket's buffer would then fail halfway. Nor may it write: it would stand still while the parent is busy.
    """

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        self._channel = channel
        self._loop = loop
        self._inbox: asyncio.Queue[ToWorker | None] = asyncio.Queue()
        self._outbox: SimpleQueue[FromWorker | None] = SimpleQueue()
        self._reader = Thread(target=self._read, daemon=True)
        self._writer = Thread(target=self._write, daemon=True)

    def __enter__(self) -> Self:
        self._reader.start()
        self._writer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The reader ends with the parent's end of the pipe.
        self._outbox.put(None)
        self._writer.join()

    def send(self, message: FromWorker) -> None:
        """Queues a message. It must not change afterwards."""
        self._outbox.put(message)

    async def receive(self) -> ToWorker | None:
        """Returns the parent's next message; None if the parent is gone."""
        return await self._inbox.get()

    def _read(self) -> None:
        message: ToWorker | None = None
        try:
            while True:
                message = self._received()
                self._loop.call_soon_threadsafe(self._inbox.put_nowait, message)
                if message is None:
                    return
        except RuntimeError:
            return  # the loop has ended

    def _received(self) -> ToWorker | None:
        try:
            return self._channel.recv()
        except (EOFError, OSError):
            return None

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._channel.send(message)
            except OSError:
                return  # the parent is gone, as the reader finds too
