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

import structlog

from gateway.features.batches.batch import Batch
from gateway.features.batches.errors import StorageUnavailable
from gateway.features.batches.run import BatchTools
from gateway.features.batches.share import BatchShare

_TICK_SECONDS = 1.0
_STOP_SECONDS = 5.0


class Runner:
    """What this gateway does of the batches that have not ended. The others are in the store only."""

    def __init__(self, tools: BatchTools) -> None:
        self._tools = tools
        self._store = tools.store
        self._shares: dict[str, BatchShare] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # of the shares, and of some that are not followed any more
        self._reported: dict[tuple[str, int], str] = {}
        self._following: asyncio.Task[None] | None = None
        self._is_reachable = True  # the database
        self._log = structlog.get_logger("gateway")

    def shown(self, batch: Batch) -> Batch:
        """A batch of the store, with what was done here since the last report."""
        share = self._shares.get(batch.id)
        return batch if share is None else share.shown(batch)

    def states(self) -> dict[str, int]:
        """How many batches are in each state; one that is paused is in no other."""
        found = [share.batch for share in self._shares.values() if share.batch.is_running]
        return Counter("paused" if batch.paused else batch.status for batch in map(self.shown, found))

    def promoted(self) -> dict[str, int]:
        """How many batches use more than idle capacity here, by the class of their lines."""
        found = [share.standing.promoted for share in self._shares.values()]
        return Counter(filter(None, found))

    def count(self, key: str) -> int:
        return sum(share.batch.owner.key == key for share in self._shares.values())

    def enqueued(self, batch: Batch) -> int:
        """Lines without an answer in the other batches of the same key."""
        others = [share.batch for name, share in self._shares.items() if name != batch.id]
        found = [self.shown(other) for other in others if other.owner.key == batch.owner.key]
        return sum(other.total - other.tally.lines for other in found)

    async def open(self, batches: Iterable[Batch]) -> None:
        """Begin to work at batches, those of other gateways, too."""
        for batch in batches:
            self.start(batch)
        if not self._store.is_alone:
            self._following = asyncio.get_running_loop().create_task(self._follow(), name="batches_follow")

    async def files_in_use(self) -> set[str]:
        return {batch.input_file_id for batch in await self._store.running_batches()}

    def start(self, batch: Batch) -> None:
        """Work at a batch that is in the store, from the state that it has reached. Idempotent."""
        if batch.id in self._shares:
            return
        share = self._shares[batch.id] = BatchShare(batch, self._tools, partial(self.enqueued, batch))
        self._tasks.add(share.task)
        share.task.add_done_callback(partial(self._ended, share))

    def _ended(self, share: BatchShare, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._shares.get(share.batch.id) is share:
            del self._shares[share.batch.id]

    async def cancel(self, batch: Batch) -> Batch:
        """Start no more of its lines, on any gateway. It ends when those in flight have ended."""
        now = int(self._tools.unix_seconds())
        await self._store.change(batch.id, lambda found: found.cancel(now))
        found = await self._store.batch(batch.id, batch.owner) or batch
        if (share := self._shares.get(batch.id)) is not None:
            share.update(found)
        return found

    async def stop(self) -> None:
        """Abort what is in flight, make the answers durable, and let other gateways go on at once."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(StorageUnavailable, TimeoutError):  # the claims are lost after a while
            async with asyncio.timeout(_STOP_SECONDS):
                await self._store.release(self._tools.holder)
        self._shares.clear()

    async def sweep(self) -> None:
        """Delete what gateways that were killed have left of batches that have ended."""
        there = await self._tools.contents.batches_with_parts()
        running = {batch.id for batch in await self._store.running_batches()}
        await self._tools.contents.delete_parts(there - running)

    async def _follow(self) -> None:
        while True:
            try:
                await self._tick()
            except StorageUnavailable as error:
                self._reached(False, error)
            except Exception as error:
                self._tools.supervisor.caught("batches_follow", error)
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
        kept, running = await self._store.tick(self._tools.holder, [*held], changed)
        self._reported = reports
        for claim, task in held.items():
            if claim not in kept:
                task.cancel()
        batches = {batch.id: batch for batch in running}
        for name in (shares.keys() & self._shares.keys()) - batches.keys():
            self._shares.pop(name).task.cancel()
        for name, batch in batches.items():
            if name in self._shares:
                self._shares[name].update(batch)
            else:
                self.start(batch)
