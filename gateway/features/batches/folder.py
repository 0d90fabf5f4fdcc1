"""Contents in a folder, which belongs to one gateway."""

import os
import secrets
import shutil
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from gateway.core.threads import Threads
from gateway.features.batches.contents import JournalGroup, has_no_room
from gateway.features.batches.errors import StorageFull

_PART = ".part"  # the end of the name of a file that is not complete
_THREADS = 8  # more batches than these write at the same time by turns


class DurableFile:
    """An `AnswerFile` on disk, which is made when it is first written to."""

    def __init__(self, path: Path, threads: Threads) -> None:
        self._path = path
        self._threads = threads
        self._number = -1
        self._size_bytes = 0
        self._lock = threading.Lock()  # a thread may still write when the journal gives up
        self._has_ended = False

    async def append(self, data: bytes) -> None:
        await self._threads.run(self._append, data)

    def _append(self, data: bytes) -> None:
        with self._lock:
            if not self._has_ended:
                if self._number < 0:
                    self._open()
                self._write(data)

    def _open(self) -> None:
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        self._number = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size_bytes = os.lseek(self._number, 0, os.SEEK_END)
        for folder in (self._path.parent, self._path.parent.parent):
            _sync(folder)

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
            if not self._has_ended and self._number >= 0:
                os.close(self._number)
            self._has_ended = True


class Folder:
    """`Contents` in a folder, which the store of the rows has made."""

    group = JournalGroup(64, 4194304, 0.5)
    piece_bytes = 262144

    def __init__(self, folder: Path) -> None:
        self.threads = Threads("batches", _THREADS)
        self._files, self._parts = folder / "files", folder / "parts"

    def path(self, name: str) -> Path:
        return self._files / name

    async def write(self, name: str, content: AsyncIterator[bytes]) -> None:
        try:
            await self._write(name, content)
        except OSError as error:
            if has_no_room(error):
                raise StorageFull("No space is left for files (batches.path).") from error
            raise

    async def _write(self, name: str, content: AsyncIterator[bytes]) -> None:
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

    def new_part(self, batch_id: str, holder: str, name: str) -> DurableFile:
        return DurableFile(self._parts / batch_id / f"{name}-{holder}-{secrets.token_hex(4)}", self.threads)

    async def parts(self, batch_id: str, name: str) -> list[BinaryIO]:
        return await self.threads.to_its_end(_opened, self._parts / batch_id, f"{name}-", undo=_close_all)

    async def delete_parts(self, batch_ids: Iterable[str]) -> None:
        for batch_id in batch_ids:
            await self.threads.run(shutil.rmtree, self._parts / batch_id, ignore_errors=True)

    async def batches_with_parts(self) -> set[str]:
        return await self.threads.run(lambda: {path.name for path in self._parts.iterdir()})


def _opened(folder: Path, prefix: str) -> list[BinaryIO]:
    """All files of a folder whose names begin so; none if there is no folder."""
    with ExitStack() as stack:
        found = [stack.enter_context(path.open("rb")) for path in sorted(folder.glob(f"{prefix}*"))]
        stack.pop_all()
    return list[BinaryIO](found)


def _close_all(files: list[BinaryIO]) -> None:
    for file in files:
        file.close()


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
