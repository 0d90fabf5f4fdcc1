"""Rows of files and batches: pages in order, owners apart, and one process at a time."""

from pathlib import Path

import pytest

from gateway.features.batches.batch import LineUsage, batch_error
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
    one.tally.add(LineUsage(1, 2, 3, 4), failed=False)
    two, other = batch("batch_2"), batch("batch_3", B)
    two.fail([batch_error("empty_file", "Nothing.", 1)], 3)
    for each in (one, two, other):
        await store.put_batch(each)
    await store.put_batch(one, (file("out"),))
    await store.close()
    with pytest.raises(Exception, match="not available"):
        store.check_open()
    store = SqliteStore(tmp_path)
    await store.open()
    assert await store.list_batches(A, None, 10) == [two, one]
    assert await store.list_batches(A, "batch_2", 10) == [one]
    assert await store.batch("batch_3", A) is None
    assert await store.running_batches() == [one, other]
    assert await store.file("out", A) == file("out")
    await store.forget_batches(1 << 40)
    assert await store.list_batches(A, None, 10) == [one]
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
