"""Files that expire: not there any more, and deleted unless a batch reads them; what a crash left is deleted."""

from pathlib import Path

import pytest

from gateway.core.errors import InvalidRequest
from gateway.core.resources import MemoryBudget
from gateway.features.batches.batch import Owner, StoredFile
from gateway.features.batches.documents import FilesPage, UploadFields, checked
from gateway.features.batches.errors import FileNotFound
from gateway.features.batches.files import Files
from gateway.features.batches.folder import Folder
from gateway.features.batches.settings import BatchesConfig
from gateway.features.batches.sqlite import SqliteStore

OWNER = Owner("a", "a")


async def in_use() -> set[str]:
    return {"used"}


async def test_files_expire_unless_a_batch_reads_them(tmp_path: Path) -> None:
    now, store, folder = [1000.0], SqliteStore(tmp_path), Folder(tmp_path)
    files = Files(store, folder, config=BatchesConfig(), memory=MemoryBudget(1 << 20), unix_seconds=lambda: now[0])
    await store.open()
    for name in ("used", "unused", "later"):
        folder.path(name).write_bytes(b"content")
        expires_at = 2000 if name == "later" else 1500
        await store.add_file(StoredFile(name, *OWNER, name, "batch", 7, 1000, expires_at))
    folder.path("stray").write_bytes(b"left by a crash")
    folder.path("file-1.part").write_bytes(b"left by a crash")
    await files.open()
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == ["later", "unused", "used"]
    assert files.size_bytes == 21
    now[0] = 1500.0
    with pytest.raises(FileNotFound):
        await files.find("unused", OWNER)
    assert [each.id for each in await files.list(OWNER, FilesPage())] == ["later"]
    await files.delete_expired(in_use)
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == ["later", "used"]
    assert files.size_bytes == 14
    await store.close()


@pytest.mark.parametrize(
    ("anchor", "seconds"),
    [("created_at", 3599), ("created_at", 2592001), ("created_at", "x"), ("created_at", None), ("now", 3600),
     (None, 3600), ("created_at", True), ("created_at", "9" * 400), ("created_at", 3600.5)],
)  # fmt: skip
def test_a_lifetime_that_is_refused(anchor: object, seconds: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        checked(UploadFields, {"purpose": "batch", "expires_after": {"anchor": anchor, "seconds": seconds}})
    assert refused.value.param == "expires_after"


def test_a_lifetime_of_a_form_is_text() -> None:
    fields = {"purpose": "batch", "expires_after": {"anchor": "created_at", "seconds": "3600"}}
    expiry = checked(UploadFields, fields).expires_after
    assert expiry is not None
    assert expiry.seconds == 3600
