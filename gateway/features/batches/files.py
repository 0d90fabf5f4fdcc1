"""Uploaded files and results: received as they arrive, listed, passed to clients, deleted when they expire."""

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress

from gateway.core.errors import BodyTooLarge, InvalidRequest
from gateway.core.front.body import Upload
from gateway.core.front.reply import ClientResponse
from gateway.core.resources import Holding, MemoryBudget
from gateway.features.batches.batch import Owner, StoredFile
from gateway.features.batches.contents import Contents
from gateway.features.batches.errors import FileNotFound, StorageUnavailable
from gateway.features.batches.settings import BatchesConfig
from gateway.features.batches.store import Store
from gateway.features.uploads.forms import Form, FormParser, boundary_of

_FORM_BYTES = 65536  # of a form, besides the file
_ACTED_ON = frozenset(("purpose", "expires_after[anchor]", "expires_after[seconds]"))
_MOST_FILES = 10000  # of a key
_LEAST_EXPIRY_SECONDS, _MOST_EXPIRY_SECONDS = 3600, 2592000
_STRAY_SECONDS = 86400.0  # no upload takes so long
_STRAY_LOOKS_SECONDS = 3600.0  # between looks for what killed gateways have left


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def expiry_of(anchor: object, seconds: object, param: str) -> int:
    """The lifetime that a client sets. Raises InvalidRequest."""
    if anchor != "created_at":
        raise InvalidRequest(f"{param}[anchor] must be created_at.", param=param)
    if isinstance(seconds, str) and seconds.isascii() and seconds.isdigit() and len(seconds) < 10:
        seconds = int(seconds)
    if type(seconds) is not int or not _LEAST_EXPIRY_SECONDS <= seconds <= _MOST_EXPIRY_SECONDS:
        least, most = _LEAST_EXPIRY_SECONDS, _MOST_EXPIRY_SECONDS
        raise InvalidRequest(f"{param}[seconds] must be a whole number from {least} to {most}.", param=param)
    return seconds


class Files:
    """Owner of the files. Sizes by key are kept here; rows are in the store."""

    def __init__(
        self,
        store: Store,
        contents: Contents,
        *,
        config: BatchesConfig,
        memory: MemoryBudget,
        unix_seconds: Callable[[], float],
    ) -> None:
        self._store = store
        self._contents = contents
        self._memory = memory
        self._unix_seconds = unix_seconds
        self._sizes: dict[str, dict[str, int]] = {}  # of a key: bytes by file
        self._sums: dict[str, int] = {}  # of these; a key may have 10,000 files
        self._arriving: set[str] = set()
        self._looked_seconds = -math.inf
        self.apply(config)

    def apply(self, config: BatchesConfig) -> None:
        """Take over other limits; files that exist stay."""
        self._config = config

    @property
    def size_bytes(self) -> int:
        return sum(self._sums.values())

    async def open(self) -> None:
        """Count what is there, and delete contents without a row, unless other gateways may write them."""
        kept = await self._recount()
        if self._contents.is_alone:
            await self._contents.delete_others(kept, math.inf)

    async def _recount(self, of_key: str | None = None) -> set[str]:
        """Count the files that have a row, and those that arrive here; of one key or all. Returns the ids of both."""
        rows = [row[:3] for row in await self._store.all_files(of_key)]
        arriving = [
            (file_id, key, size_bytes)
            for key, sizes in self._sizes.items()
            for file_id, size_bytes in (sizes.items() if of_key in (None, key) else ())
            if file_id in self._arriving
        ]
        for key in [*self._sizes] if of_key is None else [of_key]:
            self._sizes.pop(key, None)
            self._sums.pop(key, None)
        for file_id, key, size_bytes in (*rows, *arriving):
            self.count(file_id, key, size_bytes)
        return {row[0] for row in rows} | self._arriving

    def count(self, file_id: str, key: str, size_bytes: int) -> None:
        """The size of a file, as it is now."""
        sizes = self._sizes.setdefault(key, {})
        self._sums[key] = self._sums.get(key, 0) - sizes.get(file_id, 0) + size_bytes
        sizes[file_id] = size_bytes

    def forget(self, file_id: str, key: str) -> None:
        sizes = self._sizes.get(key, {})
        if file_id in sizes:
            self._sums[key] -= sizes.pop(file_id)
        if not sizes:
            self._sizes.pop(key, None)
            self._sums.pop(key, None)

    async def receive(self, owner: Owner, upload: Upload, content_type: bytes, length: int = 0) -> StoredFile:
        """Write an upload while it arrives. Raises a GatewayError, and keeps nothing then.

        `length`: of the whole form, if the client states it.
        """
        parser, file_id = FormParser(boundary_of(content_type), _ACTED_ON), new_file_id()
        form = parser.form
        if not self._contents.is_alone:
            await self._recount(owner.key)
        if length - _FORM_BYTES > self._config.max_file_bytes:
            self._check_size(length, file_id, owner.key)
        if len(self._sizes.get(owner.key, ())) >= _MOST_FILES:
            raise BodyTooLarge(f"This API key has {_MOST_FILES} files, which is the limit; delete some.")
        is_written = is_kept = False
        self.count(file_id, owner.key, 0)
        self._arriving.add(file_id)
        try:
            await self._contents.write(file_id, self._content(upload, parser, file_id, owner.key))
            is_written = True
            now = int(self._unix_seconds())
            stored = StoredFile(
                file_id,
                owner,
                filename=form.filename or "",
                purpose=form.fields["purpose"],
                size_bytes=self._sizes[owner.key][file_id],
                created_at=now,
                expires_at=now + self._lifetime(form),
            )
            await self._store.add_file(stored)
            is_kept = True
        finally:
            self._arriving.discard(file_id)
            if not is_kept:
                self.forget(file_id, owner.key)
                if is_written:
                    await self.drop(file_id)
        return stored

    async def _content(self, upload: Upload, parser: FormParser, file_id: str, key: str) -> AsyncIterator[bytes]:
        """The content of the form's file, in pieces that are dropped before the next one. Raises InvalidRequest or
        BodyTooLarge.
        """
        size_bytes = 0
        async for piece in upload:
            content = b"".join(parser.feed(piece))
            del piece
            if content:
                size_bytes += len(content)
                self._check_size(size_bytes, file_id, key)
                yield content
            del content
            self._arrived(size_bytes, file_id, key)
        parser.form.check_end()
        self._lifetime(parser.form)

    def _arrived(self, size_bytes: int, file_id: str, key: str) -> None:
        """Count what has arrived. Raises InvalidRequest if its request has ended: S3's client may read on."""
        if file_id not in self._arriving:
            raise InvalidRequest("The upload has ended.")
        self.count(file_id, key, size_bytes)

    def _check_size(self, size_bytes: int, file_id: str, key: str) -> None:
        most, of_key = self._config.max_file_bytes, self._config.max_bytes_per_key
        if size_bytes > most:
            raise BodyTooLarge(f"The file exceeds the limit of {most} bytes (batches.max_file_bytes).", param="file")
        if self._sums.get(key, 0) - self._sizes.get(key, {}).get(file_id, 0) + size_bytes > of_key:
            raise BodyTooLarge(
                f"The files of this API key exceed the limit of {of_key} bytes (batches.max_bytes_per_key);"
                " delete files that are not needed.",
                param="file",
            )

    def _lifetime(self, form: Form) -> int:
        """In seconds. Raises InvalidRequest if a field of the form is missing or invalid."""
        fields = form.fields
        if form.filename is None:
            raise InvalidRequest("The form field `file` is missing.", param="file")
        if fields.get("purpose") != "batch":
            raise InvalidRequest("The form field `purpose` must be batch.", param="purpose")
        anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
        if anchor is None and seconds is None:
            return self._config.lifetime_seconds
        return expiry_of(anchor, seconds, "expires_after")

    async def find(self, file_id: str, owner: Owner) -> StoredFile:
        """Raises FileNotFound, also for files of others, and for those that have expired."""
        found = await self._store.file(file_id, owner)
        if found is None or found.expires_at <= self._unix_seconds():
            raise FileNotFound(f"No such file: {file_id[:64]!r}.", param="file_id")
        return found

    async def list(
        self, owner: Owner, purpose: str | None, after: str | None, limit: int, *, ascending: bool
    ) -> list[StoredFile]:
        """One more than `limit`, if there are more. Raises InvalidRequest if `after` is unknown."""
        now = int(self._unix_seconds())
        try:
            return await self._store.list_files(owner, purpose, after=after, limit=limit, now=now, ascending=ascending)
        except KeyError:
            raise InvalidRequest("The parameter `after` is not the id of a file.", param="after") from None

    async def delete(self, file: StoredFile) -> None:
        await self._store.delete_file(file.id)
        await self.drop(file.id)
        self.forget(file.id, file.owner.key)

    async def drop(self, file_id: str) -> None:
        """Delete a content that has no row. What cannot be reached now is a stray, and deleted later."""
        with suppress(StorageUnavailable):
            await self._contents.delete(file_id)

    async def delete_expired(self, in_use: Callable[[], Awaitable[set[str]]]) -> None:
        """Delete files whose time has come; the input of a batch that runs stays until that has ended."""
        now = self._unix_seconds()
        for file_id, key, _, expires_at in await self._store.all_files():
            if expires_at <= now and file_id not in await in_use():
                await self._store.delete_file(file_id)
                await self.drop(file_id)
                self.forget(file_id, key)
        kept = await self._recount()
        if now - self._looked_seconds >= _STRAY_LOOKS_SECONDS:
            await self._contents.delete_others(kept, now - _STRAY_SECONDS)
            self._looked_seconds = now

    async def send(self, file: StoredFile, reply: ClientResponse) -> None:
        """Pass the content on as fast as the client reads it. Raises FileNotFound or MemoryFull."""
        with Holding(self._memory) as holding:
            holding.add(self._contents.piece_bytes)
            await self._send(file, reply)

    async def _send(self, file: StoredFile, reply: ClientResponse) -> None:
        async with aclosing(self._contents.read(file.id)) as pieces:
            try:
                data = await anext(pieces, b"")
            except FileNotFoundError:
                raise FileNotFound(f"The content of file {file.id!r} is missing.", param="file_id") from None
            name = "".join(each if each.isascii() and each not in '"\\' else "_" for each in file.filename)
            disposition = b'content-disposition: attachment; filename="%b"\r\n' % name.encode()
            reply.begin(200, b"application/octet-stream", disposition)
            writable = asyncio.Event()
            reply.when_writable(writable.set)
            try:
                while data:
                    writable.clear()
                    if reply.write(data) and reply.blocked:
                        await writable.wait()
                    data = await anext(pieces, b"")
            finally:
                reply.when_writable(None)
        reply.end()
