"""What several gateways share in a bucket of S3, or of another server with its API: the contents of files, and parts of
batches, which are the answers and the errors that each gateway has written.

An object cannot be appended to: a part is many objects, each with the answers since the one before. All requests are
made by the client's own threads, and take seconds at most.
"""

import asyncio
import math
import os
import secrets
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import urlsplit

import obstore
import structlog
from obstore.exceptions import BaseError
from obstore.store import S3Store

from gateway.core.resources import Holding, MemoryBudget
from gateway.core.threads import Threads
from gateway.features.batches.contents import JournalGroup
from gateway.features.batches.errors import StorageUnavailable

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config

_FILES, _PARTS, _MARK = "files", "parts", "database.id"
_UPLOADED_BYTES = 5242880  # at once; S3 allows 10,000 of them in a file, and none of them smaller
_UPLOADS = 2  # of one file at the same time
_COPIED_BYTES = 8388608  # at once, or one object
_PARTS_READ = 8  # at the same time
_LISTED = 1000
_THREADS = 4  # of copies on this machine; the client has its own
_NOT_SENT = "error sending request"
_LOG_SECONDS = 60.0  # between lines about failures
_RETRY: "RetryConfig" = {"max_retries": 3, "retry_timeout": timedelta(seconds=10)}
_CONNECT_SECONDS, _ANSWER_SECONDS, _REQUEST_SECONDS = 3.0, 10.0, 60.0


def _client_options(endpoint: str | None) -> "ClientConfig":
    options: ClientConfig = {
        "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
        "read_timeout": timedelta(seconds=_ANSWER_SECONDS),
        "timeout": timedelta(seconds=_REQUEST_SECONDS),
        "allow_http": (endpoint or "").startswith("http://"),
    }
    if certificates := os.environ.get("AWS_CA_BUNDLE"):
        options["root_certificate"] = Path(certificates).read_bytes()
    return options


def _reason(error: BaseException) -> str:
    """What went wrong: the first line of the client's text, and why nothing was sent: the innermost one below it."""
    first, _, details = str(error).strip().partition("\n")
    if not first.endswith(_NOT_SENT) or not details:
        return first
    innermost = max(reversed(details.splitlines()), key=lambda line: len(line) - len(line.lstrip()))
    return f"{first}: {innermost.strip(' ,')}"


class ObjectPart:
    """An `AnswerFile` that is a row of objects."""

    def __init__(self, put: Callable[[str, bytes], Awaitable[None]], prefix: str) -> None:
        self._put = put
        self._prefix = prefix
        self._number = 0

    async def append(self, data: bytes) -> None:
        """If a put that failed succeeds later, the next try replaces it by the same data."""
        await self._put(f"{self._prefix}{self._number:08}", data)
        self._number += 1

    async def finish(self) -> None:
        """Nothing is open: each object is complete."""


class S3Bucket:
    """`Contents` in a bucket, below a prefix. The environment has the credentials, as for AWS's programs.

    `where`: as configured.
    """

    group = JournalGroup(512, 4194304, 5.0)
    piece_bytes = 1048576

    def __init__(self, where: str, endpoint: str | None, region: str | None, *, memory: MemoryBudget) -> None:
        self.where = where
        self.threads = Threads("batches", _THREADS)
        self._memory = memory
        url = urlsplit(where)
        endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        config: S3Config = {}
        if endpoint is not None:
            config["endpoint"] = endpoint
        if region is not None:
            config["region"] = region
        self._store = S3Store(
            url.netloc, prefix=url.path.strip("/") or None, config=config, client_options=_client_options(endpoint),
            retry_config=_RETRY,
        )  # fmt: skip
        self._logs_after = -math.inf

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        """Raises StorageUnavailable for what the client raises, but for files that are missing."""
        try:
            yield
        except BaseError as error:
            now = time.monotonic()
            if now >= self._logs_after:
                self._logs_after = now + _LOG_SECONDS
                structlog.get_logger("gateway").error("batch_bucket_unavailable", reason=_reason(error))
            raise StorageUnavailable(
                "The bucket of files and batches is not available (batches.path).", retry_after_seconds=1.0
            ) from error

    async def problem(self) -> str:
        """What is wrong; "" = nothing."""
        try:
            await self.has_files()
        except (StorageUnavailable, FileNotFoundError) as error:
            return f"batches.path ({self.where}) cannot be used: {_reason(error.__cause__ or error)}"
        return ""

    async def mark(self) -> str:
        """The database that this belongs to; "" = none."""
        try:
            return (await self._get(_MARK)).decode()
        except FileNotFoundError:
            return ""

    async def set_mark(self, text: str) -> None:
        await self._put(_MARK, text.encode())

    async def has_files(self) -> bool:
        async for _ in self._listed(_FILES):
            return True
        return False

    async def _put(self, path: str, content: bytes | AsyncIterator[bytes]) -> None:
        with self._reachable():
            try:
                await obstore.put_async(
                    self._store, path, content, chunk_size=_UPLOADED_BYTES, max_concurrency=_UPLOADS
                )
            except FileNotFoundError as error:  # the bucket, or an upload that the server has forgotten
                raise BaseError(_reason(error)) from error

    async def _get(self, path: str) -> bytes:
        with self._reachable():
            got = await obstore.get_async(self._store, path)
            return bytes(await got.bytes_async())

    async def _listed(self, prefix: str, before: float | None = None) -> AsyncIterator[tuple[str, int]]:
        """Path and size in bytes of all objects; or of those that were written before this time in Unix seconds."""
        found = obstore.list(self._store, prefix, chunk_size=_LISTED)
        while True:
            try:
                with self._reachable():
                    some = await anext(found)
            except StopAsyncIteration:
                return
            for each in some:
                if before is None or each["last_modified"].timestamp() < before:
                    yield each["path"], each["size"]

    async def _delete(self, paths: Sequence[str]) -> None:
        if paths:
            with self._reachable():
                await obstore.delete_async(self._store, paths)

    async def write(self, name: str, content: AsyncIterator[bytes]) -> None:
        with Holding(self._memory) as holding:
            begun = bytearray()
            async for piece in content:
                holding.add(len(piece))
                begun += piece
                if len(begun) >= _UPLOADED_BYTES:
                    holding.add(_UPLOADS * _UPLOADED_BYTES)  # that the client holds
                    await self._put(f"{_FILES}/{name}", _joined(begun, content))
                    return
            await self._put(f"{_FILES}/{name}", bytes(begun))

    async def read(self, name: str, piece_bytes: int = piece_bytes) -> AsyncGenerator[bytes, None]:
        """A content by requests for a part of it each, so that a client may read it as slowly as it likes."""
        path = f"{_FILES}/{name}"
        with self._reachable():
            size_bytes = (await obstore.head_async(self._store, path))["size"]
        if size_bytes <= piece_bytes:
            yield await self._get(path)
            return
        for start in range(0, size_bytes, piece_bytes):
            with self._reachable():
                end = min(start + piece_bytes, size_bytes)
                piece = bytes(await obstore.get_range_async(self._store, path, start=start, end=end))
            yield piece

    async def local(self, name: str) -> BinaryIO:
        """A copy without a name, in the folder for temporary files."""
        with Holding(self._memory) as holding:
            holding.add(_COPIED_BYTES)
            return await self._copied(self.read(name, _COPIED_BYTES))

    async def _copied(self, content: AsyncIterator[bytes]) -> BinaryIO:
        copy: BinaryIO = await self.threads.run(tempfile.TemporaryFile)
        try:
            async for piece in content:
                await self.threads.run(copy.write, piece)
            await self.threads.run(copy.seek, 0)
        except BaseException:
            self.threads.later(copy.close)
            raise
        return copy

    async def delete(self, name: str) -> None:
        await self._delete([f"{_FILES}/{name}"])

    async def delete_others(self, kept: set[str], before: float) -> None:
        paths = [path async for path, _ in self._listed(_FILES, before)]
        await self._delete([path for path in paths if path.rpartition("/")[2] not in kept])

    def new_part(self, batch_id: str, holder: str, name: str) -> ObjectPart:
        return ObjectPart(self._put, f"{_PARTS}/{batch_id}/{name}/{holder}-{secrets.token_hex(4)}-")

    async def parts(self, batch_id: str, name: str) -> list[BinaryIO]:
        objects = sorted([each async for each in self._listed(f"{_PARTS}/{batch_id}/{name}")])
        with Holding(self._memory) as holding:
            return [await self._copied(self._all_of(objects, holding))]

    async def _all_of(self, objects: Sequence[tuple[str, int]], holding: Holding) -> AsyncIterator[bytes]:
        """The contents of objects in their order, a few of them at the same time. Raises MemoryFull."""
        left = deque(objects)
        while left:
            paths, size_bytes = list[str](), 0
            while left and len(paths) < _PARTS_READ and (not paths or size_bytes + left[0][1] <= _COPIED_BYTES):
                path, more_bytes = left.popleft()
                paths.append(path)
                size_bytes += more_bytes
            holding.fit(size_bytes)
            for piece in await asyncio.gather(*map(self._get_if_there, paths)):
                yield piece

    async def _get_if_there(self, path: str) -> bytes:
        """Parts are deleted when another gateway has ended the batch."""
        try:
            return await self._get(path)
        except FileNotFoundError:
            return b""

    async def delete_parts(self, batch_ids: Iterable[str]) -> None:
        for batch_id in batch_ids:
            await self._delete([path async for path, _ in self._listed(f"{_PARTS}/{batch_id}")])

    async def batches_with_parts(self) -> set[str]:
        with self._reachable():
            found = await obstore.list_with_delimiter_async(self._store, _PARTS)
        return {prefix.rpartition("/")[2] for prefix in found["common_prefixes"]}


async def _joined(begun: bytearray, content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield bytes(begun)
    begun.clear()
    async for piece in content:
        yield piece
