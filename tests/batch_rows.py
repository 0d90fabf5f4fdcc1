"""Rows of files and batches, and the conversation about files that every store of them has to pass."""

import pytest

from gateway.core.errors import InvalidRequest
from gateway.features.batches.batch import Batch, Owner, StoredFile
from gateway.features.batches.documents import FilesPage
from gateway.features.batches.store import Store

A, B = Owner("a", "a"), Owner("b", "b")
DAY_SECONDS = 86400


def file(name: str, owner: Owner = A, expires_at: int = 100, purpose: str = "batch") -> StoredFile:
    return StoredFile(name, *owner, f"{name}.jsonl", purpose, 7, 1, expires_at)


def batch(name: str, owner: Owner = A, total: int = 0, expires_at: int = DAY_SECONDS + 1) -> Batch:
    made = Batch(
        name,
        owner=owner,
        endpoint="/v1/embeddings",
        input_file_id="file-1",
        window="24h",
        metadata={"a": "b"},
        output_lifetime_seconds=0,
        created_at=1,
        expires_at=expires_at,
    )
    if total:
        made.begin("m", total, 2)
    return made


async def lists_files_page_by_page(store: Store) -> None:
    for each in [*map(file, "abcd"), file("e", B), file("f", expires_at=10), file("g", purpose="batch_output")]:
        await store.add_file(each)

    async def names(after: str | None, limit: int, *, ascending: bool, purpose: str | None = None) -> str:
        page = FilesPage(after=after, limit=limit, order="asc" if ascending else "desc", purpose=purpose)
        found = await store.list_files(A, page, 50)
        return "".join(each.id for each in found)

    assert await names(None, 10, ascending=True) == "abcdg"
    assert await names(None, 2, ascending=False) == "gdc"  # one more says that there are more
    assert await names("d", 10, ascending=False) == "cba"
    assert await names("b", 10, ascending=True, purpose="batch") == "cd"
    assert await names(None, 10, ascending=True, purpose="\0") == ""
    for unknown in ("e", "\0"):
        with pytest.raises(InvalidRequest):
            await names(unknown, 10, ascending=True)
        assert await store.file(unknown, A) is None
    assert await store.file("a", B) is None
    assert await store.file("a", A) == file("a")
    await store.delete_file("a")
    assert await store.file("a", A) is None
    assert await store.file_ids() == set("bcdefg")
    assert await store.files_of("a") == (5, 35)
    assert await store.files_of("none") == (0, 0)
    assert await store.all_files_bytes() == 42
    assert await store.expired_files(10.5) == [("f", 7)]
