"""Rows of files and batches: pages in order, owners apart, and one process at a time."""

import asyncio
from pathlib import Path

import pytest

from gateway.features.batches.batch import Batch, Tally, batch_error, report_of
from gateway.features.batches.documents import BatchesPage
from gateway.features.batches.sqlite import SqliteStore
from gateway.features.batches.store import FolderInUse
from tests.batch_rows import A, B, batch, file, lists_files_page_by_page


async def test_files_are_listed_in_order_page_by_page(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    await store.open()
    await lists_files_page_by_page(store)
    await store.close()


async def test_a_batch_is_restored_as_it_was(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    await store.open()
    one = batch("batch_1")
    one.begin("m", 5, 2)
    one.tally += Tally(1, input_tokens=1, cached_tokens=2, output_tokens=3, reasoning_tokens=4)
    two, other = batch("batch_2"), batch("batch_3", B)
    two.fail([batch_error("empty_file", "Nothing.", 1)], 3)
    for each in (one, two, other):
        await store.put_batch(each)
    await store.put_batch(one)
    await store.add_file(file("out"))
    await store.close()
    with pytest.raises(Exception, match="not available"):
        store.check_open()
    store = SqliteStore(tmp_path)
    await store.open()
    assert await store.list_batches(A, BatchesPage()) == [two, one]
    assert await store.list_batches(A, BatchesPage(after="batch_2")) == [one]
    assert await store.batch("batch_3", A) is None
    assert await store.running_batches() == [one, other]
    assert await store.file("out", A) == file("out")
    await store.forget_batches(1 << 40)
    assert await store.list_batches(A, BatchesPage()) == [one]
    await store.close()


async def test_a_folder_is_open_once(tmp_path: Path) -> None:
    store, second = SqliteStore(tmp_path / "new" / "folder"), SqliteStore(tmp_path / "new" / "folder")
    await store.open()
    with pytest.raises(FolderInUse, match="in use by another gateway"):
        await second.open()
    await store.close()
    await second.open()
    await second.close()


async def test_what_is_no_database_is_reported(tmp_path: Path) -> None:
    (tmp_path / "batches.sqlite3").write_bytes(b"no database" * 1000)
    with pytest.raises(OSError, match="cannot be used"):
        await SqliteStore(tmp_path).open()


async def test_one_claim_has_all_lines_and_is_lost_when_the_gateway_ends(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    await store.open()
    await store.put_batch(batch("b", total=10000, expires_at=1 << 40))
    first = await store.claim("b", "x")
    assert first is not None
    assert (first.claim.first, first.claim.end, first.is_again) == (0, 10000, False)
    assert await store.claim("b", "x", [0]) is None
    once_more = await store.claim("b", "x")  # after an exception, it does not run them
    assert once_more is not None
    assert (once_more.claim.first, once_more.claim.end, once_more.is_again) == (0, 10000, True)
    await store.close()
    await store.open()
    again = await store.claim("b", "y")
    assert again is not None
    assert (again.claim.first, again.claim.end, again.is_again) == (0, 10000, True)
    await store.finish("b", 0, "y", report_of(Tally(9990, 10)), is_done=True)
    [found] = await store.running_batches()
    assert (found.tally.completed, found.tally.failed) == (9990, 10)
    end = await store.claim("b", "y")
    assert end is not None
    assert (end.claim.is_last, end.is_complete) == (True, True)
    found.finalize(3, is_complete=True)
    found.end(found.tally, "out", None, 4)
    assert await store.end(found, "y", (file("out"),))
    assert await store.list_batches(A, BatchesPage()) == [found]
    await store.close()


async def test_a_transaction_that_fails_or_is_cancelled_leaves_none_open(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    await store.open()
    await store.put_batch(batch("b"))

    def cancel(found: Batch) -> bool:
        return found.cancel(1)

    def fail(found: Batch) -> bool:
        raise ZeroDivisionError(cancel(found))

    with pytest.raises(ZeroDivisionError):
        await store.change("b", fail)
    [found] = await store.running_batches()
    assert found.status == "validating"
    for turns in range(20):
        changing = asyncio.create_task(store.change("b", cancel))
        for _ in range(turns):
            await asyncio.sleep(0.0001)
        changing.cancel()
        await asyncio.gather(changing, return_exceptions=True)
        [found] = await store.running_batches()
        assert changing.cancelled() or found.status == "cancelling"
    await store.close()
