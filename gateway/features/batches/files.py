"""Uploaded files and results: received as they arrive, listed, passed to clients, deleted when they expire."""

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, suppress

from gateway.core.errors import BodyTooLarge, InvalidRequest
from gateway.core.front.body import Upload
from gateway.core.front.reply import ClientResponse
from gateway.core.resources import Holding, MemoryBudget
from gateway.features.batches.batch import Owner, StoredFile
from gateway.features.batches.contents import Contents
from gateway.features.batches.documents import FilesPage, UploadFields, checked
from gateway.features.batches.errors import FileNotFound, StorageUnavailable
from gateway.features.batches.settings import BatchesConfig
from gateway.features.batches.store import Store
from gateway.features.uploads.forms import Form, FormParser, boundary_of

_FORM_BYTES = 65536  # of a form, besides the file
_ACTED_ON = frozenset(("purpose", "expires_after[anchor]", "expires_after[seconds]"))
_MOST_FILES = 10000  # of a key
_STRAY_SECONDS = 86400.0  # no upload takes so long
_STRAY_LOOKS_SECONDS = 3600.0  # between looks for what killed gateways have left


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


class Files:
    """Owner of the files: their rows are in the store. How much of an upload has arrived is known here alone."""

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
        self._stored_bytes = 0  # of all files; other gateways change it, too
        self._arriving: dict[str, tuple[str, int]] = {}  # key and bytes so far, by file
        self._looked_seconds = -math.inf
        self.apply(config)

    def apply(self, config: BatchesConfig) -> None:
        """Take over other limits; files that exist stay."""
        self._config = config

    @property
    def lifetime_seconds(self) -> int:
        """The lifetime of files for which the client sets none."""
        return self._config.lifetime_seconds

    @property
    def size_bytes(self) -> int:
        return self._stored_bytes + sum(size_bytes for _, size_bytes in self._arriving.values())

    async def open(self) -> None:
        """Count what is there, and delete contents without a row, unless other gateways may write them."""
        self._stored_bytes = await self._store.all_files_bytes()
        if self._store.is_alone:
            await self._contents.delete_others(await self._store.file_ids(), math.inf)

    async def receive(self, owner: Owner, upload: Upload, content_type: bytes, length: int = 0) -> StoredFile:
        """Write an upload while it arrives. Raises a GatewayError, and keeps nothing then.

        `length`: of the whole form, if the client states it.
        """
        parser, file_id = FormParser(boundary_of(content_type), _ACTED_ON), new_file_id()
        count, stored_bytes = await self._store.files_of(owner.key)
        if length - _FORM_BYTES > self._config.max_file_bytes:
            self._check_size(length, file_id, owner.key, stored_bytes)
        if count + sum(key == owner.key for key, _ in self._arriving.values()) >= _MOST_FILES:
            raise BodyTooLarge(f"This API key has {_MOST_FILES} files, which is the limit; delete some.")
        is_written = is_kept = False
        self._arriving[file_id] = owner.key, 0
        try:
            await self._contents.write(file_id, self._content(upload, parser, file_id, stored_bytes))
            is_written = True
            _, stored_bytes = await self._store.files_of(owner.key)  # with uploads that have ended meanwhile
            self._check_size(size_bytes := self._arriving[file_id][1], file_id, owner.key, stored_bytes)
            now = int(self._unix_seconds())
            stored = StoredFile(
                file_id,
                key=owner.key,
                tenant=owner.tenant,
                filename=parser.form.filename or "",
                purpose=parser.form.fields["purpose"],
                size_bytes=size_bytes,
                created_at=now,
                expires_at=now + self._lifetime(parser.form),
            )
            await self._store.add_file(stored)
            is_kept = True
            self.count([stored])
        finally:
            del self._arriving[file_id]
            if is_written and not is_kept:
                await self.drop(file_id)
        return stored

    async def _content(
        self, upload: Upload, parser: FormParser, file_id: str, stored_bytes: int
    ) -> AsyncIterator[bytes]:
        """The content of the form's file, in pieces that are dropped before the next one. Raises InvalidRequest or
        BodyTooLarge.
        """
        key, size_bytes = self._arriving[file_id]
        async for piece in upload:
            content = b"".join(parser.feed(piece))
            del piece
            if content:
                size_bytes += len(content)
                self._check_size(size_bytes, file_id, key, stored_bytes)
                yield content
            del content
            if file_id not in self._arriving:  # its request has ended: S3's client may read on
                raise InvalidRequest("The upload has ended.")
            self._arriving[file_id] = key, size_bytes
        parser.form.check_end()
        self._lifetime(parser.form)

    def _check_size(self, size_bytes: int, file_id: str, key: str, stored_bytes: int) -> None:
        """Whether a file may be so large, beside what its key has stored, and what else of it arrives."""
        most, of_key = self._config.max_file_bytes, self._config.max_bytes_per_key
        if size_bytes > most:
            raise BodyTooLarge(f"The file exceeds the limit of {most} bytes (batches.max_file_bytes).", param="file")
        others = [of for other, (its_key, of) in self._arriving.items() if its_key == key and other != file_id]
        if stored_bytes + sum(others) + size_bytes > of_key:
            raise BodyTooLarge(
                f"The files of this API key exceed the limit of {of_key} bytes (batches.max_bytes_per_key);"
                " delete files that are not needed.",
                param="file",
            )

    def count(self, added: Iterable[StoredFile]) -> None:
        """These files have been added to the store."""
        self._stored_bytes += sum(file.size_bytes for file in added)

    def _lifetime(self, form: Form) -> int:
        """In seconds. Raises InvalidRequest if a field of the form is missing or invalid."""
        if form.filename is None:
            raise InvalidRequest("The form field `file` is missing.", param="file")
        fields = form.fields
        given = {name: fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds")}
        expiry = None if set(given.values()) == {None} else given
        asked = checked(UploadFields, {"purpose": fields.get("purpose"), "expires_after": expiry})
        return self.lifetime_seconds if asked.expires_after is None else asked.expires_after.seconds

    async def find(self, file_id: str, owner: Owner) -> StoredFile:
        """Raises FileNotFound, also for files of others, and for those that have expired."""
        found = await self._store.file(file_id, owner)
        if found is None or found.expires_at <= self._unix_seconds():
            raise FileNotFound(f"No such file: {file_id[:64]!r}.", param="file_id")
        return found

    async def list(self, owner: Owner, page: FilesPage) -> list[StoredFile]:
        """One more than a page has, if there are more. Raises InvalidRequest if `page.after` is unknown."""
        return await self._store.list_files(owner, page, int(self._unix_seconds()))

    async def delete(self, file_id: str, size_bytes: int) -> None:
        await self._store.delete_file(file_id)
        self._stored_bytes -= size_bytes
        await self.drop(file_id)

    async def drop(self, file_id: str) -> None:
        """Delete a content that has no row. What cannot be reached now is a stray, and deleted later."""
        with suppress(StorageUnavailable):
            await self._contents.delete(file_id)

    async def delete_expired(self, in_use: Callable[[], Awaitable[set[str]]]) -> None:
        """Delete files whose time has come; the input of a batch that runs stays until that has ended."""
        now = self._unix_seconds()
        for file_id, size_bytes in await self._store.expired_files(now):
            if file_id not in await in_use():
                await self.delete(file_id, size_bytes)
        self._stored_bytes = await self._store.all_files_bytes()
        if now - self._looked_seconds >= _STRAY_LOOKS_SECONDS:
            await self._contents.delete_others(
                await self._store.file_ids() | self._arriving.keys(), now - _STRAY_SECONDS
            )
            self._looked_seconds = now

    async def send(self, file: StoredFile, reply: ClientResponse) -> None:
        """Pass the content on as fast as the client reads it. Raises FileNotFound or MemoryFull."""
        with Holding(self._memory) as holding:
            holding.add(self._contents.piece_bytes)
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
