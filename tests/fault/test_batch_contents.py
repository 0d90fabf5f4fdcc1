"""Contents of files: the same conversation with a folder and with S3; parts in S3; S3 that cannot be used."""

import asyncio
import math
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

import pytest

from gateway.core.errors import InvalidRequest, MemoryFull
from gateway.core.resources import MemoryBudget
from gateway.features.batches.contents import Contents
from gateway.features.batches.errors import StorageUnavailable
from gateway.features.batches.folder import Folder
from tests.s3_server import S3Server

pytest.importorskip("obstore")
from gateway.features.batches.s3 import S3Bucket

LARGE = 12000000  # more than one part of an upload


def bucket(s3: S3Server, where: str) -> S3Bucket:
    return S3Bucket(where, s3.url, None, memory=MemoryBudget(1 << 30))


@pytest.fixture(params=["folder", "s3"])
async def contents(request: pytest.FixtureRequest, tmp_path: Path) -> Contents:
    if request.param == "folder":
        for name in ("files", "parts"):
            (tmp_path / name).mkdir()
        return Folder(tmp_path)
    s3 = request.getfixturevalue("s3")
    return bucket(s3, s3.new_place())


async def pieces(*given: bytes, error: Exception | None = None) -> AsyncIterator[bytes]:
    for piece in given:
        yield piece
    if error is not None:
        raise error


async def content(contents: Contents, name: str) -> bytes:
    return b"".join([piece async for piece in contents.read(name)])


def text(file: BinaryIO) -> bytes:
    with file:
        return file.read()


@pytest.mark.parametrize("given", [(), (b"a", b"b"), [os.urandom(1000000) for _ in range(LARGE // 1000000)]])
async def test_what_is_written_is_read_as_a_stream_and_as_a_file(contents: Contents, given: tuple[bytes, ...]) -> None:
    await contents.write("file-1", pieces(*given))
    assert await content(contents, "file-1") == b"".join(given)
    with await contents.local("file-1") as file:
        assert os.pread(file.fileno(), LARGE + 1, 1) == b"".join(given)[1:]
        assert text(file) == b"".join(given)


@pytest.mark.parametrize("size_bytes", [10, LARGE])
async def test_nothing_is_kept_of_what_ends_with_an_exception(
    contents: Contents, size_bytes: int, tmp_path: Path
) -> None:
    refused = InvalidRequest("Its end is missing.")
    with pytest.raises(InvalidRequest) as raised:
        await contents.write("file-1", pieces(*[b"x" * 1000] * (size_bytes // 1000), error=refused))
    assert raised.value is refused
    for missing in (content(contents, "file-1"), contents.local("file-1")):
        with pytest.raises(FileNotFoundError):
            await missing
    if isinstance(contents, S3Bucket):
        assert not await contents.has_files()
    else:
        assert not [*(tmp_path / "files").iterdir()]


async def test_files_are_deleted_alone_and_all_but_those_that_are_kept(contents: Contents) -> None:
    for name in ("one", "two", "kept"):
        await contents.write(name, pieces(b"content"))
    await contents.delete("one")
    await contents.delete("one")
    await contents.delete_others({"kept"}, 1000.0)  # they are newer
    assert await content(contents, "two") == b"content"
    await contents.delete_others({"kept"}, math.inf)
    assert await content(contents, "kept") == b"content"
    with pytest.raises(FileNotFoundError):
        await content(contents, "two")


async def test_a_mark_is_kept(s3: S3Server) -> None:
    one = bucket(s3, s3.new_place())
    assert await one.mark() == ""
    await one.set_mark("database 1")
    assert await one.mark() == "database 1"
    assert not await one.has_files()


async def test_the_parts_of_gateways_are_put_together(contents: Contents) -> None:
    one = contents
    assert await one.batches_with_parts() == set()
    for holder, lines in (("x", [b"1\n", b"2\n"]), ("y", [b"3\n"]), ("x", [b"4\n"])):
        part = one.new_part("batch_1", holder, "output")
        for line in lines:
            await part.append(line)
        await part.finish()
    await one.new_part("batch_2", "x", "error").append(b"5\n")

    async def lines_of(batch_id: str, name: str) -> list[bytes]:
        return sorted(b"".join(map(text, await one.parts(batch_id, name))).splitlines())

    assert await lines_of("batch_1", "output") == [b"1", b"2", b"3", b"4"]
    assert await lines_of("batch_1", "error") == []
    assert await one.batches_with_parts() == {"batch_1", "batch_2"}
    await one.delete_parts(["batch_1", "batch_3"])
    assert await one.batches_with_parts() == {"batch_2"}
    assert await lines_of("batch_2", "error") == [b"5"]


async def test_many_objects_of_a_part_are_read_in_their_order(s3: S3Server) -> None:
    place = s3.new_place()
    part = bucket(s3, place).new_part("batch_1", "x", "output")
    for number in range(30):
        await part.append(b"%d\n" % number)
    assert len(s3.objects(place)) == 30
    [found] = await bucket(s3, place).parts("batch_1", "output")
    assert text(found) == b"".join(b"%d\n" % number for number in range(30))


async def test_a_bucket_that_cannot_be_used_is_reported(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    good = bucket(s3, "s3://bucket")
    assert await good.problem() == ""
    missing = bucket(s3, "s3://missing/prefix")
    assert (await missing.problem()).startswith("batches.path (s3://missing/prefix) cannot be used: ")
    with pytest.raises(StorageUnavailable):
        await missing.write("file-1", pieces(b"content"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    problem = await bucket(s3, "s3://bucket").problem()
    assert "403 Forbidden" in problem
    assert "wrong" not in problem


async def test_while_the_server_is_down_or_frozen_everything_fails_soon(s3: S3Server) -> None:
    one = bucket(s3, s3.new_place())
    part = one.new_part("batch_1", "x", "output")

    async def all_fail() -> None:
        tries = [
            content(one, "file-1"), one.local("file-1"), one.write("file-1", pieces(b"content")), one.delete("file-1"),
            one.write("file-2", pieces(*[b"x" * 1000000] * 12)), one.delete_others(set(), math.inf), one.mark(),
            part.append(b"line\n"), one.parts("batch_1", "output"), one.batches_with_parts(),
            one.delete_parts(["batch_1"]),
        ]  # fmt: skip
        found = await asyncio.gather(*tries, return_exceptions=True)
        assert [type(each) for each in found] == [StorageUnavailable] * len(tries)
        assert "cannot be used" in await one.problem()

    s3.freeze()
    try:
        await all_fail()
    finally:
        s3.thaw()
    s3.stop()
    try:
        await all_fail()
        assert "Connection refused" in await one.problem()
    finally:
        s3.start()
    await part.append(b"line\n")
    [found] = await one.parts("batch_1", "output")
    assert text(found) == b"line\n"


async def test_what_the_client_of_s3_holds_of_an_upload_is_in_the_memory_budget(s3: S3Server) -> None:
    budget = MemoryBudget(12_000_000)
    one = S3Bucket(s3.new_place(), s3.url, None, memory=budget)
    most_bytes = 0

    async def pieces(count: int) -> AsyncIterator[bytes]:
        nonlocal most_bytes
        for _ in range(count):
            yield b"x" * 1_000_000
            most_bytes = max(most_bytes, budget.used_bytes)

    await one.write("short", pieces(4))
    assert (most_bytes, budget.used_bytes) == (4_000_000, 0)
    with pytest.raises(MemoryFull):
        await one.write("long", pieces(12))
    assert budget.used_bytes == 0
    with pytest.raises(FileNotFoundError):
        await anext(one.read("long"))
    assert len(b"".join([piece async for piece in one.read("short")])) == 4_000_000
