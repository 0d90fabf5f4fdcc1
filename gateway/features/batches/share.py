"""One batch that several gateways share, as this one works at it: it claims lines, runs them, and may end the batch."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import chain
from typing import BinaryIO, NamedTuple, TypeVar

import structlog

from gateway.core.errors import MemoryFull
from gateway.core.resources import Holding
from gateway.features.batches.batch import Batch, StoredFile, Tally, result_file
from gateway.features.batches.checks import InputChecks
from gateway.features.batches.claims import Claim
from gateway.features.batches.errors import StorageUnavailable
from gateway.features.batches.files import Files, new_file_id
from gateway.features.batches.input import CheckedInput, InputFile
from gateway.features.batches.journal import Journal, unexecuted_line, why_unexecuted
from gateway.features.batches.parts import NAMES, JoinedParts, next_piece
from gateway.features.batches.run import BatchRun, RunParts, arrange, new_pace, pause
from gateway.features.batches.s3 import S3Bucket
from gateway.features.batches.store import ClaimedLines, SharedStore

Result = TypeVar("Result")
_POLL_SECONDS = 1.0
_STOP_SECONDS = 5.0  # most time for the last answers, if the bucket cannot be reached
_MOST_CLAIMS = 2  # at once: while the last lines of one end, those of the next run


@dataclass(frozen=True, slots=True)
class ShareSetting:
    """What all shares of one gateway have. `holder`: its id."""

    holder: str
    store: SharedStore
    _: KW_ONLY
    files: Files
    bucket: S3Bucket
    parts: RunParts
    checks: InputChecks
    lifetime_seconds: Callable[[], int]


async def patiently(do: Callable[[], Awaitable[Result]]) -> Result:
    """Do this as soon as the database can be reached."""
    while True:
        try:
            return await do()
        except StorageUnavailable:
            await asyncio.sleep(_POLL_SECONDS)


class SharedBatch:
    """What this gateway does of a batch. `batch`: as the store had it last; `own`: counts what was done here."""

    def __init__(self, batch: Batch, setting: ShareSetting) -> None:
        self.batch = batch
        self.own = Batch.restored(batch.stored())
        self.own.recount(Tally())
        self._setting = setting
        self._store = setting.store
        self._claims: dict[int, asyncio.Task[None]] = {}  # by their first line
        self._runs: dict[int, BatchRun] = {}
        self._pace = new_pace(batch, 0, setting.parts)  # as if this gateway had to run all the lines that are left
        self._log = structlog.get_logger("gateway")

    @property
    def held(self) -> dict[int, asyncio.Task[None]]:
        """The claims by their first lines, and what runs them: cancelled when the claim is lost."""
        return self._claims

    def follow(self, batch: Batch) -> None:
        """Take over the batch as the store has it now."""
        self.batch = batch
        self._pace.remain(batch.total - batch.tally.lines)
        if batch.status == "cancelling":
            for run in self._runs.values():
                run.stop_feeding()

    async def work(self, enqueued: Callable[[], int]) -> None:
        """Work at the batch until it has ended. Raises InvalidInput, and what goes wrong, with nothing in flight."""
        with closing(await self._kept(partial(self._setting.checks.open, self.batch))) as file:
            await self._work(file, enqueued)

    async def _kept(self, do: Callable[[], Awaitable[Result]]) -> Result:
        """Do this as soon as the bucket can be reached, and there is memory. Until then, the batch is paused."""
        is_paused = False
        while True:
            try:
                result = await do()
            except (StorageUnavailable, MemoryFull) as error:
                is_paused = True
                pause(self.own, error.message)
                await asyncio.sleep(_POLL_SECONDS)
            else:
                if is_paused:
                    pause(self.own, "")
                return result

    async def _work(self, file: InputFile, enqueued: Callable[[], int]) -> None:
        is_new = self.batch.status == "validating"
        checked = await self._setting.checks.check(self.batch, file, enqueued if is_new else None)
        begin = partial(_begin, checked.model, len(checked.index), self._now())
        found = await patiently(partial(self._store.change, self.batch.id, begin))
        if found is None or not found.is_running:
            return
        checked.places.clear()
        self._pace.remain(found.total - found.tally.lines)
        work = _Work(file, checked, self._new_journal())
        try:
            while self.batch.is_running:
                await self._claim_more(work)
                if not self._claims:
                    await asyncio.sleep(_POLL_SECONDS)
                    continue
                tasks = [*self._claims.values()]
                await asyncio.wait(tasks, timeout=_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                self._drop_ended()
        finally:
            await asyncio.shield(self._stop(work.journal))

    def _new_journal(self) -> Journal:
        """The journal of this gateway's part."""
        bucket, holder = self._setting.bucket, self._setting.holder
        answers, errors = (bucket.new_part(self.batch.id, holder, name) for name in NAMES)
        return Journal(answers, errors, partial(pause, self.own), group=bucket.group)

    async def _claim_more(self, work: "_Work") -> None:
        while len(self._claims) < _MOST_CLAIMS:
            claimed = await patiently(partial(self._store.claim, self.batch.id, self._setting.holder))
            if claimed is None:
                return
            doing = self._end(claimed, work.file) if claimed.claim.is_last else self._run(claimed, work)
            self._claims[claimed.claim.first] = asyncio.get_running_loop().create_task(doing, name="batch_claim")

    def _drop_ended(self) -> None:
        """Forget claims that have ended. Raises what one of them raised."""
        for first, task in [*self._claims.items()]:
            if task.done():
                del self._claims[first]
                if not task.cancelled():
                    task.result()

    async def _stop(self, journal: Journal) -> None:
        """Abort what is in flight, and close the journal. Claims that are not extended are lost to other gateways."""
        tasks = [*self._claims.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._claims.clear()
        await journal.close(most_seconds=_STOP_SECONDS)

    async def _run(self, claimed: ClaimedLines, work: "_Work") -> None:
        claim, parts, journal = claimed.claim, self._setting.parts, work.journal
        try:
            lines = work.checked.part(claim.first, claim.end)
            await self._setting.bucket.threads.run(arrange, lines, parts)
            run = BatchRun(self.own, lines, journal=journal, source=work.file, parts=parts, pace=self._pace)
            if claimed.is_again:
                await journal.flush()
                for place in await self._answered(claim, work.file):
                    run.answered(place)
            self._runs[claim.first] = run
            self.follow(self.batch)
            await run.run()
        finally:
            self._runs.pop(claim.first, None)
        await journal.flush()
        if not run.is_done and self.batch.status != "cancelling":
            await asyncio.sleep(
                _POLL_SECONDS
            )  # the window has closed by this gateway's clock, not yet by the database's
        finish = partial(self._store.finish, self.batch.id, claim.first, self._setting.holder, is_done=run.is_done)
        await patiently(finish)

    async def _answered(self, claim: Claim, file: InputFile) -> list[int]:
        """The lines of a claim that have an answer in any part; places are counted from the claim's first line."""
        checked = await self._setting.checks.check(self.batch, file, None)
        joined = JoinedParts(checked, self._setting.parts.breather())
        with ExitStack() as stack:
            for name in NAMES:
                lines = joined.lines(await self._parts(name, stack), failed=name == "error")
                await self._setting.bucket.threads.run(deque, lines, 0)
        found = joined.answered(claim.first, claim.end)
        self._log.info("batch_taken_over", batch=self.batch.id, answered=len(found), lines=claim.end - claim.first)
        return found

    async def _parts(self, name: str, stack: ExitStack) -> BinaryIO:
        """The parts of all gateways, closed with the stack."""
        parts = await self._kept(partial(self._setting.bucket.parts, self.batch.id, name))
        stack.callback(self._setting.bucket.threads.later, parts.close)
        return parts

    def _now(self) -> int:
        return int(self._setting.parts.unix_seconds())

    async def _end(self, claimed: ClaimedLines, file: InputFile) -> None:
        """Write the output, and end the batch, if no other gateway does meanwhile."""
        finalize = partial(_finalize, self._now(), is_complete=claimed.is_complete)
        batch = await patiently(partial(self._store.change, self.batch.id, finalize))
        if batch is None or not batch.is_running:
            return
        checked = await self._setting.checks.check(batch, file, None)
        ids = [new_file_id() for _ in NAMES]
        is_unused = True
        try:
            sizes = await self._write_results(batch, checked, file, ids)
            is_unused = False  # if this is interrupted now, the sweep deletes files that were not kept
            is_unused = not await self._keep(batch, ids, sizes)
        except _AnswersMissing:
            self._log.error("batch_answers_missing", batch=batch.id, hint="the lines are run again")
            await patiently(partial(self._store.reopen, batch.id, self._setting.holder))
        finally:
            if is_unused:
                for file_id in ids:
                    await self._setting.files.drop(file_id)

    async def _write_results(
        self, batch: Batch, checked: CheckedInput, file: InputFile, ids: Sequence[str]
    ) -> list[int]:
        """Write the files of a batch. Returns their sizes in bytes. Raises _AnswersMissing."""
        with ExitStack() as stack:
            answers, errors = [await self._parts(name, stack) for name in NAMES]

            async def write() -> list[int]:
                joined = JoinedParts(checked, self._setting.parts.breather())
                sizes = [await self._write(ids[0], joined.lines(answers, failed=False))]
                unexecuted = self._unexecuted(batch, joined, checked, file)
                sizes.append(await self._write(ids[1], chain(joined.lines(errors, failed=True), unexecuted)))
                batch.recount(joined.tally)
                self._setting.parts.metrics.lines.add((why_unexecuted(batch)[0],), len(joined.missing()))
                return sizes

            return await self._kept(write)

    async def _write(self, file_id: str, lines: Iterator[bytes]) -> int:
        """Write one file. Returns its size in bytes; an empty one is not kept."""
        size_bytes, bucket = 0, self._setting.bucket

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal size_bytes
            while piece := await bucket.threads.run(next_piece, lines):
                holding.fit(len(piece))
                size_bytes += len(piece)
                yield piece

        with Holding(self._setting.parts.memory) as holding:
            await bucket.write(file_id, pieces())
        if not size_bytes:
            await bucket.delete(file_id)
        return size_bytes

    def _unexecuted(self, batch: Batch, joined: JoinedParts, checked: CheckedInput, file: InputFile) -> Iterator[bytes]:
        """An error for each line that has no answer, in a thread. Raises _AnswersMissing if all should have one."""
        missing = joined.missing()
        if missing and batch.ends_as == "completed":
            raise _AnswersMissing
        _, code, message = why_unexecuted(batch)
        for place in missing:
            [request] = file.read([checked.index[place]])
            joined.tally.failed += 1
            yield unexecuted_line(self._setting.parts.new_id(), request.custom_id, code, message)

    async def _keep(self, batch: Batch, ids: Sequence[str], sizes: Sequence[int]) -> bool:
        """Make the files visible together with the final state. False = another gateway ends the batch."""
        now, lifetime = self._now(), self._setting.lifetime_seconds()
        shown: list[StoredFile | None] = [
            result_file(batch, name, file_id=file_id, size_bytes=size_bytes, now=now, lifetime_seconds=lifetime)
            if size_bytes
            else None
            for name, file_id, size_bytes in zip(NAMES, ids, sizes, strict=True)
        ]
        output_file_id, error_file_id = (None if each is None else each.id for each in shown)
        batch.end(output_file_id, error_file_id, now)
        written = tuple(each for each in shown if each is not None)
        if not await patiently(partial(self._store.end, batch, self._setting.holder, written)):
            return False
        self.batch = batch
        for each in written:
            self._setting.files.count(each.id, each.owner.key, each.size_bytes)
        self._setting.parts.metrics.batches.add((batch.status,))
        self._log.info("batch_ended", batch=batch.id, status=batch.status, lines=batch.total, failed=batch.tally.failed)
        with suppress(StorageUnavailable):  # the sweep deletes them later
            await self._setting.bucket.delete_parts([batch.id])
        return True


class _AnswersMissing(Exception):
    """Lines have no answer though all were reported as done."""


class _Work(NamedTuple):
    """What the claims of this gateway have in common."""

    file: InputFile
    checked: CheckedInput
    journal: Journal


def _begin(model: str, total: int, now: int, batch: Batch) -> bool:
    """The input file was found valid, by the first gateway."""
    if batch.total or not batch.is_running:
        return False
    batch.begin(model, total, now)
    return True


def _finalize(now: int, batch: Batch, *, is_complete: bool) -> bool:
    if batch.status == "in_progress" or (batch.ends_as == "completed" and not is_complete):
        batch.finalize("completed" if is_complete else "expired", now)
        return True
    return False
