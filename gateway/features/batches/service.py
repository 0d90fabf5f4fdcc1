"""Files and batches as one part of the gateway: opened when it begins to serve, stopped before another process does."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import orjson
import structlog

from gateway._native import json_object
from gateway.config import Config
from gateway.core.core import Core
from gateway.core.errors import InvalidRequest, RateLimited
from gateway.core.front.http_request import HttpRequest
from gateway.core.front.reply import JSON, ClientResponse
from gateway.features.batches.batch import Batch, Owner
from gateway.features.batches.checks import InputChecks
from gateway.features.batches.contents import Contents
from gateway.features.batches.documents import BatchesPage, FilesPage, NewBatch, checked, window_seconds
from gateway.features.batches.errors import BatchConflict, BatchNotFound
from gateway.features.batches.files import Files
from gateway.features.batches.folder import Folder
from gateway.features.batches.metrics import BatchCounters
from gateway.features.batches.run import BatchTools
from gateway.features.batches.runner import Runner
from gateway.features.batches.sender import LineSender
from gateway.features.batches.slots import Slots
from gateway.features.batches.sqlite import SqliteStore
from gateway.features.batches.store import Store

_SWEEP_SECONDS = 60.0
_STOP_SECONDS = 10.0  # most time to stop before the process ends: the folder or the database may hang
_MOST_RUNNING = 1000  # batches of a key that have not ended
_DEPTH = 8  # of the JSON of a new batch


class Batches:
    """The API of files and batches, and the batches that run. `engines_of`: as in `BatchTools`."""

    def __init__(
        self, core: Core, sender: LineSender, counters: BatchCounters, *, engines_of: Callable[[str], int | None]
    ) -> None:
        self._supervisor, self._unix_seconds, self._new_id = core.supervisor, core.unix_seconds, core.new_id
        settings = core.config.batches
        assert settings.path is not None
        contents: Contents
        self._store: Store
        if settings.database is None:
            contents, self._store = Folder(Path(settings.path)), SqliteStore(Path(settings.path))
        else:
            from gateway.features.batches.postgres import PostgresStore  # the clients of both are extras
            from gateway.features.batches.s3 import S3Bucket

            contents = bucket = S3Bucket(settings.path, settings.s3_endpoint, settings.s3_region, memory=core.memory)
            self._store = PostgresStore(settings.database, bucket)
        self.files = Files(self._store, contents, config=settings, memory=core.memory, unix_seconds=core.unix_seconds)
        self._checks = InputChecks(contents, engines_of)
        self._slots = Slots(settings.lines_in_flight)
        self.runner = Runner(
            BatchTools(
                f"gateway_{core.new_id()}",
                store=self._store,
                files=self.files,
                contents=contents,
                checks=self._checks,
                sender=sender,
                memory=core.memory,
                slots=self._slots,
                counters=counters,
                unix_seconds=core.unix_seconds,
                new_id=core.new_id,
                random=core.random,
                engines_of=engines_of,
                supervisor=core.supervisor,
            )
        )
        self._is_open = False
        self._sweeping: asyncio.Task[None] | None = None

    def apply(self, config: Config) -> None:
        """Take over limits; the folder stays."""
        self.files.apply(config.batches)
        self._checks.apply(config)
        self._slots.apply(config.batches.lines_in_flight)

    async def open(self) -> None:
        """Open the folder, and take up the batches that have not ended. Raises StoreUnusable or OSError."""
        await self._store.open()
        batches = await self._store.running_batches()
        await self.files.open()
        await self.runner.open(batches)
        self._is_open = True
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep(), name="batch_sweep")
        structlog.get_logger("gateway").info("batches_opened", running=len(batches), files_bytes=self.files.size_bytes)

    async def stop(self) -> None:
        """Stop the batches, with all answers on disk, and close the folder. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await self.runner.stop()
        await self._store.close()

    async def stop_last(self) -> None:
        """Stop before the process ends, if the folder and the database answer; else a restart takes the batches up."""
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self.stop()
        except TimeoutError:
            structlog.get_logger("gateway").error("batches_cut", reason=f"not stopped within {_STOP_SECONDS:g} s")

    async def _sweep(self) -> None:
        while True:
            with self._supervisor.guard("batch_sweep"):
                await self.files.delete_expired(self.runner.files_in_use)
                before = int(self._unix_seconds()) - self.files.lifetime_seconds
                await self._store.forget_batches(before)
                await self.runner.sweep()
            await asyncio.sleep(_SWEEP_SECONDS)

    async def answer(self, incoming: HttpRequest, owner: tuple[str, str], reply: ClientResponse) -> None:
        """Answer a request for files or batches through `reply`. Raises a GatewayError; Draining, if not open."""
        self._store.check_open()
        path, _, query = incoming.path.partition(b"?")
        _, _, kind, *rest = path.decode("ascii").split("/")
        target, action, of = rest[0] if rest else "", rest[1] if len(rest) > 1 else "", Owner._make(owner)
        parameters = dict(parse_qsl(query.decode("ascii", "replace"), max_num_fields=16))
        if kind == "files":
            if action:
                await self.files.send(await self.files.find(target, of), reply)
                return
            document = await self._of_files(incoming, of, target, parameters)
        elif target:
            batch = await self._find(target, of)
            document = (await self._cancelled(batch) if action else batch).document()
        elif incoming.method == b"POST":
            document = await self._create(incoming.body, of)
        else:
            page = checked(BatchesPage, parameters)
            found = await self._store.list_batches(of, page)
            document = _page([self.runner.shown(batch).document() for batch in found], page.limit)
        reply.send(200, JSON, b"", orjson.dumps(document))

    async def _of_files(
        self, incoming: HttpRequest, owner: Owner, file_id: str, parameters: dict[str, str]
    ) -> dict[str, Any]:
        files = self.files
        if file_id:
            file = await files.find(file_id, owner)
            if incoming.method == b"GET":
                return file.document()
            if file_id in await self.runner.files_in_use():
                raise BatchConflict(f"File {file_id!r} is the input of a batch that has not ended; cancel that first.")
            await files.delete(file_id, file.size_bytes)
            return {"id": file_id, "object": "file", "deleted": True}
        if incoming.upload is not None:
            headers = incoming.headers
            length = int(headers.get(b"content-length", 0))
            return (await files.receive(owner, incoming.upload, headers.get(b"content-type", b""), length)).document()
        page = checked(FilesPage, parameters)
        return _page([file.document() for file in await files.list(owner, page)], page.limit)

    async def _find(self, batch_id: str, owner: Owner) -> Batch:
        """The batch as it is now. Raises BatchNotFound, also for batches of others."""
        batch = await self._store.batch(batch_id, owner)
        if batch is None:
            raise BatchNotFound(f"No such batch: {batch_id[:64]!r}.", param="batch_id")
        return self.runner.shown(batch)

    async def _cancelled(self, batch: Batch) -> Batch:
        found = await self.runner.cancel(batch)
        if found.status not in ("cancelling", "cancelled"):
            raise BatchConflict(f"A batch with status {found.status!r} cannot be cancelled.")
        return found

    async def _create(self, body: bytes, owner: Owner) -> dict[str, Any]:
        document = json_object(body, _DEPTH)
        if document is None:
            raise InvalidRequest("The body must be a JSON object.")
        new = checked(NewBatch, document)
        if self.runner.count(owner.key) >= _MOST_RUNNING:
            raise RateLimited(f"This API key has {_MOST_RUNNING} batches that have not ended, which is the limit.")
        file = await self.files.find(new.input_file_id, owner)
        if file.purpose != "batch":
            raise InvalidRequest(
                f"The purpose of file {file.id!r} is {file.purpose}, not batch.", param="input_file_id"
            )
        now = int(self._unix_seconds())
        batch = Batch(
            f"batch_{self._new_id()}",
            owner=owner,
            endpoint=new.endpoint,
            input_file_id=file.id,
            window=new.completion_window,
            metadata=new.metadata,
            output_lifetime_seconds=new.output_expires_after.seconds if new.output_expires_after else 0,
            created_at=now,
            expires_at=now + window_seconds(new.completion_window),
        )
        await self._store.put_batch(batch)
        created = batch.document()
        self.runner.start(batch)
        return created


def _page(found: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page of a list, of which one more document was found, if there is one."""
    data = found[:limit]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": len(found) > limit}
