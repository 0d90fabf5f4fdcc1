"""The rows of files and batches: the same statements for SQLite and PostgreSQL, each method in one transaction.

Several gateways may use one store at the same time; a `holder` is the id of one of them. A gateway alone is a fleet of
one, whose claims are never lost while it runs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, NamedTuple, Protocol

from gateway.core.errors import Draining, InvalidRequest
from gateway.features.batches.batch import RUNNING, Batch, Owner, StoredFile
from gateway.features.batches.claims import CLAIM_SECONDS, Claim, Progress, next_claim
from gateway.features.batches.documents import BatchesPage, FilesPage

_FORGET_SECONDS = 3600.0  # after which a gateway that was not heard of is forgotten
_ROWS = 5000  # read in one turn of the event loop
_FILE = "id, key, tenant, filename, purpose, bytes, created_at, expires_at"
_ADD_FILE = f"INSERT INTO gateway_files ({_FILE}) VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING"
_COUNT_AND_SIZE = "count(*), coalesce(sum(bytes), 0)"
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


class Execute(Protocol):
    """Executes a statement of one transaction, and returns its rows. Each ? stands for the next value."""

    async def __call__(self, statement: str, *values: Any) -> list[tuple[Any, ...]]: ...


class ClaimedLines(NamedTuple):
    """Lines that this gateway has to run now. `is_again`: others, or it itself, may have run a part of them before."""

    claim: Claim
    is_again: bool
    is_complete: bool  # all lines of the batch have an answer on disk


class Store(ABC):
    """The statements. What differs between SQLite and PostgreSQL is in a class of each.

    `now`: the time of the database in Unix seconds; `locking`: ends a query whose rows no other transaction may change
    meanwhile. `is_alone`: no other process uses it.
    """

    now: ClassVar[str]
    locking: ClassVar[str]
    is_alone: ClassVar[bool]

    @abstractmethod
    async def open(self) -> None:
        """Create what is missing. Raises StoreUnusable, or OSError of the contents."""

    @abstractmethod
    async def close(self) -> None: ...

    @property
    @abstractmethod
    def is_open(self) -> bool: ...

    @abstractmethod
    def transaction(self) -> AbstractAsyncContextManager[Execute]:
        """Commits at the end of the block. Raises Draining, StorageUnavailable or StorageFull."""

    def check_open(self) -> None:
        """Raises Draining while it is closed: another process may have it then."""
        if not self.is_open:
            raise Draining("Files and batches are not available here at the moment.", retry_after_seconds=1.0)

    async def _execute(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        async with self.transaction() as execute:
            return await execute(statement, *values)

    async def add_file(self, file: StoredFile) -> None:
        await self._execute(_ADD_FILE, *file)

    async def file(self, file_id: str, owner: Owner) -> StoredFile | None:
        query = f"SELECT {_FILE} FROM gateway_files WHERE id = ? AND key = ? AND tenant = ?"
        found = await self._execute(query, file_id, *owner)
        return StoredFile._make(found[0]) if found else None

    async def list_files(self, owner: Owner, page: FilesPage, now: int) -> list[StoredFile]:
        """One more than a page has, if there are more. Raises InvalidRequest if `after` is no file of this owner."""
        where, values = "key = ? AND tenant = ? AND expires_at > ?", [*owner, now]
        order, compared = ("ASC", ">") if page.order == "asc" else ("DESC", "<")
        async with self.transaction() as execute:
            if page.purpose is not None:
                where += " AND purpose = ?"
                values.append(page.purpose)
            if page.after is not None:
                where += f" AND number {compared} ?"
                values.append(await _number(execute, "file", page.after, owner))
            query = f"SELECT {_FILE} FROM gateway_files WHERE {where} ORDER BY number {order} LIMIT ?"
            return [StoredFile._make(row) for row in await execute(query, *values, page.limit + 1)]

    async def delete_file(self, file_id: str) -> None:
        await self._execute("DELETE FROM gateway_files WHERE id = ?", file_id)

    async def files_of(self, key: str) -> tuple[int, int]:
        """How many files a key has, and their size in bytes."""
        [(count, size_bytes)] = await self._execute(f"SELECT {_COUNT_AND_SIZE} FROM gateway_files WHERE key = ?", key)
        return int(count), int(size_bytes)

    async def all_files_bytes(self) -> int:
        [(_, size_bytes)] = await self._execute(f"SELECT {_COUNT_AND_SIZE} FROM gateway_files")
        return int(size_bytes)

    async def expired_files(self, now: float) -> list[tuple[str, int]]:
        """The ids and sizes in bytes of files whose time has come."""
        found = await self._execute("SELECT id, bytes FROM gateway_files WHERE expires_at <= ?", now)
        return [(row[0], row[1]) for row in found]

    async def file_ids(self) -> set[str]:
        query, found, after = (
            "SELECT number, id FROM gateway_files WHERE number > ? ORDER BY number LIMIT ?",
            set[str](),
            0,
        )
        async with self.transaction() as execute:
            while rows := await execute(query, after, _ROWS):
                found.update(row[1] for row in rows)
                after = rows[-1][0]
        return found

    async def put_batch(self, batch: Batch) -> None:
        """Keep a batch as it is now, whether it is new or not."""
        query = """INSERT INTO gateway_batches (id, key, tenant, status, expires_at, batch) VALUES (?, ?, ?, ?, ?, ?)
            ON CONFLICT (id) DO UPDATE SET status = excluded.status, batch = excluded.batch"""
        await self._execute(query, batch.id, *batch.owner, batch.status, batch.expires_at, batch.stored())

    async def batch(self, batch_id: str, owner: Owner) -> Batch | None:
        found = await _batches(self._execute, "WHERE id = ? AND key = ? AND tenant = ?", batch_id, *owner)
        return found[0] if found else None

    async def list_batches(self, owner: Owner, page: BatchesPage) -> list[Batch]:
        """The newest first; one more than a page has, if there are more. Raises InvalidRequest as `list_files` does."""
        where = "WHERE key = ? AND tenant = ? AND number < ? ORDER BY number DESC LIMIT ?"
        async with self.transaction() as execute:
            number = 1 << 62 if page.after is None else await _number(execute, "batch", page.after, owner)
            found = await _batches(execute, where, *owner, number, page.limit + 1)
        return found[::-1]

    async def running_batches(self) -> list[Batch]:
        """Those that have not ended, the oldest first."""
        return await _batches(self._execute, _RUNNING)

    async def forget_batches(self, before: int) -> None:
        """Drop the rows of batches that have ended, and whose window closed before this time."""
        query = f"DELETE FROM gateway_batches WHERE expires_at < ? AND status NOT IN ({_STATUSES})"
        await self._execute(query, before)

    async def change(self, batch_id: str, change: Callable[[Batch], bool]) -> Batch | None:
        """Change a batch that no other gateway changes meanwhile, and keep it if `change` returns True.

        Returns the batch as it is then; None = it has been forgotten.
        """
        async with self.transaction() as execute:
            batch = await self._locked(execute, batch_id)
            if batch is not None and change(batch):
                await _update(execute, batch)
            return batch

    async def _locked(self, execute: Execute, batch_id: str) -> Batch | None:
        """The batch as it stays until the transaction ends, without what gateways report."""
        found = await execute(f"SELECT batch FROM gateway_batches WHERE id = ?{self.locking}", batch_id)
        return Batch.restored(found[0][0]) if found else None

    async def claim(self, batch_id: str, holder: str, held: Collection[int] = ()) -> ClaimedLines | None:
        """Claim lines by `claims.next_claim`; None = nothing at the moment.

        `held`: the claims of the batch that the holder runs, by their first lines; its others are lost.
        """
        async with self.transaction() as execute:
            batch = await self._locked(execute, batch_id)
            if batch is None or not batch.is_running or not batch.total:
                return None
            query = f"SELECT {self.now}, (SELECT count(*) FROM gateway_members WHERE until > {self.now})"
            [(now, members)] = await execute(query)
            query = f"""SELECT first, past, holder, until, is_done FROM gateway_claims
                WHERE batch = ? ORDER BY first{self.locking}"""
            claims = [Claim._make(row).as_of(holder, held) for row in await execute(query, batch_id)]
            is_over = batch.status == "cancelling" or now >= batch.expires_at
            progress = Progress(batch.total, claims, is_over)
            gateways = 0 if self.is_alone else max(1, members)
            if (claim := next_claim(progress, holder, gateways, now)) is None:
                return None
            query = """INSERT INTO gateway_claims VALUES (?, ?, ?, ?, ?, FALSE, '') ON CONFLICT (batch, first)
                DO UPDATE SET holder = excluded.holder, until = excluded.until"""
            await execute(query, batch_id, claim.first, claim.end, claim.holder, claim.until)
            is_again = any(each.first == claim.first for each in claims)
            return ClaimedLines(claim, is_again, progress.is_complete)

    async def finish(self, batch_id: str, first: int, holder: str, report: str, *, is_done: bool) -> None:
        """End a claim that is still this holder's: its lines are done, or other gateways may take it over at once."""
        query = """UPDATE gateway_claims SET is_done = ?, until = 0, report = ?
            WHERE batch = ? AND first = ? AND holder = ? AND NOT is_done"""
        await self._execute(query, is_done, report, batch_id, first, holder)

    async def release(self, holder: str) -> None:
        """Let others take over all claims of a gateway that stops."""
        async with self.transaction() as execute:
            await execute("UPDATE gateway_claims SET until = 0 WHERE holder = ? AND NOT is_done", holder)
            await execute("DELETE FROM gateway_members WHERE holder = ?", holder)

    async def tick(
        self, holder: str, held: Sequence[tuple[str, int]], reports: Mapping[tuple[str, int], str]
    ) -> tuple[set[tuple[str, int]], list[Batch]]:
        """Extend claims, given by their batch and first line, and keep reports of what was done of them.

        Returns the claims that are still its own, and all batches that have not ended. A gateway alone has no need of
        this.
        """
        async with self.transaction() as execute:
            kept = await self._extend(execute, holder, held)
            query = "UPDATE gateway_claims SET report = ? WHERE batch = ? AND first = ? AND holder = ?"
            for (batch_id, first), report in sorted(reports.items()):
                await execute(query, report, batch_id, first, holder)
            return kept, await _batches(execute, _RUNNING)

    async def _extend(self, execute: Execute, holder: str, held: Sequence[tuple[str, int]]) -> set[tuple[str, int]]:
        query = f"""INSERT INTO gateway_members VALUES (?, {self.now} + ?)
            ON CONFLICT (holder) DO UPDATE SET until = excluded.until"""
        await execute(query, holder, CLAIM_SECONDS)
        await execute(f"DELETE FROM gateway_members WHERE until < {self.now} - ?", _FORGET_SECONDS)
        if not held:
            return set()
        claims = ", ".join(["(?, ?)"] * len(held))
        query = f"""UPDATE gateway_claims SET until = {self.now} + ? WHERE holder = ? AND NOT is_done
            AND (batch, first) IN (VALUES {claims}) RETURNING batch, first"""
        values = [value for claim in held for value in claim]
        return {(row[0], row[1]) for row in await execute(query, CLAIM_SECONDS, holder, *values)}

    async def reopen(self, batch_id: str, holder: str) -> None:
        """Have all lines looked at again, because answers are missing. Only for the holder of the batch's end."""
        query = "DELETE FROM gateway_claims WHERE batch = ? AND first = past AND holder = ? RETURNING first"
        async with self.transaction() as execute:
            if await execute(query, batch_id, holder):
                await execute("UPDATE gateway_claims SET is_done = FALSE, until = 0 WHERE batch = ?", batch_id)

    async def end(self, batch: Batch, holder: str, files: Sequence[StoredFile]) -> bool:
        """Keep a batch that has ended, with its files. False = another gateway has taken over its end."""
        async with self.transaction() as execute:
            kept = await self._locked(execute, batch.id)
            query = "SELECT holder FROM gateway_claims WHERE batch = ? AND first = past"
            if await execute(query, batch.id) != [(holder,)]:
                return kept == batch  # the answer to the first try was lost
            await _update(execute, batch)
            for file in files:
                await execute(_ADD_FILE, *file)
            await execute("DELETE FROM gateway_claims WHERE batch = ?", batch.id)
            return True


async def _number(execute: Execute, kind: str, row_id: str, owner: Owner) -> int:
    table = "gateway_files" if kind == "file" else "gateway_batches"
    found = await execute(f"SELECT number FROM {table} WHERE id = ? AND key = ? AND tenant = ?", row_id, *owner)
    if not found:
        raise InvalidRequest(f"The parameter `after` is not the id of a {kind}.", param="after")
    return int(found[0][0])


async def _update(execute: Execute, batch: Batch) -> None:
    query = "UPDATE gateway_batches SET status = ?, batch = ? WHERE id = ?"
    await execute(query, batch.status, batch.stored(), batch.id)


async def _batches(execute: Execute, where: str, *values: Any) -> list[Batch]:
    """Batches with the reports of all gateways, the oldest first. By one statement: its rows are of one moment."""
    query = f"""SELECT found.id, found.batch, first, report
        FROM (SELECT number, id, batch FROM gateway_batches {where}) AS found
        LEFT JOIN gateway_claims ON gateway_claims.batch = found.id ORDER BY found.number, first"""
    found = dict[str, tuple[str, dict[int, str]]]()
    for batch_id, stored, first, report in await execute(query, *values):
        found.setdefault(batch_id, (stored, {}))[1][first] = report
    return [Batch.restored(stored, reports) for stored, reports in found.values()]
