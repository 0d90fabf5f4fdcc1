"""SQLite, for one gateway alone: it locks the folder. Contents are in files beside it."""

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gateway.core.errors import Draining
from gateway.core.threads import Threads
from gateway.features.batches.errors import StorageFull
from gateway.features.batches.store import TABLES, FolderInUse, StoreUnusable


class _Tables:
    """The open database. All methods run in one thread, in the order in which they are called."""

    def __init__(self, folder: Path) -> None:
        """Open the folder, which no other process may have open. Raises StoreUnusable or OSError."""
        for each in (folder, folder / "files", folder / "parts"):  # prompts and answers are for this user alone
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = os.read(self._lock, 20).decode("ascii", "replace") or "unknown"
            os.close(self._lock)
            raise FolderInUse(f"batches.path ({folder}) is in use by another gateway (process {pid})") from None
        os.truncate(self._lock, 0)
        os.pwrite(self._lock, b"%d" % os.getpid(), 0)
        try:
            self._tables = sqlite3.connect(folder / "batches.sqlite3", isolation_level=None, check_same_thread=False)
            self._tables.execute("PRAGMA journal_mode = WAL")
            self._tables.execute("PRAGMA synchronous = FULL")
            self._tables.executescript(TABLES.format(number="INTEGER PRIMARY KEY AUTOINCREMENT"))
        except sqlite3.Error as error:
            os.close(self._lock)
            raise StoreUnusable(f"batches.path ({folder}) cannot be used: {error}") from error

    def execute(self, query: str, values: tuple[Any, ...] = ()) -> tuple[list[tuple[Any, ...]], int]:
        """The rows of a query, and how many a statement changed."""
        done = self._tables.execute(query, values)
        return done.fetchall(), done.rowcount

    def roll_back(self) -> None:
        if self._tables.in_transaction:
            self._tables.execute("ROLLBACK")

    def close(self) -> None:
        self._tables.close()
        os.close(self._lock)


class SqliteDatabase:
    """A `Database` in a folder, and the transaction that runs: there is one at a time."""

    now = "((julianday('now') - 2440587.5) * 86400.0)"
    locking = ""  # a transaction has the database for itself
    is_alone = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads = Threads("batches_rows")
        self._turn = asyncio.Lock()
        self._tables: _Tables | None = None

    def check_open(self) -> None:
        self._opened()

    def _opened(self) -> _Tables:
        if self._tables is None:
            raise Draining("Files and batches are not available here at the moment.", retry_after_seconds=1.0)
        return self._tables

    async def open(self) -> None:
        self._tables = await self._threads.run(_Tables, self._folder)

    async def close(self) -> None:
        tables, self._tables = self._tables, None
        if tables is not None:
            async with self._turn:
                await self._threads.run(tables.close)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator["SqliteDatabase"]:
        async with self._turn:
            tables = self._opened()
            try:
                await self._threads.to_its_end(tables.execute, "BEGIN IMMEDIATE")
                yield self
                await self._threads.to_its_end(tables.execute, "COMMIT")
            except BaseException as error:
                await self._threads.to_its_end(tables.roll_back)
                if isinstance(error, sqlite3.OperationalError) and "full" in str(error):
                    raise StorageFull("No space is left for batches (batches.path).") from error
                raise

    async def ask(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        return (await self._threads.run(self._opened().execute, query, values))[0]

    async def do(self, query: str, *values: Any) -> int:
        return (await self._threads.run(self._opened().execute, query, values))[1]
