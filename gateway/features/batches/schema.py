"""The tables of files and batches in PostgreSQL, and the bucket that belongs to them: created, and checked."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from psycopg import AsyncConnection, Error

from gateway.features.batches.errors import StorageUnavailable
from gateway.features.batches.s3 import S3Bucket
from gateway.features.batches.store import StoreUnusable

CONNECT_SECONDS = 5
_LOCK = 0x6261746368  # "batch": of those that create the tables
_SCHEMA = """
CREATE TABLE IF NOT EXISTS gateway_bucket (id TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS gateway_files (
    number BIGSERIAL PRIMARY KEY, id TEXT NOT NULL UNIQUE, key TEXT NOT NULL, tenant TEXT NOT NULL,
    filename TEXT NOT NULL, purpose TEXT NOT NULL, bytes BIGINT NOT NULL, created_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL
);
CREATE INDEX IF NOT EXISTS gateway_files_of_owner ON gateway_files (key, tenant, number);
CREATE TABLE IF NOT EXISTS gateway_batches (
    number BIGSERIAL PRIMARY KEY, id TEXT NOT NULL UNIQUE, key TEXT NOT NULL, tenant TEXT NOT NULL,
    status TEXT NOT NULL, expires_at BIGINT NOT NULL, batch BYTEA NOT NULL
);
CREATE INDEX IF NOT EXISTS gateway_batches_of_owner ON gateway_batches (key, tenant, number);
CREATE INDEX IF NOT EXISTS gateway_batches_of_status ON gateway_batches (status);
CREATE TABLE IF NOT EXISTS gateway_members (holder TEXT PRIMARY KEY, until FLOAT8 NOT NULL);
CREATE TABLE IF NOT EXISTS gateway_claims (
    batch TEXT NOT NULL, first INTEGER NOT NULL, past INTEGER NOT NULL, holder TEXT NOT NULL, until FLOAT8 NOT NULL,
    is_done BOOLEAN NOT NULL, PRIMARY KEY (batch, first)
);
CREATE TABLE IF NOT EXISTS gateway_parts (
    batch TEXT NOT NULL, holder TEXT NOT NULL, report BYTEA NOT NULL, PRIMARY KEY (batch, holder)
);
"""
Connection = AsyncConnection[tuple[Any, ...]]


async def ask(connection: Connection, query: str, *values: Any) -> list[tuple[Any, ...]]:
    """The rows of a query; `values` replace its %s."""
    return await (await connection.execute(query.encode(), values)).fetchall()


async def do(connection: Connection, query: str, *values: Any) -> int:
    """The number of rows that a statement inserted, changed or deleted."""
    return (await connection.execute(query.encode(), values)).rowcount


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Connection]:
    """One transaction. Raises StoreUnusable without the password of the URL."""
    try:
        async with await AsyncConnection.connect(url, connect_timeout=CONNECT_SECONDS) as connection:
            yield connection
    except Error as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise StoreUnusable(f"batches.database cannot be used: {reason}") from None


async def prepare(url: str, bucket: S3Bucket) -> None:
    """Create what is missing in the database and in the bucket. Raises StoreUnusable or StorageUnavailable."""
    if problem := await bucket.problem():
        raise StoreUnusable(problem)
    async with _connected(url) as connection:
        await ask(connection, "SELECT pg_advisory_xact_lock(%s)", _LOCK)
        await connection.execute(_SCHEMA.encode())
        ids = await ask(connection, "SELECT id FROM gateway_bucket")
        mark = await bucket.mark()
        if not ids and not (mark and await bucket.has_files()):
            mark = secrets.token_hex(16)
            ids = [(mark,)]
            await do(connection, "INSERT INTO gateway_bucket VALUES (%s)", mark)
            await bucket.set_mark(mark)
    if problem := _other_than(bucket, mark, ids):
        raise StoreUnusable(problem)


async def check(url: str, bucket: S3Bucket) -> str:
    """What is wrong with the database or the bucket, without changing them; "" = nothing."""
    try:
        async with _connected(url) as connection:
            if problem := await bucket.problem():
                return problem
            if await ask(connection, "SELECT to_regclass('gateway_bucket')") != [(None,)]:
                ids = await ask(connection, "SELECT id FROM gateway_bucket")
                return _other_than(bucket, await bucket.mark(), ids)
            if await ask(connection, "SELECT has_schema_privilege(current_schema(), 'CREATE')") != [(True,)]:
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
