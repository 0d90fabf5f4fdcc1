"""All batches that have not ended: each is checked, run, finalized, and taken up again after a restart."""

import asyncio
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

import structlog

from gateway.features.batches.batch import Batch, StoredFile, Tally, result_file
from gateway.features.batches.checks import InputChecks
from gateway.features.batches.files import Files, has_no_room
from gateway.features.batches.folder import DurableFile, Folder
from gateway.features.batches.input import CheckedInput, InputFile, InvalidInput
from gateway.features.batches.journal import Journal, recover
from gateway.features.batches.run import BatchRun, RunParts, arrange, new_pace, pause
from gateway.features.batches.running import BatchRunner
from gateway.features.batches.store import Store

_RETRY_SECONDS = 1.0
_STOP_SECONDS = 5.0  # most time for the last answers, if the disk is full
_NAMES = ("output", "error")


@dataclass(slots=True)
class _Running:
    """A batch that has not ended: its task, and its run once the input is checked."""

    batch: Batch
    task: asyncio.Task[None] | None = None
    run: BatchRun | None = None


class Runner(BatchRunner):
    """The batches of a gateway that shares them with no other."""

    def __init__(self, store: Store, files: Files, folder: Folder, *, parts: RunParts, checks: InputChecks) -> None:
        super().__init__(parts, checks)
        self._store = store
        self._files = files
        self._folder = folder
        self._running: dict[str, _Running] = {}
        self._log = structlog.get_logger("gateway")

    def batches(self) -> list[Batch]:
        return [running.batch for running in self._running.values()]

    def find(self, batch_id: str) -> Batch | None:
        running = self._running.get(batch_id)
        return None if running is None else running.batch

    async def files_in_use(self) -> set[str]:
        """Files that batches read or write."""
        return {name for batch in self.batches() for name in (batch.input_file_id, batch.output_id, batch.error_id)}

    def start(self, batch: Batch) -> None:
        running = self._running[batch.id] = _Running(batch)
        running.task = asyncio.get_running_loop().create_task(self._live(running), name=batch.id)

    async def cancel(self, batch: Batch) -> Batch:
        running = self._running.get(batch.id)
        if running is not None and batch.status in ("validating", "in_progress"):
            batch.cancel(self._now())
            if running.run is not None:
                running.run.stop_feeding()
            await self._save(batch)
        return batch

    async def sweep(self) -> None:
        """Nothing is left over: the files of batches are deleted when they expire."""

    async def stop(self) -> None:
        tasks = [running.task for running in self._running.values() if running.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for running in self._running.values():
            running.task = None  # it keeps what cancelled it, whose traceback has frames with `running`
        self._running.clear()

    def _now(self) -> int:
        return int(self._parts.unix_seconds())

    async def _save(self, batch: Batch, files: tuple[StoredFile, ...] = ()) -> None:
        """Keep the batch's state, as soon as the disk has room for it."""
        while True:
            try:
                await self._store.put_batch(batch, files)
                break
            except Exception as error:
                if not has_no_room(error):
                    raise
                pause(batch, "no space is left on the disk")
                await asyncio.sleep(_RETRY_SECONDS)
        pause(batch, "")

    async def _live(self, running: _Running) -> None:
        """Run a batch to its end. After an unexpected exception it is taken up again, as after a restart."""
        batch = running.batch
        while batch.is_running:
            try:
                await self._attempt(running)
            except Exception as error:
                self._parts.caught("batch", error)
                if has_no_room(error):
                    pause(batch, "no space is left on the disk")
            if batch.is_running:
                await asyncio.sleep(_RETRY_SECONDS)
        self._log.info("batch_ended", batch=batch.id, status=batch.status, lines=batch.total, failed=batch.tally.failed)
        self._running.pop(batch.id, None)

    async def _attempt(self, running: _Running) -> None:
        try:
            with closing(await self._checks.open(running.batch)) as file:
                await self._check_and_run(running, file)
                return
        except InvalidInput as invalid:
            errors = invalid.errors
        running.batch.fail(errors, self._now())
        await self._save(running.batch)  # here, the exception is gone, with what its frames have of the file

    async def _check_and_run(self, running: _Running, file: InputFile) -> None:
        batch, is_new = running.batch, running.batch.status == "validating"
        checked = await self._checks.check(batch, file, partial(self.enqueued, batch) if is_new else None)
        if batch.status == "validating":
            batch.begin(checked.model, len(checked.index), self._now())
            await self._save(batch)
        elif not batch.total:  # cancelled while it was checked
            batch.begin(checked.model, len(checked.index), self._now())
        await self._folder.threads.run(arrange, checked, self._parts)
        run = running.run = await self._open(batch, checked, file)
        checked.places.clear()
        if batch.status != "in_progress":
            run.stop_feeding()
        try:
            await run.run()
            await self._finalize(batch, run)
        except BaseException:
            await asyncio.shield(run.close(most_seconds=_STOP_SECONDS))
            raise
        finally:
            running.run = None

    async def _open(self, batch: Batch, checked: CheckedInput, file: InputFile) -> BatchRun:
        """The run of a batch, which knows the answers that its journal has."""
        tally = Tally()
        answered: set[int] = set()
        for failed, file_id in ((False, batch.output_id), (True, batch.error_id)):
            await self._folder.threads.to_its_end(self._recover, file_id, checked, failed, tally, answered)
        answers, errors = await self._folder.threads.to_its_end(self._open_journal, batch, undo=_close_all)
        journal = Journal(answers, errors, partial(pause, batch), group=self._folder.group)
        pace = new_pace(batch, len(checked.index) - len(answered), self._parts)
        run = BatchRun(batch, checked, journal=journal, source=file, parts=self._parts, pace=pace)
        batch.recount(tally)
        for place in answered:
            run.answered(place)
        if answered:
            self._log.info("batch_resumed", batch=batch.id, answered=len(answered), lines=batch.total)
        return run

    def _open_journal(self, batch: Batch) -> tuple[DurableFile, DurableFile]:
        """The answers and the errors, in a thread."""
        with ExitStack() as stack:
            answers = stack.enter_context(closing(self._folder.open_answers(batch.output_id)))
            errors = self._folder.open_answers(batch.error_id)
            stack.pop_all()
        return answers, errors

    def _recover(self, file_id: str, checked: CheckedInput, failed: bool, tally: Tally, answered: set[int]) -> None:
        for custom_id, usage in recover(self._folder.path(file_id), self._parts.breather()):
            place = checked.places.get(hash(custom_id))
            if place is not None and place not in answered:
                tally.add(usage, failed=failed)
                answered.add(place)

    async def _finalize(self, batch: Batch, run: BatchRun) -> None:
        """Write what is missing, and make the files visible together with the final state."""
        if batch.status == "in_progress":
            batch.finalize("completed" if run.is_done else "expired", self._now())
            await self._save(batch)
        await run.write_unexecuted()
        await run.close()
        shown: list[StoredFile | None] = []
        for name, file_id in zip(_NAMES, (batch.output_id, batch.error_id), strict=True):
            size_bytes, now, lifetime = await self._folder.kept_bytes(file_id), self._now(), self._lifetime_seconds
            shown.append(
                result_file(batch, name, file_id=file_id, size_bytes=size_bytes, now=now, lifetime_seconds=lifetime)
                if size_bytes
                else None
            )
        output_file_id, error_file_id = (None if each is None else each.id for each in shown)
        batch.end(output_file_id, error_file_id, self._now())
        written = tuple(each for each in shown if each is not None)
        await self._save(batch, written)
        for each in written:
            self._files.count(each.id, each.owner.key, each.size_bytes)
        self._parts.metrics.batches.add((batch.status,))


def _close_all(opened: tuple[DurableFile, DurableFile]) -> None:
    for file in opened:
        file.close()
