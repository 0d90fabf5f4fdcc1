"""Rows of files and batches: pages in order, owners apart, and one process at a time."""

from pathlib import Path

import pytest

from gateway.batches.batch import Batch, LineUsage, Owner, StoredFile, batch_error
from gateway.batches.sqlite import SqliteStore
from gateway.batches.store import FolderInUse

A, B = Owner("a", "a"), Owner("b", "b")


def file(name: str, owner: Owner = A, expires_at: int = 100, purpose: str = "batch") -> StoredFile:
    return StoredFile(name, owner, f"{name}.jsonl", purpose, 7, 1, expires_at)


def batch(name: str, owner: Owner = A) -> Batch:
    return Batch(name, owner, "/v1/embeddings", "file-1", "24h", {"a": "b"}, 0, 1, 86401, "out", "err")


async def test_files_are_listed_in_order_page_by_page(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    await store.open()
    for each in [*map(file, "abcd"), file("e", B), file("f", expires_at=10), file("g", purpose="batch_output")]:
        await store.add_file(each)

    async def names(after: str | None, limit: int, *, ascending: bool, purpose: str | None = None) -> str:
        found = await store.list_files(A, purpose, after, limit, 50, ascending=ascending)
        return "".join(each.id for each in found)

    assert await names(None, 10, ascending=True) == "abcdg"
    assert await names(None, 2, ascending=False) == "gdc"  # one more says that there are more
    assert await names("d", 10, ascending=False) == "cba"
    assert await names("b", 10, ascending=True, purpose="batch") == "cd"
    with pytest.raises(KeyError):
        await names("e", 10, ascending=True)
    assert await store.file("a", B) is None
    assert await store.file("a", A) == file("a")
    await store.delete_file("a")
    assert await store.file("a", A) is None
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
