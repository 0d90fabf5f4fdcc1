"""The rows of files and batches in SQLite, for one gateway alone: it locks the folder.

Contents are in files beside it.
"""

import fcntl
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from gateway.core.errors import Draining
from gateway.core.threads import Threads
from gateway.features.batches.batch import RUNNING, Batch, Owner, StoredFile
from gateway.features.batches.store import FolderInUse, StoreUnusable

Result = TypeVar("Result")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, key TEXT NOT NULL, tenant TEXT NOT NULL,
    filename TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS files_of_owner ON files (key, tenant, number);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, key TEXT NOT NULL, tenant TEXT NOT NULL,
    status TEXT NOT NULL, expires_at INTEGER NOT NULL, batch BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_of_owner ON batches (key, tenant, number);
"""
_FILE = "id, key, tenant, filename, purpose, bytes, created_at, expires_at"
_STATUSES = ", ".join(f"'{status}'" for status in RUNNING)


class Rows:
    """The tables. All methods run in threads of `SqliteStore`, one at a time."""

    def __init__(self, folder: Path) -> None:
        """Open the folder, which no other process may have open. Raises StoreUnusable or OSError."""
        for each in (folder, folder / "files"):  # prompts and answers are for this user alone
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
            self._tables.executescript(_SCHEMA)
        except sqlite3.Error as error:
            os.close(self._lock)
            raise StoreUnusable(f"batches.path ({folder}) cannot be used: {error}") from error

    def close(self) -> None:
        self._tables.close()
        os.close(self._lock)

    def add_file(self, file: StoredFile) -> None:
        owner, values = file.owner, (file.filename, file.purpose, file.size_bytes, file.created_at, file.expires_at)
        marks = "?, ?, ?, ?, ?, ?, ?, ?"
        self._tables.execute(f"INSERT OR REPLACE INTO files ({_FILE}) VALUES ({marks})", (file.id, *owner, *values))

    def file(self, file_id: str, owner: Owner) -> StoredFile | None:
        found = self._tables.execute(
            f"SELECT {_FILE} FROM files WHERE id = ? AND key = ? AND tenant = ?", (file_id, *owner)
        ).fetchone()
        return None if found is None else StoredFile.of_row(found)

    def files(
        self, owner: Owner, purpose: str | None, after: str | None, limit: int, now: int, *, ascending: bool
    ) -> list[StoredFile]:
        """One more than `limit`, if there are more. Raises KeyError if `after` is no file of this owner."""
        where, values = ["key = ?", "tenant = ?", "expires_at > ?"], [*owner, now]
        if purpose is not None:
            where.append("purpose = ?")
            values.append(purpose)
        order, compared = ("ASC", ">") if ascending else ("DESC", "<")
        if after is not None:
            where.append(f"number {compared} ?")
            values.append(self._number("files", after, owner))
        query = f"SELECT {_FILE} FROM files WHERE {' AND '.join(where)} ORDER BY number {order} LIMIT ?"
        return [StoredFile.of_row(row) for row in self._tables.execute(query, (*values, limit + 1))]

    def delete_file(self, file_id: str) -> None:
        self._tables.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def all_files(self, key: str | None = None) -> list[tuple[str, str, int, int]]:
        """Of every file its id, key, size in bytes, and when it expires; `key`: of those of this one alone."""
        where, values = ("", ()) if key is None else (" WHERE key = ?", (key,))
        return [*self._tables.execute(f"SELECT id, key, bytes, expires_at FROM files{where}", values)]

    def put_batch(
        self, batch_id: str, owner: Owner, values: tuple[str, int, bytes], files: tuple[StoredFile, ...] = ()
    ) -> None:
        """Insert or update a batch: status, expiry and all of it; together with the files that it has written."""
        self._tables.execute("BEGIN")
        try:
            for file in files:
                self.add_file(file)
            changed = self._tables.execute(
                "UPDATE batches SET status = ?, expires_at = ?, batch = ? WHERE id = ?", (*values, batch_id)
            )
            if not changed.rowcount:
                query = "INSERT INTO batches (id, key, tenant, status, expires_at, batch) VALUES (?, ?, ?, ?, ?, ?)"
                self._tables.execute(query, (batch_id, *owner, *values))
            self._tables.execute("COMMIT")
        except BaseException:
            if self._tables.in_transaction:
                self._tables.execute("ROLLBACK")
            raise

    def batch(self, batch_id: str, owner: Owner) -> Batch | None:
        found = self._tables.execute(
            "SELECT batch FROM batches WHERE id = ? AND key = ? AND tenant = ?", (batch_id, *owner)
        ).fetchone()
        return None if found is None else Batch.restored(found[0])

    def batches(self, owner: Owner, after: str | None, limit: int) -> list[Batch]:
        """The newest first; one more than `limit`, if there are more. Raises KeyError as `files` does."""
        number = 1 << 62 if after is None else self._number("batches", after, owner)
        query = "SELECT batch FROM batches WHERE key = ? AND tenant = ? AND number < ? ORDER BY number DESC LIMIT ?"
        return [Batch.restored(row[0]) for row in self._tables.execute(query, (*owner, number, limit + 1))]

    def running_batches(self) -> list[Batch]:
        """Those that have not ended, the oldest first."""
        query = f"SELECT batch FROM batches WHERE status IN ({_STATUSES}) ORDER BY number"
        return [Batch.restored(row[0]) for row in self._tables.execute(query)]

    def forget_batches(self, before: int) -> None:
        """Drop the rows of batches that have ended, and whose window closed before this time."""
        query = f"DELETE FROM batches WHERE expires_at < ? AND status NOT IN ({_STATUSES})"
        self._tables.execute(query, (before,))

    def _number(self, table: str, row_id: str, owner: Owner) -> int:
        found = self._tables.execute(
            f"SELECT number FROM {table} WHERE id = ? AND key = ? AND tenant = ?", (row_id, *owner)
        ).fetchone()
        if found is None:
            raise KeyError(row_id)
        return int(found[0])


class SqliteStore:
    """A `Store` that runs `Rows` in a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads = Threads("batches_rows")
        self._rows: Rows | None = None

    def _open_rows(self) -> Rows:
        self.check_open()
        assert self._rows is not None
        return self._rows

    def check_open(self) -> None:
        """Raises Draining if the store is closed: another process may have it now."""
        if self._rows is None:
            raise Draining("Files and batches are not available here at the moment.", retry_after_seconds=1.0)

    async def open(self) -> None:
        """Open the folder for this process alone. Raises StoreUnusable or OSError."""
        self._rows = await self._run(Rows, self._folder)

    async def close(self) -> None:
        rows, self._rows = self._rows, None
        if rows is not None:
            await self._run(rows.close)

    async def _run(self, do: Callable[..., Result], *args: Any, **options: Any) -> Result:
        """Do this in a thread, after what was to be done before."""
        return await self._threads.run(do, *args, **options)

    async def add_file(self, file: StoredFile) -> None:
        await self._run(self._open_rows().add_file, file)

    async def file(self, file_id: str, owner: Owner) -> StoredFile | None:
        return await self._run(self._open_rows().file, file_id, owner)

    async def list_files(
        self, owner: Owner, purpose: str | None, after: str | None, limit: int, now: int, *, ascending: bool
    ) -> list[StoredFile]:
        return await self._run(self._open_rows().files, owner, purpose, after, limit, now, ascending=ascending)

    async def delete_file(self, file_id: str) -> None:
        await self._run(self._open_rows().delete_file, file_id)

    async def all_files(self, key: str | None = None) -> list[tuple[str, str, int, int]]:
        return await self._run(self._open_rows().all_files, key)

    async def put_batch(self, batch: Batch, files: tuple[StoredFile, ...] = ()) -> None:
        values = (batch.status, batch.expires_at, batch.stored())
        await self._run(self._open_rows().put_batch, batch.id, batch.owner, values, files)

    async def batch(self, batch_id: str, owner: Owner) -> Batch | None:
        return await self._run(self._open_rows().batch, batch_id, owner)

    async def list_batches(self, owner: Owner, after: str | None, limit: int) -> list[Batch]:
        return await self._run(self._open_rows().batches, owner, after, limit)

    async def running_batches(self) -> list[Batch]:
        return await self._run(self._open_rows().running_batches)

    async def forget_batches(self, before: int) -> None:
        await self._run(self._open_rows().forget_batches, before)
