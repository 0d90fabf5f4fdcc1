"""The line between a parent and one worker: a pair of sockets. The worker reports over it that it serves, and each sees
the end of the other.
"""

import asyncio
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from gateway.features.workers.place import WorkerPlace

_SERVES: Final = b"s"
_ORPHAN_EXIT_CODE: Final = 70


class LineToParent:
    """A worker's end. Without its parent a worker ends immediately: another parent may have started other workers,
    whose store does not count this worker's requests."""

    def __init__(self, place: WorkerPlace) -> None:
        self.place = place
        self._socket = socket.socket(fileno=place.line)
        self._socket.set_inheritable(False)
        self._socket.setblocking(False)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """End this process with its parent while the block runs."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket, self._on_end)
        try:
            yield
        finally:
            loop.remove_reader(self._socket)

    def serves(self) -> None:
        """Say to the parent that this worker accepts clients."""
        with suppress(OSError):
            self._socket.send(_SERVES)

    def _on_end(self) -> None:
        shutil.rmtree(self.place.folder, ignore_errors=True)  # the parent could not
        os._exit(_ORPHAN_EXIT_CODE)


class LineToWorker:
    """The parent's end. `on_serving` is called when the worker has said that it serves."""

    def __init__(self, on_serving: Callable[[], None]) -> None:
        self.serving = asyncio.Event()  # it has said that it serves
        self.is_serving = False  # and has not ended since
        self._on_serving = on_serving
        self._own, self._other = socket.socketpair()
        self._own.setblocking(False)

    @property
    def other(self) -> int:
        """The descriptor of the worker's end."""
        return self._other.fileno()

    def given(self) -> None:
        """The worker has its end: this process keeps its own one alone, to see the end of the worker."""
        self._other.close()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Hear the worker while the block runs; the line ends with the block."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._own, self._on_word)
        try:
            yield
        finally:
            loop.remove_reader(self._own)
            self.close()

    def close(self) -> None:
        self._own.close()
        self._other.close()

    def _on_word(self) -> None:
        try:
            word = self._own.recv(16)
        except OSError:
            word = b""
        if word:
            self.is_serving = True
            self.serving.set()
            self._on_serving()
        else:  # the worker has ended, or is about to
            self.is_serving = False
            asyncio.get_running_loop().remove_reader(self._own)
