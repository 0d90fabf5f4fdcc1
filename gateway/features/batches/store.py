"""The rows of files and batches: the same statements for SQLite and PostgreSQL, each method in one transaction.

Several gateways may use one store at the same time; a `holder` is the id of one of them. A gateway alone is a fleet of
one, whose claims are never lost while it runs.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol

from gateway.features.batches.batch import RUNNING, Batch, Owner, StoredFile
from gateway.features.batches.claims import CLAIM_SECONDS, Claim, Progress, next_claim

_FORGET_SECONDS = 3600.0  # after which a gateway that was not heard of is forgotten
_ROWS = 5000  # read in one turn of the event loop
_FILE = "id, key, tenant, filename, purpose, bytes, created_at, expires_at"
_STATUSES = ", ".join(f"'{status}'" for status in RUNNING)
_RUNNING = f"WHERE status IN ({_STATUSES})"
TABLES = """
CREATE TABLE IF NOT EXISTS gateway_files (
    number {number}, id TEXT NOT NULL UNIQUE, key TEXT NOT NULL, tenant TEXT NOT NULL, filename TEXT NOT NULL,
    purpose TEXT NOT NULL, bytes BIGINT NOT NULL, created_at BIGINT NOT NULL, expires_at BIGINT NOT NULL
);
CREATE INDEX IF NOT EXISTS gateway_files_of_owner ON gateway_files (key, tenant, number);
CREATE TABLE IF NOT EXISTS gateway_batches (
    number {number}, id TEXT NOT NULL UNIQUE, key TEXT NOT NULL, tenant TEXT NOT NULL, status TEXT NOT NULL,
    expires_at BIGINT NOT NULL, batch TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS gateway_batches_of_owner ON gateway_batches (key, tenant, number);
CREATE INDEX IF NOT EXISTS gateway_batches_of_status ON gateway_batches (status);
CREATE TABLE IF NOT EXISTS gateway_members (holder TEXT PRIMARY KEY, until FLOAT8 NOT NULL);
CREATE TABLE IF NOT EXISTS gateway_claims (
    batch TEXT NOT NULL, first INTEGER NOT NULL, past INTEGER NOT NULL, holder TEXT NOT NULL, until FLOAT8 NOT NULL,
    is_done BOOLEAN NOT NULL, report TEXT NOT NULL, PRIMARY KEY (batch, first)
);
"""


class StoreUnusable(OSError):
    """The folder or the database of files and batches cannot be used; the text says why, and what to do."""


class FolderInUse(StoreUnusable):
    """Another gateway has the folder of files and batches open."""


class Connection(Protocol):
    """One transaction. In a query, each ? stands for the next value."""

    async def ask(self, query: str, *values: Any) -> list[tuple[Any, ...]]: ...

    async def do(self, query: str, *values: Any) -> int:
        """Returns how many rows a statement inserted, changed or deleted."""


class Database(Protocol):
    """What differs between SQLite and PostgreSQL.

    `now`: its time in Unix seconds; `locking`: ends a query whose rows no other transaction may change meanwhile.
    `is_alone`: no other process uses it.
    """

    now: str
    locking: str
    is_alone: bool

    async def open(self) -> None:
        """Create what is missing. Raises StoreUnusable, or OSError of the contents."""

    async def close(self) -> None: ...

    def check_open(self) -> None:
        """Raises Draining while it is closed: another process may have it then."""

    def transaction(self) -> AbstractAsyncContextManager[Connection]:
        """Commits at the end of the block. Raises Draining, StorageUnavailable or StorageFull."""


class ClaimedLines(NamedTuple):
    """Lines that this gateway has to run now. `is_again`: others, or it itself, may have run a part of them before."""

    claim: Claim
    is_again: bool
    is_complete: bool  # all lines of the batch have an answer on disk


class Store:
    """The statements of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._transaction = database.transaction
        self.is_alone = database.is_alone
        self.check_open = database.check_open
        self.close = database.close

    async def open(self) -> None:
        """Raises StoreUnusable, or OSError of the contents."""
        await self._database.open()
        if self.is_alone:
            async with self._transaction() as connection:  # what the process before this one held
                await connection.do("UPDATE gateway_claims SET until = 0")

    async def add_file(self, file: StoredFile) -> None:
        async with self._transaction() as connection:
            await _add_file(connection, file)

    async def file(self, file_id: str, owner: Owner) -> StoredFile | None:
        query = f"SELECT {_FILE} FROM gateway_files WHERE id = ? AND key = ? AND tenant = ?"
        async with self._transaction() as connection:
            found = await connection.ask(query, file_id, *owner)
        return StoredFile.of_row(found[0]) if found else None

    async def list_files(
        self, owner: Owner, purpose: str | None, after: str | None, limit: int, now: int, *, ascending: bool
    ) -> list[StoredFile]:
        """One more than `limit`, if there are more. Raises KeyError if `after` is no file of this owner."""
        where, values = "key = ? AND tenant = ? AND expires_at > ?", [*owner, now]
        order, compared = ("ASC", ">") if ascending else ("DESC", "<")
        async with self._transaction() as connection:
            if purpose is not None:
                where += " AND purpose = ?"
                values.append(purpose)
            if after is not None:
                where += f" AND number {compared} ?"
                values.append(await _number(connection, "gateway_files", after, owner))
            query = f"SELECT {_FILE} FROM gateway_files WHERE {where} ORDER BY number {order} LIMIT ?"
            return [StoredFile.of_row(row) for row in await connection.ask(query, *values, limit + 1)]

    async def delete_file(self, file_id: str) -> None:
        async with self._transaction() as connection:
            await connection.do("DELETE FROM gateway_files WHERE id = ?", file_id)

    async def all_files(self, key: str | None = None) -> list[tuple[str, str, int, int]]:
        """Of every file its id, key, size in bytes, and when it expires; `key`: of those of this one alone."""
        of_key, keys = ("", ()) if key is None else (" AND key = ?", (key,))
        query = f"""SELECT id, key, bytes, expires_at, number FROM gateway_files
            WHERE number > ?{of_key} ORDER BY number LIMIT ?"""
        found, after = list[tuple[str, str, int, int]](), 0
        async with self._transaction() as connection:
            while rows := await connection.ask(query, after, *keys, _ROWS):
                found += [(row[0], row[1], row[2], row[3]) for row in rows]
                after = rows[-1][4]
        return found

    async def put_batch(self, batch: Batch) -> None:
        """Keep a batch as it is now, whether it is new or not."""
        query = """INSERT INTO gateway_batches (id, key, tenant, status, expires_at, batch) VALUES (?, ?, ?, ?, ?, ?)
            ON CONFLICT (id) DO UPDATE SET status = excluded.status, batch = excluded.batch"""
        async with self._transaction() as connection:
            await connection.do(query, batch.id, *batch.owner, batch.status, batch.expires_at, batch.stored())

    async def batch(self, batch_id: str, owner: Owner) -> Batch | None:
        async with self._transaction() as connection:
            found = await _batches(connection, "WHERE id = ? AND key = ? AND tenant = ?", batch_id, *owner)
        return found[0] if found else None

    async def list_batches(self, owner: Owner, after: str | None, limit: int) -> list[Batch]:
        """The newest first; one more than `limit`, if there are more. Raises KeyError as `list_files` does."""
        where = "WHERE key = ? AND tenant = ? AND number < ? ORDER BY number DESC LIMIT ?"
        async with self._transaction() as connection:
            number = 1 << 62 if after is None else await _number(connection, "gateway_batches", after, owner)
            found = await _batches(connection, where, *owner, number, limit + 1)
        return found[::-1]

    async def running_batches(self) -> list[Batch]:
        """Those that have not ended, the oldest first."""
        async with self._transaction() as connection:
            return await _batches(connection, _RUNNING)

    async def forget_batches(self, before: int) -> None:
        """Drop the rows of batches that have ended, and whose window closed before this time."""
        query = f"DELETE FROM gateway_batches WHERE expires_at < ? AND status NOT IN ({_STATUSES})"
        async with self._transaction() as connection:
            await connection.do(query, before)

    async def change(self, batch_id: str, change: Callable[[Batch], bool]) -> Batch | None:
        """Change a batch that no other gateway changes meanwhile, and keep it if `change` returns True.

        Returns the batch as it is then; None = it has been forgotten.
        """
        async with self._transaction() as connection:
            batch = await self._locked(connection, batch_id)
            if batch is not None and change(batch):
                await _update(connection, batch)
            return batch

    async def _locked(self, connection: Connection, batch_id: str) -> Batch | None:
        """The batch as it stays until the transaction ends, without what gateways report."""
        query = f"SELECT batch FROM gateway_batches WHERE id = ?{self._database.locking}"
        found = await connection.ask(query, batch_id)
        return Batch.restored(found[0][0]) if found else None

    async def claim(self, batch_id: str, holder: str, held: Collection[int] = ()) -> ClaimedLines | None:
        """Claim lines by `claims.next_claim`; None = nothing at the moment.

        `held`: the claims of the batch that the holder runs, by their first lines; its others are lost.
        """
        clock, locking = self._database.now, self._database.locking
        async with self._transaction() as connection:
            batch = await self._locked(connection, batch_id)
            if batch is None or not batch.is_running or not batch.total:
                return None
            query = f"SELECT {clock}, (SELECT count(*) FROM gateway_members WHERE until > {clock})"
            [(now, members)] = await connection.ask(query)
            query = f"""SELECT first, past, holder, until, is_done FROM gateway_claims
                WHERE batch = ? ORDER BY first{locking}"""
            claims = [Claim._make(row) for row in await connection.ask(query, batch_id)]
            claims = [each.as_of(holder, held) for each in claims]
            is_over = batch.status == "cancelling" or now >= batch.expires_at
            progress = Progress(batch.total, claims, is_over)
            gateways = 0 if self.is_alone else max(1, members)
            if (claim := next_claim(progress, holder, gateways, now)) is None:
                return None
            query = """INSERT INTO gateway_claims VALUES (?, ?, ?, ?, ?, FALSE, '') ON CONFLICT (batch, first)
                DO UPDATE SET holder = excluded.holder, until = excluded.until"""
            await connection.do(query, batch_id, claim.first, claim.end, claim.holder, claim.until)
            is_again = any(each.first == claim.first for each in claims)
            return ClaimedLines(claim, is_again, progress.is_complete)

    async def finish(self, batch_id: str, first: int, holder: str, report: str, *, is_done: bool) -> None:
        """End a claim that is still this holder's: its lines are done, or other gateways may take it over at once."""
        query = """UPDATE gateway_claims SET is_done = ?, until = 0, report = ?
            WHERE batch = ? AND first = ? AND holder = ? AND NOT is_done"""
        async with self._transaction() as connection:
            await connection.do(query, is_done, report, batch_id, first, holder)

    async def release(self, holder: str) -> None:
        """Let others take over all claims of a gateway that stops."""
        async with self._transaction() as connection:
            await connection.do("UPDATE gateway_claims SET until = 0 WHERE holder = ? AND NOT is_done", holder)
            await connection.do("DELETE FROM gateway_members WHERE holder = ?", holder)

    async def tick(
        self, holder: str, held: Sequence[tuple[str, int]], reports: Mapping[tuple[str, int], str]
    ) -> tuple[set[tuple[str, int]], list[Batch]]:
        """Extend claims, given by their batch and first line, and keep reports of what was done of them.

        Returns the claims that are still its own, and all batches that have not ended. A gateway alone has no need of
        this.
        """
        async with self._transaction() as connection:
            kept = await self._extend(connection, holder, held)
            query = "UPDATE gateway_claims SET report = ? WHERE batch = ? AND first = ? AND holder = ?"
            for (batch_id, first), report in sorted(reports.items()):
                await connection.do(query, report, batch_id, first, holder)
            return kept, await _batches(connection, _RUNNING)

    async def _extend(
        self, connection: Connection, holder: str, held: Sequence[tuple[str, int]]
    ) -> set[tuple[str, int]]:
        clock = self._database.now
        query = f"""INSERT INTO gateway_members VALUES (?, {clock} + ?)
            ON CONFLICT (holder) DO UPDATE SET until = excluded.until"""
        await connection.do(query, holder, CLAIM_SECONDS)
        await connection.do(f"DELETE FROM gateway_members WHERE until < {clock} - ?", _FORGET_SECONDS)
        if not held:
            return set()
        claims = ", ".join(["(?, ?)"] * len(held))
        query = f"""UPDATE gateway_claims SET until = {clock} + ? WHERE holder = ? AND NOT is_done
            AND (batch, first) IN (VALUES {claims}) RETURNING batch, first"""
        values = [value for claim in held for value in claim]
        return {(row[0], row[1]) for row in await connection.ask(query, CLAIM_SECONDS, holder, *values)}

    async def reopen(self, batch_id: str, holder: str) -> None:
        """Have all lines looked at again, because answers are missing. Only for the holder of the batch's end."""
        query = "DELETE FROM gateway_claims WHERE batch = ? AND first = past AND holder = ?"
        async with self._transaction() as connection:
            if await connection.do(query, batch_id, holder):
                query = "UPDATE gateway_claims SET is_done = FALSE, until = 0 WHERE batch = ?"
                await connection.do(query, batch_id)

    async def end(self, batch: Batch, holder: str, files: Sequence[StoredFile]) -> bool:
        """Keep a batch that has ended, with its files. False = another gateway has taken over its end."""
        async with self._transaction() as connection:
            kept = await self._locked(connection, batch.id)
            query = "SELECT holder FROM gateway_claims WHERE batch = ? AND first = past"
            if await connection.ask(query, batch.id) != [(holder,)]:
                return kept == batch  # the answer to the first try was lost
            await _update(connection, batch)
            for file in files:
                await _add_file(connection, file)
            await connection.do("DELETE FROM gateway_claims WHERE batch = ?", batch.id)
            return True


async def _number(connection: Connection, table: str, row_id: str, owner: Owner) -> int:
    query = f"SELECT number FROM {table} WHERE id = ? AND key = ? AND tenant = ?"
    found = await connection.ask(query, row_id, *owner)
    if not found:
        raise KeyError(row_id)
    return int(found[0][0])


async def _add_file(connection: Connection, file: StoredFile) -> None:
    query = f"INSERT INTO gateway_files ({_FILE}) VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING"
    await connection.do(query, file.id, *file.owner, *file[2:])


async def _update(connection: Connection, batch: Batch) -> None:
    query = "UPDATE gateway_batches SET status = ?, batch = ? WHERE id = ?"
    await connection.do(query, batch.status, batch.stored(), batch.id)


async def _batches(connection: Connection, where: str, *values: Any) -> list[Batch]:
    """Batches with the reports of all gateways, the oldest first. By one statement: its rows are of one moment."""
    query = f"""SELECT found.id, found.batch, first, report
        FROM (SELECT number, id, batch FROM gateway_batches {where}) AS found
        LEFT JOIN gateway_claims ON gateway_claims.batch = found.id ORDER BY found.number, first"""
    found = dict[str, tuple[str, dict[int, str]]]()
    for batch_id, stored, first, report in await connection.ask(query, *values):
        found.setdefault(batch_id, (stored, {}))[1][first] = report
    return [Batch.restored(stored, reports) for stored, reports in found.values()]
