"""Files and batches as one part of the gateway: opened when it begins to serve, stopped before another process does."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import orjson
import structlog

from gateway._native import json_object
from gateway.config import Config
from gateway.core.errors import InvalidRequest, RateLimited
from gateway.core.front.http_request import ClientKey, HttpRequest
from gateway.core.front.read import RequestReader
from gateway.core.front.reply import JSON, ClientResponse
from gateway.features.batches.batch import ENDPOINTS, Batch, Owner
from gateway.features.batches.checks import InputChecks
from gateway.features.batches.contents import Contents
from gateway.features.batches.errors import BatchConflict, BatchNotFound
from gateway.features.batches.files import Files, expiry_of
from gateway.features.batches.folder import Folder
from gateway.features.batches.run import RunParts
from gateway.features.batches.runner import Runner
from gateway.features.batches.sqlite import SqliteDatabase
from gateway.features.batches.store import Store

_SWEEP_SECONDS = 60.0
_STOP_SECONDS = 10.0  # most time to stop before the process ends: the folder or the database may hang
_MOST_RUNNING = 1000  # batches of a key that have not ended
_WINDOW = re.compile(r"([1-9][0-9]{0,4})([hm])")
_MOST_WINDOW_SECONDS = 30 * 86400
_MOST_PAIRS, _MOST_NAME, _MOST_VALUE = 16, 64, 512  # of metadata
_DEPTH = 8  # of the JSON of a new batch


class Batches:
    """The API of files and batches, and the batches that run."""

    def __init__(self, path: str, config: Config, parts: RunParts) -> None:
        self._parts = parts
        limits = config.batches
        contents: Contents
        if limits.database is None:
            contents, self._store = Folder(Path(path)), Store(SqliteDatabase(Path(path)))
        else:
            from gateway.features.batches.postgres import PostgresDatabase  # the clients of both are extras
            from gateway.features.batches.s3 import S3Bucket

            contents = bucket = S3Bucket(path, limits.s3_endpoint, limits.s3_region, memory=parts.memory)
            self._store = Store(PostgresDatabase(limits.database, bucket))
        self._files = Files(self._store, contents, config=limits, memory=parts.memory, unix_seconds=parts.unix_seconds)
        checks = InputChecks(contents, parts.breather, parts.knows_model)
        self._runner = Runner(self._store, self._files, contents, parts=parts, checks=checks)
        self._is_open = False
        self._sweeping: asyncio.Task[None] | None = None
        self._lifetime_seconds = limits.lifetime_seconds

    def apply(self, config: Config, reader: RequestReader) -> None:
        """Take over limits; the folder stays."""
        self._lifetime_seconds = config.batches.lifetime_seconds
        self._files.apply(config.batches)
        self._runner.apply(config)
        self._parts.sender.apply(config, reader)

    def apply_keys(self, keys: Sequence[ClientKey], are_needed: bool) -> None:
        """Take over the keys in effect: lines of others get 401."""
        self._parts.sender.apply_keys(keys, are_needed=are_needed)

    def states(self) -> dict[str, int]:
        """How many batches that have not ended are in each state."""
        return self._runner.states()

    def promoted(self) -> dict[str, int]:
        """How many batches use more than idle capacity, by the class of their requests."""
        return self._runner.promoted()

    @property
    def used_bytes(self) -> int:
        """The size of all uploaded files and results."""
        return self._files.size_bytes

    async def open(self) -> None:
        """Open the folder, and take up the batches that have not ended. Raises StoreUnusable or OSError."""
        await self._store.open()
        batches = await self._store.running_batches()
        await self._files.open()
        await self._runner.open(batches)
        self._is_open = True
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep(), name="batch_sweep")
        structlog.get_logger("gateway").info("batches_opened", running=len(batches), files_bytes=self.used_bytes)

    async def stop(self) -> None:
        """Stop the batches, with all answers on disk, and close the folder. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await self._runner.stop()
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
            with self._parts.supervisor.guard("batch_sweep"):
                await self._files.delete_expired(self._runner.files_in_use)
                before = int(self._parts.unix_seconds()) - self._lifetime_seconds
                await self._store.forget_batches(before)
                await self._runner.sweep()
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
                await self._files.send(await self._files.find(target, of), reply)
                return
            document = await self._of_files(incoming, of, target, parameters)
        elif target:
            batch = await self._find(target, of)
            if action:
                batch = await self._cancel(batch)
            document = batch.document()
        elif incoming.method == b"POST":
            document = await self._create(incoming.body, of)
        else:
            document = await self._list_batches(of, parameters)
        reply.send(200, JSON, b"", orjson.dumps(document))

    async def _of_files(
        self, incoming: HttpRequest, owner: Owner, file_id: str, parameters: dict[str, str]
    ) -> dict[str, Any]:
        files = self._files
        if file_id:
            file = await files.find(file_id, owner)
            if incoming.method == b"GET":
                return file.document()
            if file_id in await self._runner.files_in_use():
                raise BatchConflict(f"File {file_id!r} is the input of a batch that has not ended; cancel that first.")
            await files.delete(file)
            return {"id": file_id, "object": "file", "deleted": True}
        if incoming.upload is not None:
            headers = incoming.headers
            length = int(headers.get(b"content-length", 0))
            return (await files.receive(owner, incoming.upload, headers.get(b"content-type", b""), length)).document()
        order, limit = parameters.get("order", "desc"), _limit(parameters, 10000, 10000)
        if order not in ("asc", "desc"):
            raise InvalidRequest("The parameter `order` must be asc or desc.", param="order")
        purpose, after = parameters.get("purpose"), parameters.get("after")
        found = await files.list(owner, purpose, after, limit, ascending=order == "asc")
        return _page([file.document() for file in found[:limit]], has_more=len(found) > limit)

    async def _list_batches(self, owner: Owner, parameters: dict[str, str]) -> dict[str, Any]:
        limit, after = _limit(parameters, 20, 100), parameters.get("after")
        try:
            found = await self._store.list_batches(owner, after, limit)
        except KeyError:
            raise InvalidRequest("The parameter `after` is not the id of a batch.", param="after") from None
        shown = [self._runner.shown(batch).document() for batch in found[:limit]]
        return _page(shown, has_more=len(found) > limit)

    async def _find(self, batch_id: str, owner: Owner) -> Batch:
        """The batch as it is now. Raises BatchNotFound, also for batches of others."""
        batch = await self._store.batch(batch_id, owner)
        if batch is None:
            raise BatchNotFound(f"No such batch: {batch_id[:64]!r}.", param="batch_id")
        return self._runner.shown(batch)

    async def _cancel(self, batch: Batch) -> Batch:
        if batch.status in ("cancelling", "cancelled"):
            return batch
        if batch.status not in ("validating", "in_progress"):
            raise BatchConflict(f"A batch with status {batch.status!r} cannot be cancelled.")
        return await self._runner.cancel(batch)

    async def _create(self, body: bytes, owner: Owner) -> dict[str, Any]:
        document = json_object(body, _DEPTH)
        if document is None:
            raise InvalidRequest("The body must be a JSON object.")
        endpoint, window = document.get("endpoint"), document.get("completion_window")
        if endpoint not in ENDPOINTS:
            raise InvalidRequest(f"endpoint must be one of {', '.join(ENDPOINTS)}.", param="endpoint")
        seconds = _window_seconds(window)
        file_id = document.get("input_file_id")
        if type(file_id) is not str:
            raise InvalidRequest("input_file_id must be the id of an uploaded file.", param="input_file_id")
        metadata, lifetime = _metadata(document.get("metadata")), _output_lifetime(document.get("output_expires_after"))
        if self._runner.count(owner.key) >= _MOST_RUNNING:
            raise RateLimited(f"This API key has {_MOST_RUNNING} batches that have not ended, which is the limit.")
        file = await self._files.find(file_id, owner)
        if file.purpose != "batch":
            raise InvalidRequest(
                f"The purpose of file {file_id!r} is {file.purpose}, not batch.", param="input_file_id"
            )
        now = int(self._parts.unix_seconds())
        batch = Batch(
            f"batch_{self._parts.new_id()}",
            owner=owner,
            endpoint=endpoint,
            input_file_id=file_id,
            window=str(window),
            metadata=metadata,
            output_lifetime_seconds=lifetime,
            created_at=now,
            expires_at=now + seconds,
        )
        await self._store.put_batch(batch)
        created = batch.document()
        self._runner.start(batch)
        return created


def _page(data: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": has_more}


def _limit(parameters: dict[str, str], usual: int, most: int) -> int:
    """The most entries of a page. Raises InvalidRequest if the parameter is not in range."""
    text = parameters.get("limit")
    if text is None:
        return usual
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= most):
        raise InvalidRequest(f"The parameter `limit` must be a whole number from 1 to {most}.", param="limit")
    return int(text)


def _window_seconds(window: object) -> int:
    """Raises InvalidRequest if the completion window is not valid."""
    found = _WINDOW.fullmatch(window) if type(window) is str else None
    seconds = 0 if found is None else int(found[1]) * (3600 if found[2] == "h" else 60)
    if not 0 < seconds <= _MOST_WINDOW_SECONDS:
        raise InvalidRequest(
            "completion_window must be 24h, or another number of hours or minutes, such as 2h or 30m; at most 720h.",
            param="completion_window",
        )
    return seconds


def _metadata(given: object) -> dict[str, str] | None:
    """Raises InvalidRequest if it is not a few short strings by name."""
    if given is None:
        return None
    if type(given) is not dict or len(given) > _MOST_PAIRS:
        raise InvalidRequest(f"metadata must be an object with at most {_MOST_PAIRS} pairs.", param="metadata")
    for name, value in given.items():
        if len(name) > _MOST_NAME or type(value) is not str or len(value) > _MOST_VALUE:
            raise InvalidRequest(
                f"metadata must have names of at most {_MOST_NAME} and strings of at most {_MOST_VALUE} characters.",
                param="metadata",
            )
    return given


def _output_lifetime(given: object) -> int:
    """In seconds; 0 = as configured. Raises InvalidRequest."""
    if given is None:
        return 0
    if type(given) is not dict:
        raise InvalidRequest("output_expires_after must be an object.", param="output_expires_after")
    return expiry_of(given.get("anchor"), given.get("seconds"), "output_expires_after")
