"""One batch, as this gateway works at it: it claims lines, runs them, and may end the batch.

A gateway alone claims all lines at once. The same happens after a restart as after the death of another gateway: the
parts tell which lines of a lost claim have an answer, and the others are run.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import chain
from typing import Any, BinaryIO, NamedTuple, TypeVar

import structlog

from gateway.core.errors import MemoryFull
from gateway.core.resources import Holding
from gateway.features.batches.batch import Batch, StoredFile, Tally, report_of, result_file
from gateway.features.batches.checks import MISSING, InputChecks
from gateway.features.batches.claims import Claim
from gateway.features.batches.contents import Contents
from gateway.features.batches.errors import StorageFull, StorageUnavailable
from gateway.features.batches.files import Files, new_file_id
from gateway.features.batches.input import CheckedInput, InputFile
from gateway.features.batches.journal import NO_SPACE, Journal, unexecuted_line, why_unexecuted
from gateway.features.batches.parts import NAMES, JoinedParts, next_piece
from gateway.features.batches.run import BatchRun, RunParts, arrange, new_pace, pause
from gateway.features.batches.store import ClaimedLines, Store

Result = TypeVar("Result")
_POLL_SECONDS = 1.0
_STOP_SECONDS = 5.0  # most time for the last answers, if they cannot be written
_MOST_CLAIMS = 2  # at once: while the last lines of one end, those of the next run


@dataclass(frozen=True, slots=True)
class ShareSetting:
    """What all shares of one gateway have. `holder`: its id."""

    holder: str
    store: Store
    _: KW_ONLY
    files: Files
    contents: Contents
    parts: RunParts
    checks: InputChecks
    lifetime_seconds: Callable[[], int]


class BatchShare:
    """What this gateway does of a batch. `batch`: as the store had it last; `own`: with its pause and class here."""

    def __init__(self, batch: Batch, setting: ShareSetting) -> None:
        self.batch = batch
        self.own = Batch.restored(batch.stored())
        self._setting = setting
        self._store = setting.store
        self._contents = setting.contents
        self._claims: dict[int, asyncio.Task[None]] = {}  # by their first line
        self._runs: dict[int, BatchRun] = {}
        self._pace = new_pace(batch, 0, setting.parts)  # as if this gateway had to run all the lines that are left
        self._log = structlog.get_logger("gateway")

    @property
    def held(self) -> dict[int, asyncio.Task[None]]:
        """The claims by their first lines, and what runs them: cancelled when the claim is lost."""
        return self._claims

    def reports(self) -> dict[int, str]:
        """What was done so far of the claims that run."""
        tallies = {first: run.tally for first, run in self._runs.items()}
        if self.batch.total in self._claims:  # the end
            tallies[self.batch.total] = Tally()
        return {first: report_of(tally, self.own.paused) for first, tally in tallies.items()}

    @property
    def paused(self) -> str:
        """Why the batch does not go on at the moment, here or elsewhere; empty = it does."""
        return self.own.paused or self.batch.paused

    def shown(self, batch: Batch) -> Batch:
        """The batch of the store, as it is at this moment here."""
        if batch.is_running:
            batch.add_reports(self.reports())
            batch.pause(self.own.paused or batch.paused)
            batch.promote(self.own.promoted)
        return batch

    def update(self, batch: Batch) -> None:
        """Take over the batch as the store has it now."""
        self.batch = self.shown(batch)
        self._pace.remain(batch.total - batch.tally.lines)
        if batch.status == "cancelling":
            for run in self._runs.values():
                run.stop_feeding()

    async def work(self, enqueued: Callable[[], int]) -> None:
        """Work at the batch until it has ended. Raises InvalidInput, and what goes wrong, with nothing in flight."""
        with closing(await self._kept(partial(self._setting.checks.open, self.batch))) as file:
            await self._work(file, enqueued)

    async def refuse(self, errors: list[dict[str, Any]]) -> bool:
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
        self._setting.parts.metrics.batches.add((batch.status,))
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
                pause(self.own, NO_SPACE if isinstance(error, StorageFull) else str(error))
                await asyncio.sleep(_POLL_SECONDS)
            else:
                if is_paused:
                    pause(self.own, "")
                return result

    async def _noted(self, do: Callable[[], Awaitable[Result]]) -> Result:
        """Do this as soon as the database has room, and can be reached."""
        while True:
            try:
                return await self._kept(do, (StorageFull,))
            except StorageUnavailable:
                await asyncio.sleep(_POLL_SECONDS)

    async def _change(self, change: Callable[[Batch], bool]) -> Batch | None:
        """Change the batch in the store; None = it has been forgotten."""
        found = await self._noted(partial(self._store.change, self.batch.id, change))
        if found is not None:
            found.add_reports(self.batch.reports if found.is_running else {})
            self.update(found)
        return found

    async def _work(self, file: InputFile, enqueued: Callable[[], int]) -> None:
        is_new = self.batch.status == "validating"
        checked = await self._setting.checks.check(self.batch, file, enqueued if is_new else None)
        found = await self._change(partial(_begin, checked.model, len(checked.index), self._now()))
        if found is None or not found.is_running:
            return
        checked.places.clear()
        work = _Work(file, checked, self._new_journal())
        try:
            while self.batch.is_running:
                await self._claim_more(work)
                if not self._claims:
                    await asyncio.sleep(_POLL_SECONDS)
                    continue
                tasks = [*self._claims.values()]
                timeout = None if self._store.is_alone else _POLL_SECONDS  # others may lose claims
                await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                self._drop_ended()
        finally:
            await asyncio.shield(self._stop(work.journal))

    def _new_journal(self) -> Journal:
        """The journal of this gateway's part."""
        answers, errors = (self._contents.new_part(self.batch.id, self._setting.holder, name) for name in NAMES)
        return Journal(answers, errors, partial(pause, self.own), group=self._contents.group)

    async def _claim_more(self, work: "_Work") -> None:
        while len(self._claims) < _MOST_CLAIMS:
            claim = partial(self._store.claim, self.batch.id, self._setting.holder, self._claims.keys())
            if (claimed := await self._noted(claim)) is None:
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
            finish = partial(self._store.finish, self.batch.id, first, self._setting.holder, report)
            await self._noted(partial(finish, is_done=run.is_done))
            self.batch.add_reports({first: report})
        finally:
            self._runs.pop(first, None)

    async def _new_run(self, claimed: ClaimedLines, work: "_Work") -> BatchRun:
        """The run of a claim, which knows the answers that all parts have."""
        claim, parts, checked, joined = claimed.claim, self._setting.parts, work.checked, None
        if claimed.is_again:
            await work.journal.flush()
            checked = await self._setting.checks.check(self.batch, work.file, None)
            joined = await self._joined(claim, checked)
        lines = checked.part(claim.first, claim.end)
        await self._contents.threads.run(arrange, lines, parts)
        run = BatchRun(self.own, lines, journal=work.journal, source=work.file, parts=parts, pace=self._pace)
        if joined is not None:
            run.resume(joined.answered(), joined.tally)
        return run

    async def _joined(self, claim: Claim, checked: CheckedInput) -> JoinedParts:
        """What all parts have of the lines of a claim."""
        joined = JoinedParts(checked.places, range(claim.first, claim.end), self._setting.parts.breather())
        with ExitStack() as stack:
            for name in NAMES:
                lines = joined.lines(await self._parts(name, stack), failed=name == "error")
                await self._contents.threads.run(deque, lines, 0)
        checked.places.clear()
        answered, lines_in_all = joined.tally.lines, claim.end - claim.first
        self._log.info("batch_taken_over", batch=self.batch.id, answered=answered, lines=lines_in_all)
        return joined

    async def _parts(self, name: str, stack: ExitStack) -> Sequence[BinaryIO]:
        """The parts of all gateways, closed with the stack."""
        parts = await self._kept(partial(self._contents.parts, self.batch.id, name))
        for part in parts:
            stack.callback(self._contents.threads.later, part.close)
        return parts

    def _now(self) -> int:
        return int(self._setting.parts.unix_seconds())

    async def _end(self, claimed: ClaimedLines, file: InputFile) -> None:
        """Write the output, and end the batch, if no other gateway does meanwhile."""
        batch = await self._change(partial(_finalize, self._now(), is_complete=claimed.is_complete))
        if batch is None or not batch.is_running:
            return
        batch = Batch.restored(batch.stored())  # what is shown stays as it is until the end is kept
        checked = await self._setting.checks.check(batch, file, None)
        ids = [new_file_id() for _ in NAMES]
        is_unused = True
        try:
            sizes = await self._write_results(batch, checked, file, ids)
            is_unused = False  # if this is interrupted now, files that were not kept are deleted later
            is_unused = not await self._keep(batch, ids, sizes)
        except _AnswersMissing:
            self._log.error("batch_answers_missing", batch=batch.id, hint="the lines are run again")
            await self._noted(partial(self._store.reopen, batch.id, self._setting.holder))
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
                breathe = self._setting.parts.breather()
                joined = JoinedParts(checked.places, range(len(checked.index)), breathe)
                sizes = [await self._write(ids[0], joined.lines(answers, failed=False))]
                unexecuted = self._unexecuted(batch, joined, checked, file)
                sizes.append(await self._write(ids[1], chain(joined.lines(errors, failed=True), unexecuted)))
                batch.recount(joined.tally)
                if missing := joined.missing():
                    self._setting.parts.metrics.lines.add((why_unexecuted(batch)[0],), len(missing))
                return sizes

            return await self._kept(write)

    async def _write(self, file_id: str, lines: Iterator[bytes]) -> int:
        """Write one file. Returns its size in bytes; an empty one is not kept."""
        size_bytes = 0

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal size_bytes
            while piece := await self._contents.threads.run(next_piece, lines):
                holding.fit(len(piece))
                size_bytes += len(piece)
                yield piece

        with Holding(self._setting.parts.memory) as holding:
            await self._contents.write(file_id, pieces())
        if not size_bytes:
            await self._contents.delete(file_id)
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
        written = [each for each in shown if each is not None]
        if not await self._noted(partial(self._store.end, batch, self._setting.holder, written)):
            return False
        self.batch = batch
        for each in written:
            self._setting.files.count(each.id, each.owner.key, each.size_bytes)
        self._ended()
        with suppress(StorageUnavailable):  # the sweep deletes them later
            await self._contents.delete_parts([batch.id])
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
