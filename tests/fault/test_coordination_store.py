"""The table of a fleet in a real Redis or Valkey, and in the parent of several workers."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from gateway.core.supervisor import Supervisor
from gateway.features.coordination.link import RedisLink
from gateway.features.coordination.redis_store import RedisStore
from gateway.features.coordination.settings import CoordinationConfig
from gateway.features.coordination.store import Stamp, StoreLost, TableChange
from tests.redis_server import any_store, redis_server

pytest.importorskip("hiredis")
_DEADLINE_SECONDS = 20.0
_CHOICE = Random(1)


@asynccontextmanager
async def replicas(url: str, *names: str) -> AsyncIterator[list[RedisStore]]:
    """Stores of some replicas, which show their presence."""
    supervisor = Supervisor(asyncio.get_running_loop().time)
    config = CoordinationConfig(url=url)
    async with AsyncExitStack() as stack:
        found = []
        for name in names:
            link = RedisLink(config, name, supervisor)
            await stack.enter_async_context(link.open())
            async with asyncio.timeout(_DEADLINE_SECONDS):
                await link.until_present()
            found.append(RedisStore(link))
        yield found


async def put(store: RedisStore, expected: Stamp, *removed: str, settled: bool = False, **records: bytes) -> bool:
    change = TableChange(expected, str(_CHOICE.getrandbits(64)), settled, records=records, removed=removed)
    applied, table = await store.swap(change)
    assert not applied or table.stamp.version == change.version
    return applied


async def until_present(store: RedisStore, *names: str) -> None:
    async with asyncio.timeout(_DEADLINE_SECONDS):
        while (await store.read()).present != {*names}:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("kind", ["redis", "parent"])
async def test_a_change_has_an_effect_once_and_only_on_the_table_that_was_read(tmp_path: Path, kind: str) -> None:
    async with any_store(kind, tmp_path) as url, replicas(url, "a", "b") as (a, b):
        empty = await a.read()
        assert (empty.stamp.version, empty.records, empty.settled) == ("", {}, False)
        assert await put(a, empty.stamp, a=b"1")
        assert not await put(b, empty.stamp, b=b"1")
        table = await b.read()
        assert table.records == {"a": b"1"}
        assert await put(b, table.stamp, "a", settled=True, b=b"\x00\xff", c=b"2")
        table = await a.read()
        assert (table.records, table.settled) == ({"b": b"\x00\xff", "c": b"2"}, True)


@pytest.mark.parametrize("kind", ["redis", "parent"])
async def test_a_replica_is_present_until_its_connection_ends(tmp_path: Path, kind: str) -> None:
    async with any_store(kind, tmp_path) as url, replicas(url, "a") as (a,):
        async with replicas(url, "b") as (b,):
            assert await put(b, (await b.read()).stamp, b=b"1")
            await until_present(a, "a", "b")
        await until_present(a, "a")
        assert (await a.read()).records == {"b": b"1"}


async def test_a_connection_that_the_server_closes_is_made_again(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        async with replicas(server.url, "a") as (a,):
            server.ask("CLIENT KILL TYPE pubsub")
            await until_present(a, "a")


@pytest.mark.parametrize("keeps", [False, True])
async def test_a_server_that_started_again_has_an_empty_table_of_another_run(tmp_path: Path, keeps: bool) -> None:
    with redis_server(tmp_path, keeps=keeps) as server:
        async with replicas(server.url, "a") as (a,):
            assert await put(a, (await a.read()).stamp, settled=True, a=b"1")
            before = await a.read()
            server.stop()
            with pytest.raises(StoreLost):
                await a.read()
            server.start()
            await until_present(a, "a")
            after = await a.read()
            assert after.stamp.run != before.stamp.run
            assert (after.stamp.version, after.records, after.settled) == ("", {}, False)
            assert not await put(a, before.stamp, a=b"2")
            assert await put(a, after.stamp, c=b"3")
            assert (await a.read()).records == {"c": b"3"}


async def test_a_table_that_is_deleted_is_new(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        async with replicas(server.url, "a") as (a,):
            assert await put(a, (await a.read()).stamp, settled=True, a=b"1")
            old = (await a.read()).stamp
            server.ask("FLUSHALL")
            table = await a.read()
            assert (table.stamp, table.records, table.settled) == (Stamp(old.run, ""), {}, False)
            assert not await put(a, old, a=b"2")


async def test_a_server_that_does_not_answer_is_lost(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        async with replicas(server.url, "a") as (a,):
            await a.read()
            server.signal(signal.SIGSTOP)
            with pytest.raises(StoreLost, match="no answer within"):
                await a.read()
            server.signal(signal.SIGCONT)
            async with asyncio.timeout(_DEADLINE_SECONDS):
                while True:
                    try:
                        await a.read()
                    except StoreLost:
                        continue
                    break
