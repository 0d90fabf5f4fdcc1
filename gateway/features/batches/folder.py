"""Contents in a folder, which belongs to one gateway."""

import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from gateway.core.threads import Threads
from gateway.features.batches.contents import JournalGroup

_PART = ".part"  # the end of the name of a file that is not complete
_THREADS = 8  # more batches than these write at the same time by turns


class DurableFile:
    """An `AnswerFile` on disk, which is at its end."""

    def __init__(self, path: Path, threads: Threads) -> None:
        """Open or make the file, in a thread. Raises OSError."""
        self._threads = threads
        self._number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size_bytes = os.lseek(self._number, 0, os.SEEK_END)
        self._lock = threading.Lock()  # a thread may still write when the journal gives up
        self._is_open = True

    async def append(self, data: bytes) -> None:
        await self._threads.run(self._append, data)

    def _append(self, data: bytes) -> None:
        with self._lock:
            if self._is_open:
                self._write(data)

    def _write(self, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._number, view) :]
            os.fdatasync(self._number)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._number, self._size_bytes)
                os.lseek(self._number, self._size_bytes, os.SEEK_SET)
            raise
        self._size_bytes += len(data)

    async def finish(self) -> None:
        await self._threads.run(self.close)

    def close(self) -> None:
        """Close the file, in a thread, once what is appended now has ended."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self._number)


class Folder:
    """`Contents` in a folder, which the store of the rows has made."""

    group = JournalGroup(64, 4194304, 0.5)
    piece_bytes = 262144

    def __init__(self, folder: Path) -> None:
        self.threads = Threads("batches", _THREADS)
        self._files = folder / "files"

    def path(self, name: str) -> Path:
        """Where a content is, or will be."""
        return self._files / name

    def open_answers(self, name: str) -> DurableFile:
        """A content that lines are appended to, in a thread."""
        opened = DurableFile(self.path(name), self.threads)
        _sync(self._files)
        return opened

    async def kept_bytes(self, name: str) -> int:
        """The size of a content in bytes; an empty one is deleted."""
        return await self.threads.run(_kept_bytes, self.path(name))

    async def write(self, name: str, content: AsyncIterator[bytes]) -> None:
        path, is_kept = self.path(name), False
        target = await self.threads.to_its_end(_new, self.path(name + _PART), undo=_discard)
        try:
            async for piece in content:
                await self.threads.run(target.write, piece)
            await self.threads.to_its_end(_complete, target, path)
            is_kept = True
        finally:
            if not is_kept:
                await self.threads.run(_discard, target, path)

    async def read(self, name: str) -> AsyncGenerator[bytes, None]:
        source = await self.local(name)
        try:
            while data := await self.threads.run(source.read, self.piece_bytes):
                yield data
        finally:
            self.threads.later(source.close)

    async def local(self, name: str) -> BinaryIO:
        return await self.threads.to_its_end(_readable, self.path(name), undo=BinaryIO.close)

    async def delete(self, name: str) -> None:
        await self.threads.run(self.path(name).unlink, missing_ok=True)

    async def delete_others(self, kept: set[str], before: float) -> None:
        await self.threads.run(_delete_all_but, self._files, kept, before)


def _kept_bytes(path: Path) -> int:
    size_bytes = path.stat().st_size
    if not size_bytes:
        path.unlink()
    return size_bytes


def _new(path: Path) -> BinaryIO:
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))


def _readable(path: Path) -> BinaryIO:
    return open(path, "rb")


def _complete(target: BinaryIO, path: Path) -> None:
    """Make a file durable under its final name."""
    target.flush()
    os.fdatasync(target.fileno())
    os.rename(target.name, path)
    _sync(path.parent)
    target.close()


def _discard(target: BinaryIO, *others: Path) -> None:
    """Delete a new file, under whatever name it has now."""
    for each in (Path(target.name), *others):
        each.unlink(missing_ok=True)
    with suppress(OSError):  # nothing more can be written
        target.close()


def _sync(folder: Path) -> None:
    """Make the names of new files durable."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _delete_all_but(folder: Path, kept: set[str], before: float) -> None:
    for path in folder.iterdir():
        if path.name not in kept:
            with suppress(OSError):
                if path.stat().st_mtime < before:
                    path.unlink()
