"""One batch that several gateways share, as this one works at it: it claims lines, runs them, and may end the batch."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from gateway.batches.batch import Batch, StoredFile, Tally, result_file
from gateway.batches.checks import InputChecks
from gateway.batches.claims import Claim
from gateway.batches.files import Files, new_file_id, sync_folder, to_its_end
from gateway.batches.input import CheckedInput, InputFile
from gateway.batches.journal import AnswerFile, Journal, unexecuted_line, why_unexecuted
from gateway.batches.parts import NAMES, AnswerParts, finished, new_result
from gateway.batches.run import BatchRun, RunParts, arrange, new_pace, pause
from gateway.batches.store import ClaimedLines, SharedStore
from gateway.errors import StorageUnavailable

Result = TypeVar("Result")
_POLL_SECONDS = 1.0
_STOP_SECONDS = 5.0  # most time for the last answers, if the disk is full
_MOST_CLAIMS = 2  # at once: while the last lines of one end, those of the next run


@dataclass(frozen=True, slots=True)
class ShareSetting:
    """What all shares of one gateway have. `holder`: its id."""

    holder: str
    store: SharedStore
    files: Files
    parts_folder: Path
    parts: RunParts
    checks: InputChecks
    open_part: Callable[[Path], AnswerFile]
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
        self._folder = AnswerParts(setting.parts_folder / batch.id, setting.parts.breather())
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
        is_new = self.batch.status == "validating"
        checked = await self._setting.checks.check(self.batch, enqueued if is_new else None)
        begin = partial(_begin, checked.model, len(checked.index), self._now())
        found = await patiently(partial(self._store.change, self.batch.id, begin))
        if found is None or not found.is_running:
            return
        checked.places.clear()
        self._pace.remain(found.total - found.tally.lines)
        async with _LazyJournal(self, self._setting, self._folder) as journal:
            while self.batch.is_running:
                await self._claim_more(checked, journal)
                if not self._claims:
                    await asyncio.sleep(_POLL_SECONDS)
                    continue
                tasks = [*self._claims.values()]
                await asyncio.wait(tasks, timeout=_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                self._drop_ended()

    async def _claim_more(self, checked: CheckedInput, own: "_LazyJournal") -> None:
        while len(self._claims) < _MOST_CLAIMS:
            claimed = await patiently(partial(self._store.claim, self.batch.id, self._setting.holder))
            if claimed is None:
                return
            doing = self._end(claimed) if claimed.claim.is_last else self._run(claimed, checked, own)
            self._claims[claimed.claim.first] = asyncio.get_running_loop().create_task(doing, name="batch_claim")

    def _drop_ended(self) -> None:
        """Forget claims that have ended. Raises what one of them raised."""
        for first, task in [*self._claims.items()]:
            if task.done():
                del self._claims[first]
                if not task.cancelled() and (error := task.exception()) is not None:
                    raise error

    async def stop_claims(self) -> None:
        """Abort what is in flight. Claims that are not extended any more are lost to other gateways."""
        tasks = [*self._claims.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._claims.clear()

    async def _run(self, claimed: ClaimedLines, checked: CheckedInput, own: "_LazyJournal") -> None:
        claim, parts = claimed.claim, self._setting.parts
        journal = await own.open()
        path = self._setting.files.path(self.batch.input_file_id)
        source = await to_its_end(InputFile, path, undo=InputFile.close)
        try:
            lines = checked.part(claim.first, claim.end)
            await to_its_end(arrange, lines, parts)
            run = BatchRun(self.own, lines, journal, source, parts, self._pace)
            if claimed.is_again:
                await journal.flush()
                for place in await self._answered(claim):
                    run.answered(place)
            self._runs[claim.first] = run
            self.follow(self.batch)
            await run.run()
        finally:
            self._runs.pop(claim.first, None)
            source.close()
        await journal.flush()
        if not run.is_done and self.batch.status != "cancelling":
            await asyncio.sleep(
                _POLL_SECONDS
            )  # the window has closed by this gateway's clock, not yet by the database's
        finish = partial(self._store.finish, self.batch.id, claim.first, self._setting.holder, is_done=run.is_done)
        await patiently(finish)

    async def _answered(self, claim: Claim) -> list[int]:
        """The lines of a claim that have an answer in any part; places are counted from the claim's first line."""
        checked = await self._setting.checks.check(self.batch, None)
        holders = await patiently(partial(self._store.holders, self.batch.id))
        places = await to_its_end(self._folder.answered, holders, checked)
        found = [place - claim.first for place in places if claim.first <= place < claim.end]
        self._log.info("batch_taken_over", batch=self.batch.id, answered=len(found), lines=claim.end - claim.first)
        return found

    def _now(self) -> int:
        return int(self._setting.parts.unix_seconds())

    async def _end(self, claimed: ClaimedLines) -> None:
        """Write the output, and end the batch, if no other gateway does meanwhile."""
        finalize = partial(_finalize, self._now(), is_complete=claimed.is_complete)
        batch = await patiently(partial(self._store.change, self.batch.id, finalize))
        if batch is None or not batch.is_running:
            return
        checked = await self._setting.checks.check(batch, None)
        holders = await patiently(partial(self._store.holders, batch.id))
        ids = [new_file_id() for _ in NAMES]
        is_unused = True
        try:
            written = await to_its_end(self._write_results, batch, holders, checked, ids)
            if written is None:
                self._log.error("batch_answers_missing", batch=batch.id, hint="the lines are run again")
                await patiently(partial(self._store.reopen, batch.id, self._setting.holder))
                return
            is_unused = False  # if this is interrupted now, the sweep deletes files that were not kept
            is_unused = not await self._keep(batch, ids, written)
        finally:
            if is_unused:
                await to_its_end(self._delete, ids)

    def _write_results(
        self, batch: Batch, holders: Sequence[str], checked: CheckedInput, ids: Sequence[str]
    ) -> list[int] | None:
        """Write the files of a batch, in a thread. Returns their sizes in bytes; None = answers are missing."""
        files = self._setting.files
        with ExitStack() as stack:
            targets = [stack.enter_context(new_result(files.path(each))) for each in ids]
            tally, missing = self._folder.put_together(holders, checked, targets)
            if missing and batch.ends_as == "completed":
                return None
            state, code, message = why_unexecuted(batch)
            source = InputFile(files.path(batch.input_file_id))
            stack.callback(source.close)
            for place in missing:
                [request] = source.read([checked.index[place]])
                targets[1].write(unexecuted_line(self._setting.parts.new_id(), request.custom_id, code, message))
                self._folder.breathe()
            tally.failed += len(missing)
            self._setting.parts.metrics.lines.add((state,), len(missing))
            batch.recount(tally)
            sizes = [finished(target) for target in targets]
        for file_id, size_bytes in zip(ids, sizes, strict=True):
            if not size_bytes:
                files.path(file_id).unlink()
        sync_folder(files.path(ids[0]).parent)
        return sizes

    async def _keep(self, batch: Batch, ids: Sequence[str], sizes: Sequence[int]) -> bool:
        """Make the files visible together with the final state. False = another gateway ends the batch."""
        now, lifetime = self._now(), self._setting.lifetime_seconds()
        shown: list[StoredFile | None] = [
            result_file(batch, name, file_id, size_bytes, now, lifetime) if size_bytes else None
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
        await to_its_end(self._folder.delete)
        return True

    def _delete(self, ids: Sequence[str]) -> None:
        for file_id in ids:
            with suppress(OSError):
                self._setting.files.path(file_id).unlink(missing_ok=True)


class _LazyJournal:
    """The journal of this gateway's part, opened for the first lines. What runs is stopped before it is closed."""

    def __init__(self, share: SharedBatch, setting: ShareSetting, folder: AnswerParts) -> None:
        self._share = share
        self._setting = setting
        self._folder = folder
        self._opening = asyncio.Lock()
        self._opened: Journal | None = None

    async def __aenter__(self) -> "_LazyJournal":
        return self

    async def open(self) -> Journal:
        async with self._opening:
            if self._opened is None:
                await to_its_end(self._open)
            assert self._opened is not None
            return self._opened

    def _open(self) -> None:
        folder, holder = self._folder.folder, self._setting.holder
        folder.mkdir(mode=0o700, exist_ok=True)
        with ExitStack() as stack:
            answers = self._setting.open_part(self._folder.path(holder, NAMES[0]))
            stack.callback(answers.close)
            errors = self._setting.open_part(self._folder.path(holder, NAMES[1]))
            stack.callback(errors.close)
            sync_folder(folder)
            sync_folder(folder.parent)
            stack.pop_all()
        self._opened = Journal(answers, errors, partial(pause, self._share.own))

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self._close())

    async def _close(self) -> None:
        await self._share.stop_claims()
        if self._opened is not None:
            await self._opened.close(most_seconds=_STOP_SECONDS)


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
