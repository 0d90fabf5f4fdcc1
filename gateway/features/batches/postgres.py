"""PostgreSQL, for several gateways, and the bucket that belongs to it: created, checked and used."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from psycopg import AsyncConnection, Error, OperationalError
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from gateway.features.batches.errors import StorageUnavailable
from gateway.features.batches.s3 import S3Bucket
from gateway.features.batches.store import TABLES, Execute, Store, StoreUnusable

_CONNECT_SECONDS = 5
_POOL_SECONDS = 3.0
_RECONNECT_SECONDS = 2.0  # then the next request tries again
_MOST_CONNECTIONS = 4
_LOCKED_SECONDS = 10
_LOCK = 0x6261746368  # "batch": of those that create the tables
_KEEPALIVE = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10000}
_SCHEMA = "CREATE TABLE IF NOT EXISTS gateway_bucket (id TEXT PRIMARY KEY);" + TABLES.format(
    number="BIGSERIAL PRIMARY KEY"
)
_Raw = AsyncConnection[tuple[Any, ...]]


def _executing(connection: _Raw) -> Execute:

    async def execute(statement: str, *values: Any) -> list[tuple[Any, ...]]:
        # PostgreSQL does not store NUL characters.
        storable = [value.replace("\0", "\ufffd") if isinstance(value, str) else value for value in values]
        cursor = await connection.execute(statement.replace("?", "%s").encode(), storable)
        return [] if cursor.description is None else await cursor.fetchall()

    return execute


async def _configure(connection: _Raw) -> None:
    """A gateway that is frozen in a transaction must not lock out the others."""
    for setting in ("idle_in_transaction_session_timeout", "lock_timeout"):
        await _executing(connection)(f"SET {setting} = '{_LOCKED_SECONDS}s'")
    await connection.commit()


class PostgresStore(Store):
    """A store by a few connections."""

    now = "extract(epoch FROM clock_timestamp())::float8"
    locking = " FOR UPDATE"
    is_alone = False

    def __init__(self, url: str, bucket: S3Bucket) -> None:
        self._url = url
        self._bucket = bucket
        self._pool: AsyncConnectionPool[_Raw] | None = None

    @property
    def is_open(self) -> bool:
        return self._pool is not None

    async def open(self) -> None:
        await prepare(self._url, self._bucket)
        options = {"connect_timeout": _CONNECT_SECONDS, "prepare_threshold": None, **_KEEPALIVE}
        pool: AsyncConnectionPool[_Raw] = AsyncConnectionPool(
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
    async def transaction(self) -> AsyncIterator[Execute]:
        self.check_open()
        assert self._pool is not None
        try:
            async with self._pool.connection() as connection:
                yield _executing(connection)
        except (OperationalError, PoolTimeout) as error:
            raise StorageUnavailable(
                "The database of files and batches is not available (batches.database); retry later.",
                retry_after_seconds=1.0,
            ) from error


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Execute]:
    """One transaction. Raises StoreUnusable without the password of the URL."""
    try:
        async with await AsyncConnection.connect(url, connect_timeout=_CONNECT_SECONDS) as connection:
            yield _executing(connection)
    except Error as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise StoreUnusable(f"batches.database cannot be used: {reason}") from None


async def prepare(url: str, bucket: S3Bucket) -> None:
    """Create what is missing in the database and in the bucket. Raises StoreUnusable or StorageUnavailable."""
    if problem := await bucket.problem():
        raise StoreUnusable(problem)
    async with _connected(url) as execute:
        await execute("SELECT pg_advisory_xact_lock(?)", _LOCK)
        for statement in _SCHEMA.split(";")[:-1]:
            await execute(statement)
        ids = await execute("SELECT id FROM gateway_bucket")
        mark = await bucket.mark()
        if not ids and not (mark and await bucket.has_files()):
            mark = secrets.token_hex(16)
            ids = [(mark,)]
            await execute("INSERT INTO gateway_bucket VALUES (?)", mark)
            await bucket.set_mark(mark)
    if problem := _other_than(bucket, mark, ids):
        raise StoreUnusable(problem)


async def check(url: str, bucket: S3Bucket) -> str:
    """What is wrong with the database or the bucket, without changing them; "" = nothing."""
    try:
        async with _connected(url) as execute:
            if problem := await bucket.problem():
                return problem
            if await execute("SELECT to_regclass('gateway_bucket')") != [(None,)]:
                ids = await execute("SELECT id FROM gateway_bucket")
                return _other_than(bucket, await bucket.mark(), ids)
            if await execute("SELECT has_schema_privilege(current_schema(), 'CREATE')") != [(True,)]:
                return "batches.database cannot be used: its user may not create tables."
    except StoreUnusable as error:
        return str(error)
    except StorageUnavailable as error:
        return error.message
    return ""


def _other_than(bucket: S3Bucket, mark: str, ids: list[tuple[Any, ...]]) -> str:
    if ids == ([(mark,)] if mark else []):
        return ""
    return (
        f"batches.path ({bucket.where}) is not that of batches.database: all gateways of one database need the same"
        " path, and no other database may use it."
    )
