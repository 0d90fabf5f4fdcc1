"""All batches that have not ended, if several gateways share them: what each does is known by the database they share.

Once a second, a gateway extends its claims, reports its counts, and learns which batches there are and what became of
them. One that is killed is not heard of any more, and the others take over its claims.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import structlog

from gateway.features.batches.batch import Batch
from gateway.features.batches.checks import MISSING, InputChecks
from gateway.features.batches.errors import StorageUnavailable
from gateway.features.batches.files import Files, has_no_room
from gateway.features.batches.input import InvalidInput
from gateway.features.batches.run import RunParts, pause
from gateway.features.batches.running import BatchRunner
from gateway.features.batches.s3 import S3Bucket
from gateway.features.batches.share import SharedBatch, ShareSetting, patiently
from gateway.features.batches.store import SharedStore

_TICK_SECONDS = 1.0
_STOP_SECONDS = 5.0


class SharedRunner(BatchRunner):
    """What this gateway does of the batches of several gateways."""

    def __init__(
        self,
        store: SharedStore,
        files: Files,
        bucket: S3Bucket,
        *,
        parts: RunParts,
        checks: InputChecks,
    ) -> None:
        super().__init__(parts, checks)
        self._store = store
        self._bucket = bucket
        holder, lifetime = f"gateway_{parts.new_id()}", lambda: self._lifetime_seconds
        self._setting = ShareSetting(
            holder, store, files=files, bucket=bucket, parts=parts, checks=checks, lifetime_seconds=lifetime
        )
        self._shares: dict[str, SharedBatch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()  # of batches that have ended
        self._reported: dict[str, bytes] = {}
        self._following: asyncio.Task[None] | None = None
        self._is_reachable = True  # the database
        self._log = structlog.get_logger("gateway")

    def batches(self) -> list[Batch]:
        return [share.batch for share in self._shares.values()]

    def batches_here(self) -> list[Batch]:
        return [share.own for share in self._shares.values()]

    async def open(self, batches: Iterable[Batch]) -> None:
        """Begin to work at batches, those of other gateways, too."""
        await super().open(batches)
        self._following = asyncio.get_running_loop().create_task(self._follow(), name="batches_shared")

    def find(self, batch_id: str) -> Batch | None:  # noqa: ARG002
        """None: the store has the batch as it is now."""
        return None

    async def files_in_use(self) -> set[str]:
        """Files that batches read, of all gateways."""
        return {batch.input_file_id for batch in await self._store.running_batches()}

    def start(self, batch: Batch) -> None:
        """Work at a batch that is in the store."""
        share = self._shares[batch.id] = SharedBatch(batch, self._setting)
        self._tasks[batch.id] = asyncio.get_running_loop().create_task(self._live(share), name=batch.id)

    async def cancel(self, batch: Batch) -> Batch:
        await self._store.change(batch.id, partial(_cancel, int(self._parts.unix_seconds())))
        found = await self._store.batch(batch.id, batch.owner) or batch
        if (share := self._shares.get(batch.id)) is not None:
            share.follow(found)
        return found

    async def stop(self) -> None:
        """Abort what is in flight, make the answers durable, and let other gateways go on at once."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        tasks = [*self._tasks.values(), *self._ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        reports = {name: share.own.report() for name, share in self._shares.items()}
        with suppress(StorageUnavailable, TimeoutError):  # the claims are lost after a while
            async with asyncio.timeout(_STOP_SECONDS):
                await self._store.tick(self._setting.holder, (), reports)
                await self._store.release(self._setting.holder)
        self._shares.clear()
        self._tasks.clear()

    async def sweep(self) -> None:
        """Delete what gateways that were killed have left of batches that have ended."""
        there = await self._bucket.batches_with_parts()
        running = {batch.id for batch in await self._store.running_batches()}
        await self._bucket.delete_parts(there - running)

    async def _follow(self) -> None:
        while True:
            try:
                await self._tick()
            except StorageUnavailable as error:
                self._reached(False, error)
            except Exception as error:
                self._parts.caught("batches_shared", error)
            else:
                self._reached(True, None)
            await asyncio.sleep(_TICK_SECONDS)

    def _reached(self, is_reachable: bool, error: StorageUnavailable | None) -> None:
        if is_reachable == self._is_reachable:
            return
        self._is_reachable = is_reachable
        if is_reachable:
            self._log.info("batch_database_reached")
        else:
            reason = str(error.__cause__).strip().partition("\n")[0] if error is not None else ""
            self._log.error("batch_database_unavailable", reason=reason, hint="lines that are claimed go on")

    async def _tick(self) -> None:
        """Extend the claims, report counts, and follow what the other gateways did."""
        shares = {**self._shares}
        held = {(name, first): task for name, share in shares.items() for first, task in share.held.items()}
        reports = {name: share.own.report() for name, share in shares.items()}
        changed = {name: report for name, report in reports.items() if self._reported.get(name) != report}
        kept, running = await self._store.tick(self._setting.holder, [*held], changed)
        self._reported = reports
        for claim, task in held.items():
            if claim not in kept:
                task.cancel()
        batches = {batch.id: batch for batch in running}
        for name in shares.keys() - batches.keys():
            del self._shares[name]
            ending = self._tasks.pop(name)
            ending.cancel()
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
        for name, batch in batches.items():
            if name in self._shares:
                self._shares[name].follow(batch)
            else:
                self.start(batch)

    async def _live(self, share: SharedBatch) -> None:
        """Work at a batch until it has ended. After an unexpected exception, begin again."""
        while share.batch.is_running:
            errors: list[dict[str, Any]] = []
            try:
                await share.work(partial(self.enqueued, share.batch))
                return
            except InvalidInput as invalid:
                errors = invalid.errors
            except StorageUnavailable as error:
                self._reached(False, error)
            except Exception as error:
                self._parts.caught("batch", error)
                if has_no_room(error):
                    pause(share.own, "no space is left on the disk")
            if errors and await self._refuse(share, errors):
                return
            await asyncio.sleep(_TICK_SECONDS)

    async def _refuse(self, share: SharedBatch, errors: list[dict[str, Any]]) -> bool:
        """Have the batch fail. False = another gateway has begun it, by other limits; this one looks at it again."""
        now, is_first = int(self._parts.unix_seconds()), False

        def fail(batch: Batch) -> bool:
            nonlocal is_first
            is_missing = errors[0]["code"] == MISSING
            is_first = batch.is_running and (not batch.total or is_missing)
            if is_first:
                batch.fail(errors, now)
            return is_first

        found = await patiently(partial(self._store.change, share.batch.id, fail))
        if found is not None and found.is_running:
            self._log.error("batch_not_run_here", batch=found.id, reason=errors[0]["message"])
            share.follow(found)
            return False
        if found is not None and is_first:
            self._parts.metrics.batches.add((found.status,))
            self._log.info("batch_ended", batch=found.id, status=found.status, lines=found.total, failed=0)
        return True


def _cancel(now: int, batch: Batch) -> bool:
    if batch.status not in ("validating", "in_progress"):
        return False
    batch.cancel(now)
    return True
