"""SQLite, for one gateway alone: it locks the folder. Contents are in files beside it."""

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gateway.core.threads import Threads
from gateway.features.batches.errors import StorageFull
from gateway.features.batches.store import TABLES, Execute, FolderInUse, Store, StoreUnusable


class SqliteStore(Store):
    """A store in a folder. One transaction runs at a time, in one thread."""

    now = "((julianday('now') - 2440587.5) * 86400.0)"
    locking = ""  # a transaction has the database for itself
    is_alone = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads = Threads("batches_rows")
        self._turn = asyncio.Lock()
        self._opened: tuple[sqlite3.Connection, int] | None = None  # with the lock of the folder

    @property
    def is_open(self) -> bool:
        return self._opened is not None

    async def open(self) -> None:
        self._opened = await self._threads.run(_open, self._folder)

    async def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            async with self._turn:
                await self._threads.run(_close, *opened)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Execute]:
        async with self._turn:
            self.check_open()
            assert self._opened is not None
            connection, _ = self._opened

            async def execute(statement: str, *values: Any) -> list[tuple[Any, ...]]:
                return await self._threads.run(_rows, connection, statement, values)

            try:
                await self._threads.to_its_end(_rows, connection, "BEGIN IMMEDIATE")
                yield execute
                await self._threads.to_its_end(_rows, connection, "COMMIT")
            except BaseException as error:
                await self._threads.to_its_end(connection.rollback)
                if isinstance(error, sqlite3.OperationalError) and "full" in str(error):
                    raise StorageFull("No space is left for batches (batches.path).") from error
                raise


def _open(folder: Path) -> tuple[sqlite3.Connection, int]:
    """Open the folder, which no other process may have open. Raises StoreUnusable or OSError."""
    for each in (folder, folder / "files", folder / "parts"):  # prompts and answers are for this user alone
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pid = os.read(lock, 20).decode("ascii", "replace") or "unknown"
        os.close(lock)
        raise FolderInUse(f"batches.path ({folder}) is in use by another gateway (process {pid})") from None
    os.truncate(lock, 0)
    os.pwrite(lock, b"%d" % os.getpid(), 0)
    try:
        connection = sqlite3.connect(folder / "batches.sqlite3", isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.executescript(TABLES.format(number="INTEGER PRIMARY KEY AUTOINCREMENT"))
        connection.execute("UPDATE gateway_claims SET until = 0")  # what the process before this one held
    except sqlite3.Error as error:
        os.close(lock)
        raise StoreUnusable(f"batches.path ({folder}) cannot be used: {error}") from error
    return connection, lock


def _close(connection: sqlite3.Connection, lock: int) -> None:
    connection.close()
    os.close(lock)


def _rows(connection: sqlite3.Connection, statement: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    return connection.execute(statement, values).fetchall()
