"""The rows of files and batches in PostgreSQL, and the claims of several gateways; a database that cannot be used."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest

from gateway.core.errors import Draining
from gateway.core.resources import MemoryBudget
from gateway.features.batches.batch import Tally, report_of
from gateway.features.batches.documents import BatchesPage
from gateway.features.batches.store import Store, StoreUnusable
from tests.batch_rows import A, B, file, lists_files_page_by_page
from tests.batch_rows import batch as any_batch
from tests.postgres import PostgresServer
from tests.s3_server import S3Server

for needed in ("psycopg", "obstore"):
    pytest.importorskip(needed)
from gateway.features.batches import postgres as schema  # noqa: E402 - needs both
from gateway.features.batches.postgres import PostgresStore  # noqa: E402 - needs psycopg
from gateway.features.batches.s3 import S3Bucket  # noqa: E402 - needs obstore

FAR = 1 << 33
REPORT = report_of(Tally())


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.new_database()


def bucket(s3: S3Server) -> S3Bucket:
    return S3Bucket(s3.new_place(), s3.url, None, memory=MemoryBudget(1 << 30))


@pytest.fixture
async def store(url: str, s3: S3Server) -> AsyncIterator[Store]:
    one = PostgresStore(url, bucket(s3))
    await one.open()
    yield one
    await one.close()


batch = partial(any_batch, expires_at=FAR)


async def test_files_are_listed_in_order_page_by_page(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.features.batches.store._ROWS", 2)
    await lists_files_page_by_page(store)


async def test_a_batch_has_the_counts_of_all_gateways(store: Store) -> None:
    one, two, other = batch("batch_1", total=200), batch("batch_2"), batch("batch_3", B)
    for each in (one, two, other):
        await store.put_batch(each)
    for holder in "xy":
        claimed = await store.claim("batch_1", holder)
        assert claimed is not None
        claim = "batch_1", claimed.claim.first
        own = Tally(holder == "x", holder == "y", input_tokens=1)
        report = report_of(own, "full" if holder == "y" else "")
        kept, running = await store.tick(holder, [claim], {claim: report})
        assert kept == {claim}
        assert [each.id for each in running] == ["batch_1", "batch_2", "batch_3"]
    found = await store.batch("batch_1", A)
    assert found is not None
    assert (found.tally.completed, found.tally.failed, found.tally.input_tokens, found.paused) == (1, 1, 2, "full")
    assert [each.id for each in await store.list_batches(A, BatchesPage())] == ["batch_2", "batch_1"]
    assert await store.list_batches(A, BatchesPage(after="batch_1")) == []
    assert await store.batch("batch_3", A) is None
    assert await store.change("batch_9", lambda _: True) is None


async def test_claims_are_kept_lost_and_finished(store: Store) -> None:
    await store.put_batch(batch("b", total=1000))
    await store.tick("x", [], {})
    await store.tick("y", [], {})
    first, second = await store.claim("b", "x"), await store.claim("b", "y")
    assert first is not None
    assert second is not None
    assert (first.claim.first, first.claim.end, first.is_again) == (0, 250, False)
    assert (second.claim.first, second.claim.end, second.is_again) == (250, 437, False)
    await store.release("x")
    again = await store.claim("b", "y")
    assert again is not None
    assert (again.claim.first, again.is_again) == (0, True)
    assert await store.tick("x", [("b", 0)], {}) == (set(), await store.running_batches())
    await store.finish("b", 0, "x", REPORT, is_done=True)  # x has lost it
    assert (await store.tick("y", [("b", 0), ("b", 250)], {}))[0] == {("b", 0), ("b", 250)}
    await store.finish("b", 250, "y", REPORT, is_done=True)
    assert (await store.tick("y", [("b", 0), ("b", 250)], {}))[0] == {("b", 0)}


async def test_one_gateway_ends_a_batch(store: Store) -> None:
    await store.put_batch(batch("b", total=10))
    lines = await store.claim("b", "x")
    assert lines is not None
    assert await store.claim("b", "y") is None
    await store.finish("b", 0, "x", REPORT, is_done=True)
    end = await store.claim("b", "y")
    assert end is not None
    assert end.claim.is_last
    assert end.is_complete
    await store.reopen("b", "x")  # not the holder
    await store.reopen("b", "y")
    missing = await store.claim("b", "y")
    assert missing is not None
    assert (missing.claim.first, missing.claim.end, missing.is_again) == (0, 10, True)
    await store.finish("b", 0, "y", REPORT, is_done=True)
    assert await store.claim("b", "y") is not None
    done = batch("b", total=10)
    done.finalize(3, is_complete=True)
    done.end(done.tally, "out", None, 4)
    assert not await store.end(done, "x", ())
    assert await store.end(done, "y", (file("out", expires_at=FAR),))
    assert await store.end(done, "y", ())  # as if the first answer had been lost
    assert await store.batch("b", A) == done
    assert await store.file("out", A) is not None
    assert await store.claim("b", "x") is None
    await store.forget_batches(FAR + 1)
    assert await store.batch("b", A) is None


async def test_an_expired_batch_has_no_lines_to_claim(store: Store) -> None:
    await store.put_batch(batch("b", total=10, expires_at=5))
    end = await store.claim("b", "x")
    assert end is not None
    assert end.claim.is_last
    assert not end.is_complete


async def test_lines_are_claimed_once_by_many_at_the_same_time(store: Store) -> None:
    await store.put_batch(batch("b", total=2000))
    found = await asyncio.gather(*(store.claim("b", f"holder {number}") for number in range(20)))
    claims = sorted(each.claim for each in found if each is not None)
    assert [claim.first for claim in claims] == [0, *(claim.end for claim in claims[:-1])]


async def test_a_closed_store_refuses(store: Store) -> None:
    await store.close()
    with pytest.raises(Draining):
        await store.file_ids()


async def test_a_database_belongs_to_one_bucket(url: str, s3: S3Server) -> None:
    right, other = bucket(s3), bucket(s3)
    assert await schema.check(url, right) == ""
    for _ in range(2):
        await schema.prepare(url, right)
    assert await schema.check(url, right) == ""
    with pytest.raises(StoreUnusable, match="not that of"):
        await schema.prepare(url, other)
    assert "not that of batches.database" in await schema.check(url, other)


async def test_a_bucket_with_files_belongs_to_one_database(postgres: PostgresServer, url: str, s3: S3Server) -> None:
    async def content() -> AsyncIterator[bytes]:
        yield b"content"

    one = bucket(s3)
    await schema.prepare(url, one)
    await one.write("file-1", content())
    with pytest.raises(StoreUnusable, match="no other database may use it"):
        await schema.prepare(postgres.new_database(), one)


async def test_gateways_that_start_together_create_the_tables_once(url: str, s3: S3Server) -> None:
    one = bucket(s3)
    await asyncio.gather(*(schema.prepare(url, one) for _ in range(5)))
    assert await schema.check(url, one) == ""


async def test_a_bucket_that_cannot_be_used_is_reported(url: str, s3: S3Server) -> None:
    missing = S3Bucket("s3://missing/prefix", s3.url, None, memory=MemoryBudget(1 << 30))
    assert (await schema.check(url, missing)).startswith("batches.path (s3://missing/prefix) cannot be used: ")
    with pytest.raises(StoreUnusable, match="cannot be used"):
        await schema.prepare(url, missing)


async def test_what_is_no_database_is_reported_without_its_password(postgres: PostgresServer, s3: S3Server) -> None:
    for url in (f"postgresql://u:pass@127.0.0.1:{postgres.port}/none", "postgresql://u:pass@127.0.0.1:1/none"):
        problem = await schema.check(url, bucket(s3))
        assert problem.startswith("batches.database cannot be used: ")
        assert "pass" not in problem
        with pytest.raises(StoreUnusable, match="cannot be used"):
            await PostgresStore(url, bucket(s3)).open()
