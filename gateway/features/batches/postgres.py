"""The rows of files and batches in PostgreSQL, for several gateways: a `SharedStore`."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from psycopg import OperationalError
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from gateway.core.errors import Draining
from gateway.features.batches.batch import RUNNING, Batch, Owner, StoredFile
from gateway.features.batches.claims import CLAIM_SECONDS, Claim, Progress, next_claim
from gateway.features.batches.errors import StorageUnavailable
from gateway.features.batches.s3 import S3Bucket
from gateway.features.batches.schema import CONNECT_SECONDS, Connection, ask, do, prepare
from gateway.features.batches.store import ClaimedLines

_POOL_SECONDS = 3.0
_RECONNECT_SECONDS = 2.0  # then the next request tries again
_MOST_CONNECTIONS = 4
_LOCKED_SECONDS = 10
_ROWS = 5000  # read in one turn of the event loop
_KEEPALIVE = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10000}
_FORGET_SECONDS = 3600.0  # after which a gateway that was not heard of is forgotten
_NOW = "extract(epoch FROM clock_timestamp())::float8"
_FILE = "id, key, tenant, filename, purpose, bytes, created_at, expires_at"
_STATUSES = ", ".join(f"'{status}'" for status in RUNNING)
_REPORTS = "array(SELECT report FROM gateway_parts WHERE gateway_parts.batch = gateway_batches.id)"


def _text(value: str) -> str:
    """The value without characters that PostgreSQL does not store."""
    return value.replace("\0", "\ufffd")


def _batch(row: tuple[Any, ...]) -> Batch:
    """A batch with the reports of all gateways that work at it."""
    batch = Batch.restored(row[0])
    batch.add_reports(row[1])
    return batch


async def _number(connection: Connection, table: str, row_id: str, owner: Owner) -> int:
    found = await ask(
        connection, f"SELECT number FROM {table} WHERE id = %s AND key = %s AND tenant = %s", _text(row_id), *owner
    )
    if not found:
        raise KeyError(row_id)
    return int(found[0][0])


async def _configure(connection: Connection) -> None:
    """A gateway that is frozen in a transaction must not lock out the others."""
    for setting in ("idle_in_transaction_session_timeout", "lock_timeout"):
        await do(connection, f"SET {setting} = '{_LOCKED_SECONDS}s'")
    await connection.commit()


class PostgresStore:
    """A `SharedStore` in a database of PostgreSQL, by a few connections."""

    def __init__(self, url: str, bucket: S3Bucket) -> None:
        self._url = url
        self._bucket = bucket
        self._pool: AsyncConnectionPool[Connection] | None = None

    def check_open(self) -> None:
        """Raises Draining if the store is not open."""
        if self._pool is None:
            raise Draining("Files and batches are not available here at the moment.", retry_after_seconds=1.0)

    async def open(self) -> None:
        """Create what is missing. Raises StoreUnusable."""
        await prepare(self._url, self._bucket)
        options = {"connect_timeout": CONNECT_SECONDS, "prepare_threshold": None, **_KEEPALIVE}
        pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            self._url, min_size=1, max_size=_MOST_CONNECTIONS, open=False, timeout=_POOL_SECONDS, kwargs=options,
            configure=_configure, reconnect_timeout=_RECONNECT_SECONDS,
        )  # fmt: skip
        await pool.open()
        self._pool = pool

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Connection]:
        """Raises StorageUnavailable if the database cannot be reached."""
        self.check_open()
        assert self._pool is not None
        try:
            async with self._pool.connection() as connection:
                yield connection
        except (OperationalError, PoolTimeout) as error:
            raise StorageUnavailable(
                "The database of files and batches is not available (batches.database); retry later.",
                retry_after_seconds=1.0,
            ) from error

    async def add_file(self, file: StoredFile) -> None:
        async with self._transaction() as connection:
            await self._add_file(connection, file)

    async def _add_file(self, connection: Connection, file: StoredFile) -> None:
        values = file.owner.key, file.owner.tenant, _text(file.filename), file.purpose, file.size_bytes
        marks = ", ".join(["%s"] * 8)
        query = f"INSERT INTO gateway_files ({_FILE}) VALUES ({marks}) ON CONFLICT (id) DO NOTHING"
        await do(connection, query, file.id, *values, file.created_at, file.expires_at)

    async def file(self, file_id: str, owner: Owner) -> StoredFile | None:
        query = f"SELECT {_FILE} FROM gateway_files WHERE id = %s AND key = %s AND tenant = %s"
        async with self._transaction() as connection:
            found = await ask(connection, query, _text(file_id), *owner)
        return StoredFile.of_row(found[0]) if found else None

    async def list_files(
        self, owner: Owner, purpose: str | None, after: str | None, limit: int, now: int, *, ascending: bool
    ) -> list[StoredFile]:
        where, values = "key = %s AND tenant = %s AND expires_at > %s", [*owner, now]
        order, compared = ("ASC", ">") if ascending else ("DESC", "<")
        async with self._transaction() as connection:
            if purpose is not None:
                where += " AND purpose = %s"
                values.append(_text(purpose))
            if after is not None:
                where += f" AND number {compared} %s"
                values.append(await _number(connection, "gateway_files", after, owner))
            query = f"SELECT {_FILE} FROM gateway_files WHERE {where} ORDER BY number {order} LIMIT %s"
            return [StoredFile.of_row(row) for row in await ask(connection, query, *values, limit + 1)]

    async def delete_file(self, file_id: str) -> None:
        async with self._transaction() as connection:
            await do(connection, "DELETE FROM gateway_files WHERE id = %s", file_id)

    async def all_files(self, key: str | None = None) -> list[tuple[str, str, int, int]]:
        query = """SELECT id, key, bytes, expires_at, number FROM gateway_files
            WHERE number > %s AND (key = %s OR %s::text IS NULL) ORDER BY number LIMIT %s"""
        found, after = list[tuple[str, str, int, int]](), 0
        async with self._transaction() as connection:
            while rows := await ask(connection, query, after, key, key, _ROWS):
                found += [(row[0], row[1], row[2], row[3]) for row in rows]
                after = rows[-1][4]
        return found

    async def put_batch(self, batch: Batch, files: tuple[StoredFile, ...] = ()) -> None:
        query = """INSERT INTO gateway_batches (id, key, tenant, status, expires_at, batch)
            VALUES (%s, %s, %s, %s, %s, %s)
            ON CONFLICT (id) DO UPDATE SET status = excluded.status, batch = excluded.batch"""
        async with self._transaction() as connection:
            await do(connection, query, batch.id, *batch.owner, batch.status, batch.expires_at, batch.stored())
            for file in files:
                await self._add_file(connection, file)

    async def batch(self, batch_id: str, owner: Owner) -> Batch | None:
        query = f"SELECT batch, {_REPORTS} FROM gateway_batches WHERE id = %s AND key = %s AND tenant = %s"
        async with self._transaction() as connection:
            found = await ask(connection, query, _text(batch_id), *owner)
        return _batch(found[0]) if found else None

    async def list_batches(self, owner: Owner, after: str | None, limit: int) -> list[Batch]:
        query = f"""SELECT batch, {_REPORTS} FROM gateway_batches
            WHERE key = %s AND tenant = %s AND number < %s ORDER BY number DESC LIMIT %s"""
        async with self._transaction() as connection:
            number = 1 << 62 if after is None else await _number(connection, "gateway_batches", after, owner)
            return [_batch(row) for row in await ask(connection, query, *owner, number, limit + 1)]

    async def running_batches(self) -> list[Batch]:
        async with self._transaction() as connection:
            return await self._running(connection)

    async def _running(self, connection: Connection) -> list[Batch]:
        query = f"SELECT batch, {_REPORTS} FROM gateway_batches WHERE status IN ({_STATUSES}) ORDER BY number"
        return [_batch(row) for row in await ask(connection, query)]

    async def forget_batches(self, before: int) -> None:
        query = f"DELETE FROM gateway_batches WHERE expires_at < %s AND status NOT IN ({_STATUSES})"
        async with self._transaction() as connection:
            await do(connection, query, before)

    async def change(self, batch_id: str, change: Callable[[Batch], bool]) -> Batch | None:
        query = "SELECT batch FROM gateway_batches WHERE id = %s FOR UPDATE"
        async with self._transaction() as connection:
            found = await ask(connection, query, batch_id)
            if not found:
                return None
            batch = Batch.restored(found[0][0])
            if change(batch):
                await self._update(connection, batch)
            return batch

    async def _update(self, connection: Connection, batch: Batch) -> None:
        query = "UPDATE gateway_batches SET status = %s, batch = %s WHERE id = %s"
        await do(connection, query, batch.status, batch.stored(), batch.id)

    async def claim(self, batch_id: str, holder: str) -> ClaimedLines | None:
        async with self._transaction() as connection:
            query = "SELECT batch FROM gateway_batches WHERE id = %s FOR UPDATE"
            if not (found := await ask(connection, query, batch_id)):
                return None
            batch = Batch.restored(found[0][0])
            query = f"SELECT {_NOW}, (SELECT count(*) FROM gateway_members WHERE until > {_NOW})"
            [(now, gateways)] = await ask(connection, query)
            query = """SELECT first, past, holder, until, is_done FROM gateway_claims
                WHERE batch = %s ORDER BY first FOR UPDATE"""
            claims = [Claim._make(row) for row in await ask(connection, query, batch_id)]
            is_over = batch.status == "cancelling" or now >= batch.expires_at
            progress = Progress(batch.total, claims, is_over)
            if not batch.is_running or not batch.total:
                return None
            if (claim := next_claim(progress, holder, gateways, now)) is None:
                return None
            query = """INSERT INTO gateway_claims VALUES (%s, %s, %s, %s, %s, FALSE) ON CONFLICT (batch, first)
                DO UPDATE SET holder = excluded.holder, until = excluded.until"""
            await do(connection, query, batch_id, claim.first, claim.end, claim.holder, claim.until)
            query = "INSERT INTO gateway_parts VALUES (%s, %s, %s) ON CONFLICT DO NOTHING"
            await do(connection, query, batch_id, holder, b"{}")
            is_again = any(each.first == claim.first for each in claims)
            return ClaimedLines(claim, is_again, progress.is_complete)

    async def finish(self, batch_id: str, first: int, holder: str, *, is_done: bool) -> None:
        query = """UPDATE gateway_claims SET is_done = %s, until = 0
            WHERE batch = %s AND first = %s AND holder = %s AND NOT is_done"""
        async with self._transaction() as connection:
            await do(connection, query, is_done, batch_id, first, holder)

    async def release(self, holder: str) -> None:
        async with self._transaction() as connection:
            await do(connection, "UPDATE gateway_claims SET until = 0 WHERE holder = %s AND NOT is_done", holder)
            await do(connection, "DELETE FROM gateway_members WHERE holder = %s", holder)

    async def tick(
        self, holder: str, held: Sequence[tuple[str, int]], reports: Mapping[str, bytes]
    ) -> tuple[set[tuple[str, int]], list[Batch]]:
        async with self._transaction() as connection:
            query = f"""INSERT INTO gateway_members VALUES (%s, {_NOW} + %s)
                ON CONFLICT (holder) DO UPDATE SET until = excluded.until"""
            await do(connection, query, holder, CLAIM_SECONDS)
            await do(connection, f"DELETE FROM gateway_members WHERE until < {_NOW} - %s", _FORGET_SECONDS)
            query = f"""UPDATE gateway_claims SET until = {_NOW} + %s WHERE holder = %s AND NOT is_done
                AND (batch, first) IN (SELECT * FROM unnest(%s::text[], %s::int[])) RETURNING batch, first"""
            names, firsts = [each[0] for each in held], [each[1] for each in held]
            kept = await ask(connection, query, CLAIM_SECONDS, holder, names, firsts)
            query = "UPDATE gateway_parts SET report = %s WHERE batch = %s AND holder = %s"
            for batch_id, report in reports.items():
                await do(connection, query, report, batch_id, holder)
            return {(row[0], row[1]) for row in kept}, await self._running(connection)

    async def reopen(self, batch_id: str, holder: str) -> None:
        query = "DELETE FROM gateway_claims WHERE batch = %s AND first = past AND holder = %s"
        async with self._transaction() as connection:
            if await do(connection, query, batch_id, holder):
                query = "UPDATE gateway_claims SET is_done = FALSE, until = 0 WHERE batch = %s"
                await do(connection, query, batch_id)

    async def end(self, batch: Batch, holder: str, files: tuple[StoredFile, ...]) -> bool:
        async with self._transaction() as connection:
            kept = await ask(connection, "SELECT batch FROM gateway_batches WHERE id = %s FOR UPDATE", batch.id)
            query = "SELECT holder FROM gateway_claims WHERE batch = %s AND first = past"
            if await ask(connection, query, batch.id) != [(holder,)]:
                return any(row[0] == batch.stored() for row in kept)  # the answer to the first try was lost
            await self._update(connection, batch)
            for file in files:
                await self._add_file(connection, file)
            await do(connection, "DELETE FROM gateway_claims WHERE batch = %s", batch.id)
            await do(connection, "DELETE FROM gateway_parts WHERE batch = %s", batch.id)
            return True
