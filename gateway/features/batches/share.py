"""One batch, as this gateway works at it: it claims lines, runs them, and may end the batch.

A gateway alone claims all lines at once. The same happens after a restart as after the death of another gateway: the
parts tell which lines of a lost claim have an answer, and the others are run.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any, BinaryIO, ParamSpec, TypeVar

import structlog

from gateway.core.errors import MemoryFull
from gateway.core.resources import Holding
from gateway.core.threads import breather
from gateway.features.batches.batch import OUTPUT, Batch, StoredFile, Tally, report_of
from gateway.features.batches.checks import MISSING
from gateway.features.batches.errors import StorageFull, StorageUnavailable
from gateway.features.batches.files import new_file_id
from gateway.features.batches.input import InvalidInput, read_lines
from gateway.features.batches.journal import NO_SPACE, Journal, LineName, unexecuted_line, why_unexecuted
from gateway.features.batches.pace import BatchPace
from gateway.features.batches.parts import NAMES, JoinedParts, next_piece
from gateway.features.batches.run import BatchRun, BatchTools, BatchWork, Standing, arrange
from gateway.features.batches.store import ClaimedLines

Given = ParamSpec("Given")
Result = TypeVar("Result")
_POLL_SECONDS = 1.0
_STOP_SECONDS = 5.0  # most time for the last answers, if they cannot be written
_MOST_CLAIMS = 2  # at once: while the last lines of one end, those of the next run


class BatchShare:
    """What this gateway does of a batch. `batch`: as the store had it last; `standing`: how it goes on here.

    `task`: works at it until it has ended. `held`: the claims by their first lines, and what runs them, which is
    cancelled when the claim is lost.
    """

    def __init__(self, batch: Batch, tools: BatchTools, enqueued: Callable[[], int]) -> None:
        """`enqueued`: counts the lines of the other batches of the same key."""
        self.batch = batch
        self.standing = Standing(batch.id)
        self.held: dict[int, asyncio.Task[None]] = {}
        self._tools = tools
        self._store = tools.store
        self._contents = tools.contents
        self._runs: dict[int, BatchRun] = {}
        now = tools.sender.now()
        # As if this gateway had to run all the lines that are left.
        self._pace = BatchPace(now, now + batch.expires_at - tools.unix_seconds(), 0)
        self._log = structlog.get_logger("gateway")
        self.task = asyncio.get_running_loop().create_task(self._live(enqueued), name=batch.id)

    def reports(self) -> dict[int, str]:
        """What was done so far of the claims that run."""
        tallies = {first: run.tally for first, run in self._runs.items()}
        if self.batch.total in self.held:  # the end
            tallies[self.batch.total] = Tally()
        return {first: report_of(tally, self.standing.paused) for first, tally in tallies.items()}

    def shown(self, batch: Batch) -> Batch:
        """The batch of the store, as it is at this moment here."""
        if batch.is_running:
            batch.add_reports(self.reports())
            batch.show(self.standing.paused, self.standing.promoted)
        return batch

    def update(self, batch: Batch) -> None:
        """Take over the batch as the store has it now."""
        self.batch = self.shown(batch)
        self._pace.remain(batch.total - batch.tally.lines)
        if batch.status == "cancelling":
            for run in self._runs.values():
                run.stop_feeding()

    async def _live(self, enqueued: Callable[[], int]) -> None:
        """After an unexpected exception, begin again."""
        while self.batch.is_running:
            errors: list[dict[str, Any]] = []
            try:
                with self._closing([await self._kept(partial(self._tools.checks.open, self.batch))]) as [source]:
                    await self._work(source, enqueued)
                return
            except InvalidInput as invalid:
                errors = invalid.errors
            except StorageUnavailable:
                pass  # the runner and the bucket log it
            except Exception as error:
                self._tools.supervisor.caught("batch", error)
            if errors and await self._refuse(errors):  # the exception is gone, with what its frames have of the file
                return
            await asyncio.sleep(_POLL_SECONDS)

    async def _refuse(self, errors: list[dict[str, Any]]) -> bool:
        """Have the batch fail. False = another gateway has begun it, by other limits; this one looks at it again."""
        is_missing, is_first = errors[0]["code"] == MISSING, False

        def fail(batch: Batch) -> bool:
            nonlocal is_first
            is_first = batch.is_running and (not batch.total or is_missing)
            if is_first:
                batch.fail(errors, self._now())
            return is_first

        found = await self._change(fail)
        if found is not None and found.is_running:
            self._log.error("batch_not_run_here", batch=found.id, reason=errors[0]["message"])
            return False
        if is_first:
            self._ended()
        return True

    def _ended(self) -> None:
        batch = self.batch
        self._tools.counters.batches.add((batch.status,))
        self._log.info("batch_ended", batch=batch.id, status=batch.status, lines=batch.total, failed=batch.tally.failed)

    async def _kept(
        self,
        do: Callable[[], Awaitable[Result]],
        waits_for: tuple[type[Exception], ...] = (StorageUnavailable, StorageFull, MemoryFull),
    ) -> Result:
        """Do this as soon as there is room and memory, and the bucket answers. Until then, the batch is paused."""
        is_paused = False
        while True:
            try:
                result = await do()
            except waits_for as error:
                is_paused = True
                self.standing.pause(NO_SPACE if isinstance(error, StorageFull) else str(error))
                await asyncio.sleep(_POLL_SECONDS)
            else:
                if is_paused:
                    self.standing.pause("")
                return result

    async def _noted(self, do: Callable[Given, Awaitable[Result]], *args: Given.args, **named: Given.kwargs) -> Result:
        """Do this as soon as the database has room, and can be reached."""
        while True:
            try:
                return await self._kept(partial(do, *args, **named), (StorageFull,))
            except StorageUnavailable:
                await asyncio.sleep(_POLL_SECONDS)

    async def _change(self, change: Callable[[Batch], bool]) -> Batch | None:
        """Change the batch in the store; None = it has been forgotten."""
        found = await self._noted(self._store.change, self.batch.id, change)
        if found is not None:
            found.add_reports(self.batch.reports if found.is_running else {})
            self.update(found)
        return found

    async def _work(self, source: BinaryIO, enqueued: Callable[[], int]) -> None:
        """Work at the batch until it has ended. Raises InvalidInput, and what goes wrong, with nothing in flight."""
        is_new, now = self.batch.status == "validating", self._now()
        checked = await self._tools.checks.check(self.batch, source, enqueued if is_new else None)
        found = await self._change(lambda batch: batch.begin(checked.model, len(checked.index), now))
        if found is None or not found.is_running:
            return
        answers, errors = (self._contents.new_part(self.batch.id, self._tools.holder, name) for name in NAMES)
        work = BatchWork(
            self.batch,
            source=source,
            checked=checked,
            journal=Journal(answers, errors, self.standing.pause, group=self._contents.group),
            standing=self.standing,
            pace=self._pace,
        )
        try:
            while self.batch.is_running:
                await self._claim_more(work)
                if not self.held:
                    await asyncio.sleep(_POLL_SECONDS)
                    continue
                timeout = None if self._store.is_alone else _POLL_SECONDS  # others may lose claims
                await asyncio.wait([*self.held.values()], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                self._drop_ended()
        finally:
            await asyncio.shield(self._stop(work.journal))

    async def _claim_more(self, work: BatchWork) -> None:
        while len(self.held) < _MOST_CLAIMS:
            claimed = await self._noted(self._store.claim, self.batch.id, self._tools.holder, self.held.keys())
            if claimed is None:
                return
            doing = self._end(claimed, work) if claimed.claim.is_last else self._run(claimed, work)
            self.held[claimed.claim.first] = asyncio.get_running_loop().create_task(doing, name="batch_claim")

    def _drop_ended(self) -> None:
        """Forget claims that have ended. Raises what one of them raised."""
        for first, task in [*self.held.items()]:
            if task.done():
                del self.held[first]
                if not task.cancelled():
                    task.result()

    async def _stop(self, journal: Journal) -> None:
        """Abort what is in flight, and close the journal. Claims that are not extended are lost to other gateways."""
        tasks = [*self.held.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.held.clear()
        await journal.close(most_seconds=_STOP_SECONDS)

    async def _run(self, claimed: ClaimedLines, work: BatchWork) -> None:
        first = claimed.claim.first
        run = self._runs[first] = await self._new_run(claimed, work)
        try:
            self.update(self.batch)
            await run.run()
            await work.journal.flush()
            if not run.is_done and self.batch.status != "cancelling":
                # the window has closed by this gateway's clock, not yet by the database's
                await asyncio.sleep(_POLL_SECONDS)
            report = report_of(run.tally)
            finish = partial(self._store.finish, self.batch.id, first, self._tools.holder)
            await self._noted(finish, report, is_done=run.is_done)
            self.batch.add_reports({first: report})
        finally:
            self._runs.pop(first, None)

    async def _new_run(self, claimed: ClaimedLines, work: BatchWork) -> BatchRun:
        """The run of a claim, which knows the answers that all parts have."""
        first, end, checked = claimed.claim.first, claimed.claim.end, work.checked
        joined = JoinedParts(range(first, end), breather())
        if claimed.is_again:
            await work.journal.flush()
            checked = await self._tools.checks.check(self.batch, work.source, None)  # its order may be used up
            joined = await self._kept(partial(self._answered, range(first, end)))
        lines = checked.part(first, end)
        await self._contents.threads.run(arrange, lines, self._tools)
        return BatchRun(work, lines, joined, tools=self._tools)

    async def _answered(self, wanted: range) -> JoinedParts:
        """What all parts have of the lines of a claim."""
        joined = JoinedParts(wanted, breather())
        for name in NAMES:
            with self._closing(await self._contents.parts(self.batch.id, name)) as parts:
                await self._contents.threads.run(deque, joined.lines(parts, failed=name == "error"), 0)
        self._log.info("batch_taken_over", batch=self.batch.id, answered=joined.tally.lines, lines=len(wanted))
        return joined

    @contextmanager
    def _closing(self, files: Sequence[BinaryIO]) -> Iterator[Sequence[BinaryIO]]:
        """These files, which are closed in a thread at the end of the block: another thread may still read them."""
        try:
            yield files
        finally:
            for each in files:
                self._contents.threads.later(each.close)

    def _now(self) -> int:
        return int(self._tools.unix_seconds())

    async def _end(self, claimed: ClaimedLines, work: BatchWork) -> None:
        """Write the output, and end the batch, if no other gateway does meanwhile."""
        now, is_complete = self._now(), claimed.is_complete
        batch = await self._change(lambda batch: batch.finalize(now, is_complete=is_complete))
        if batch is None or not batch.is_running:
            return
        batch = Batch.restored(batch.stored())  # what is shown stays as it is until the end is kept
        ids = [new_file_id() for _ in NAMES]
        is_unused = True
        try:
            tally, sizes = await self._kept(partial(self._write_results, batch, ids, work))
            is_unused = False  # if this is interrupted now, files that were not kept are deleted later
            is_unused = not await self._keep(batch, tally, dict(zip(ids, sizes, strict=True)))
        except _AnswersMissing:
            self._log.error("batch_answers_missing", batch=batch.id, hint="the lines are run again")
            await self._noted(self._store.reopen, batch.id, self._tools.holder)
        finally:
            if is_unused:
                for file_id in ids:
                    await self._tools.files.drop(file_id)

    async def _write_results(self, batch: Batch, ids: list[str], work: BatchWork) -> tuple[Tally, list[int]]:
        """Write the files of a batch. Returns what is in them, and their sizes in bytes. Raises _AnswersMissing."""
        joined, parts = JoinedParts(range(batch.total), breather()), partial(self._contents.parts, batch.id)
        with self._closing(await parts("output")) as answers, self._closing(await parts("error")) as errors:
            sizes = [await self._write(ids[0], joined.lines(answers, failed=False))]
            failed = chain(joined.lines(errors, failed=True), self._unexecuted(batch, joined, work))
            sizes.append(await self._write(ids[1], failed))
        missing = joined.missing()
        if missing:
            self._tools.counters.lines.add((why_unexecuted(batch)[0],), len(missing))
        return joined.tally + Tally(failed=len(missing)), sizes

    async def _write(self, file_id: str, lines: Iterator[bytes]) -> int:
        """Write one file. Returns its size in bytes; an empty one is not kept."""
        size_bytes = 0

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal size_bytes
            while piece := await self._contents.threads.run(next_piece, lines):
                holding.fit(len(piece))
                size_bytes += len(piece)
                yield piece

        with Holding(self._tools.memory) as holding:
            await self._contents.write(file_id, pieces())
        if not size_bytes:
            await self._contents.delete(file_id)
        return size_bytes

    def _unexecuted(self, batch: Batch, joined: JoinedParts, work: BatchWork) -> Iterator[bytes]:
        """An error for each line that has no answer, in a thread. Raises _AnswersMissing if all should have one."""
        missing = joined.missing()
        if missing and batch.ends_as == "completed":
            raise _AnswersMissing
        _, code, message = why_unexecuted(batch)
        for place in missing:
            [request] = read_lines(work.source, [work.checked.index[place]])
            yield unexecuted_line(LineName(place, self._tools.new_id(), request.custom_id), code, message)

    async def _keep(self, batch: Batch, tally: Tally, sizes: dict[str, int]) -> bool:
        """Make the files visible together with the final state. False = another gateway ends the batch."""
        now = self._now()
        expires_at = now + (batch.output_lifetime_seconds or self._tools.files.lifetime_seconds)
        written = [
            StoredFile(
                file_id,
                key=batch.owner.key,
                tenant=batch.owner.tenant,
                filename=f"{batch.id}_{name}.jsonl",
                purpose=OUTPUT,
                size_bytes=size_bytes,
                created_at=now,
                expires_at=expires_at,
            )
            for name, (file_id, size_bytes) in zip(NAMES, sizes.items(), strict=True)
            if size_bytes
        ]
        output_file_id, error_file_id = (file_id if size_bytes else None for file_id, size_bytes in sizes.items())
        batch.end(tally, output_file_id, error_file_id, now)
        if not await self._noted(self._store.end, batch, self._tools.holder, written):
            return False
        self.batch = batch
        self._tools.files.count(written)
        self._ended()
        with suppress(StorageUnavailable):  # the sweep deletes them later
            await self._contents.delete_parts([batch.id])
        return True


class _AnswersMissing(Exception):
    """Lines have no answer though all were reported as done."""
