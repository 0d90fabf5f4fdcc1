"""All batches that have not ended, of all gateways: what each gateway does is known by the database that they share.

Once a second, a gateway extends its claims, reports its counts, and learns which batches there are and what became of
them. One that is killed is not heard of any more, and the others take over its claims. A gateway alone has
no need of that: what it held when it was killed, it takes over itself.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import structlog

from gateway.config import Config
from gateway.features.batches.batch import Batch
from gateway.features.batches.checks import InputChecks
from gateway.features.batches.contents import Contents
from gateway.features.batches.errors import StorageUnavailable
from gateway.features.batches.files import Files
from gateway.features.batches.input import InvalidInput
from gateway.features.batches.run import RunParts
from gateway.features.batches.share import BatchShare, ShareSetting
from gateway.features.batches.store import Store

_TICK_SECONDS = 1.0
_STOP_SECONDS = 5.0


class Runner:
    """What this gateway does of the batches that have not ended. The others are in the store only."""

    def __init__(self, store: Store, files: Files, contents: Contents, *, parts: RunParts, checks: InputChecks) -> None:
        self._store = store
        self._contents = contents
        self._parts = parts
        self._checks = checks
        self._setting = ShareSetting(
            f"gateway_{parts.new_id()}",
            store,
            files=files,
            contents=contents,
            parts=parts,
            checks=checks,
            lifetime_seconds=lambda: self._lifetime_seconds,
        )
        self._shares: dict[str, BatchShare] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()  # of batches that have ended
        self._reported: dict[tuple[str, int], str] = {}
        self._following: asyncio.Task[None] | None = None
        self._is_reachable = True  # the database
        self._log = structlog.get_logger("gateway")

    def apply(self, config: Config) -> None:
        """Take over limits, for files that are checked from now on, and the bound of lines in flight."""
        self._checks.apply(config)
        self._lifetime_seconds = config.batches.lifetime_seconds
        self._parts.slots.apply(config.batches.lines_in_flight)

    def shown(self, batch: Batch) -> Batch:
        """A batch of the store, with what was done here since the last report."""
        share = self._shares.get(batch.id)
        return batch if share is None else share.shown(batch)

    def states(self) -> dict[str, int]:
        """How many batches are in each state; one that is paused is in no other."""
        found = [share for share in self._shares.values() if share.batch.is_running]
        return Counter("paused" if share.paused else share.batch.status for share in found)

    def promoted(self) -> dict[str, int]:
        """How many batches use more than idle capacity here, by the class of their lines."""
        return Counter(share.own.promoted for share in self._shares.values() if share.own.promoted)

    def count(self, key: str) -> int:
        """How many batches of this key have not ended."""
        return sum(share.own.owner.key == key for share in self._shares.values())

    def enqueued(self, batch: Batch) -> int:
        """Lines without an answer in the other batches of the same key."""
        others = [share for share in self._shares.values() if share.own.id != batch.id]
        found = [other.shown(other.batch) for other in others if other.own.owner.key == batch.owner.key]
        return sum(other.total - other.tally.lines for other in found)

    async def open(self, batches: Iterable[Batch]) -> None:
        """Begin to work at batches, those of other gateways, too."""
        for batch in batches:
            self.start(batch)
        if not self._store.is_alone:
            self._following = asyncio.get_running_loop().create_task(self._follow(), name="batches_follow")

    async def files_in_use(self) -> set[str]:
        """Files that batches read, of all gateways."""
        return {batch.input_file_id for batch in await self._store.running_batches()}

    def start(self, batch: Batch) -> None:
        """Work at a batch that is in the store, from the state that it has reached. Idempotent."""
        if batch.id in self._shares:
            return
        share = self._shares[batch.id] = BatchShare(batch, self._setting)
        self._tasks[batch.id] = asyncio.get_running_loop().create_task(self._live(share), name=batch.id)

    async def cancel(self, batch: Batch) -> Batch:
        """Start no more of its lines, on any gateway. It ends when those in flight have ended."""
        await self._store.change(batch.id, partial(_cancel, int(self._parts.unix_seconds())))
        found = await self._store.batch(batch.id, batch.owner) or batch
        if (share := self._shares.get(batch.id)) is not None:
            share.update(found)
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
        with suppress(StorageUnavailable, TimeoutError):  # the claims are lost after a while
            async with asyncio.timeout(_STOP_SECONDS):
                await self._store.release(self._setting.holder)
        self._shares.clear()
        self._tasks.clear()

    async def sweep(self) -> None:
        """Delete what gateways that were killed have left of batches that have ended."""
        there = await self._contents.batches_with_parts()
        running = {batch.id for batch in await self._store.running_batches()}
        await self._contents.delete_parts(there - running)

    async def _follow(self) -> None:
        while True:
            try:
                await self._tick()
            except StorageUnavailable as error:
                self._reached(False, error)
            except Exception as error:
                self._parts.supervisor.caught("batches_follow", error)
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
        reports = {(name, first): report for name, share in shares.items() for first, report in share.reports().items()}
        changed = {claim: report for claim, report in reports.items() if self._reported.get(claim) != report}
        kept, running = await self._store.tick(self._setting.holder, [*held], changed)
        self._reported = reports
        for claim, task in held.items():
            if claim not in kept:
                task.cancel()
        batches = {batch.id: batch for batch in running}
        for name in (shares.keys() & self._shares.keys()) - batches.keys():
            del self._shares[name]
            ending = self._tasks.pop(name)
            ending.cancel()
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
        for name, batch in batches.items():
            if name in self._shares:
                self._shares[name].update(batch)
            else:
                self.start(batch)

    async def _live(self, share: BatchShare) -> None:
        """Work at a batch until it has ended."""
        await self._work(share)
        if self._shares.get(share.own.id) is share:
            del self._shares[share.own.id], self._tasks[share.own.id]

    async def _work(self, share: BatchShare) -> None:
        """After an unexpected exception, begin again."""
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
                self._parts.supervisor.caught("batch", error)
            if errors and await share.refuse(errors):  # the exception is gone, with what its frames have of the file
                return
            await asyncio.sleep(_TICK_SECONDS)


def _cancel(now: int, batch: Batch) -> bool:
    if batch.status not in ("validating", "in_progress"):
        return False
    batch.cancel(now)
    return True
