"""The tables of files and batches in PostgreSQL, and the folder that belongs to them: created, and checked."""

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from psycopg import AsyncConnection, Error

from gateway.batches.store import StoreUnusable

CONNECT_SECONDS = 5
_LOCK = 0x6261746368  # "batch": of those that create the tables
_MARK = "database.id"  # the file in the folder that says to which database it belongs
_SCHEMA = """
CREATE TABLE IF NOT EXISTS gateway_folder (id TEXT PRIMARY KEY);
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


async def prepare(url: str, folder: Path) -> None:
    """Create what is missing in the database and in the folder. Raises StoreUnusable, or OSError of the folder."""
    for each in (folder, folder / "files", folder / "parts"):  # prompts and answers are for this user alone
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    mark = folder / _MARK
    async with _connected(url) as connection:
        await ask(connection, "SELECT pg_advisory_xact_lock(%s)", _LOCK)
        await connection.execute(_SCHEMA.encode())
        ids = await ask(connection, "SELECT id FROM gateway_folder")
        if not ids and (not mark.exists() or not any((folder / "files").iterdir())):
            ids = [(secrets.token_hex(16),)]
            await do(connection, "INSERT INTO gateway_folder VALUES (%s)", *ids[0])
            mark.write_text(ids[0][0])
    _check_mark(mark, ids)


async def check(url: str, folder: Path) -> str:
    """What is wrong with the database or the folder, without changing them; "" = nothing."""
    if os.access(folder, os.F_OK) and not os.access(folder, os.W_OK | os.X_OK):
        return f"batches.path ({folder}) is not writable."
    try:
        async with _connected(url) as connection:
            if await ask(connection, "SELECT to_regclass('gateway_folder')") != [(None,)]:
                _check_mark(folder / _MARK, await ask(connection, "SELECT id FROM gateway_folder"))
            elif await ask(connection, "SELECT has_schema_privilege(current_schema(), 'CREATE')") != [(True,)]:
                return "batches.database cannot be used: its user may not create tables."
    except OSError as error:
        return str(error)
    return ""


def _check_mark(mark: Path, ids: list[tuple[Any, ...]]) -> None:
    if ids != ([(mark.read_text(),)] if mark.exists() else []):
        raise StoreUnusable(
            f"batches.path ({mark.parent}) is not the folder of batches.database: all gateways of one database need the"
            " same shared folder, and no other database may use it."
        )
