"""All batches that have not ended: each is checked, run, finalized, and taken up again after a restart."""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import structlog

from gateway.batches.batch import OUTPUT, Batch, StoredFile, Tally, batch_error
from gateway.batches.files import Files, has_no_room
from gateway.batches.input import Breathe, CheckedInput, InputFile, InputLimits, InvalidInput, check_input
from gateway.batches.journal import Journal, recover
from gateway.batches.run import BatchRun, RunParts
from gateway.batches.store import Store
from gateway.config import Config

Result = TypeVar("Result")
_RETRY_SECONDS = 1.0
_STOP_SECONDS = 5.0  # most time for the last answers, if the disk is full
_NAMES = ("output", "error")


@dataclass(slots=True)
class _Running:
    """A batch that has not ended: its task, and its run once the input is checked."""

    batch: Batch
    task: asyncio.Task[None] | None = None
    run: BatchRun | None = None


class Runner:
    """Owner of the batches that have not ended. The others are in the store only."""

    def __init__(self, store: Store, files: Files, parts: RunParts, knows_model: Callable[[str], bool]) -> None:
        self._store = store
        self._files = files
        self._parts = parts
        self._knows_model = knows_model
        self._running: dict[str, _Running] = {}
        self._checking = asyncio.Lock()  # one file at a time
        self._log = structlog.get_logger("gateway")

    def follow(self, config: Config) -> None:
        """Take over limits, for files that are checked from now on, and the bound of lines in flight."""
        batches, server = config.batches, config.server
        self._limits = InputLimits.of(batches, server)
        self._most_enqueued = batches.max_enqueued_lines_per_key
        self._lifetime_seconds = batches.lifetime_seconds
        self._parts.slots.follow(batches.lines_in_flight)

    def states(self) -> dict[str, int]:
        """How many batches are in each state; one that is paused is in no other."""
        counts: dict[str, int] = {}
        for running in self._running.values():
            state = "paused" if running.batch.paused else running.batch.status
            counts[state] = counts.get(state, 0) + 1
        return counts

    def promoted(self) -> dict[str, int]:
        """How many batches use more than idle capacity, by the class of their lines."""
        return Counter(running.batch.promoted for running in self._running.values() if running.batch.promoted)

    def find(self, batch_id: str) -> Batch | None:
        """The batch as it is now, if it has not ended."""
        running = self._running.get(batch_id)
        return None if running is None else running.batch

    def count(self, key: str) -> int:
        """How many batches of this key have not ended."""
        return sum(running.batch.owner.key == key for running in self._running.values())

    def files_in_use(self) -> set[str]:
        """Files that batches read or write."""
        batches = [running.batch for running in self._running.values()]
        return {name for batch in batches for name in (batch.input_file_id, batch.output_id, batch.error_id)}

    def start(self, batch: Batch) -> None:
        """Run a batch that is in the store, from the state that it has reached."""
        running = self._running[batch.id] = _Running(batch)
        running.task = asyncio.get_running_loop().create_task(self._live(running), name=batch.id)

    async def cancel(self, batch: Batch) -> None:
        """Start no more of its lines. It ends when those in flight have ended."""
        running = self._running.get(batch.id)
        if running is None or batch.status not in ("validating", "in_progress"):
            return
        batch.cancel(self._now())
        if running.run is not None:
            running.run.stop_feeding()
        await self._save(batch)

    async def stop(self) -> None:
        """Abort what is in flight, and make the answers durable. Every batch keeps its state."""
        tasks = [running.task for running in self._running.values() if running.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
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
                self._pause(batch, "no space is left on the disk")
                await asyncio.sleep(_RETRY_SECONDS)
        self._pause(batch, "")

    def _pause(self, batch: Batch, reason: str) -> None:
        if reason and not batch.paused:
            self._log.error("batch_paused", batch=batch.id, reason=reason, hint="it goes on when there is room")
        if batch.paused and not reason:
            self._log.info("batch_goes_on", batch=batch.id)
            batch.go_on()
        elif reason:
            batch.pause(reason)

    async def _live(self, running: _Running) -> None:
        """Run a batch to its end. After an unexpected exception it is taken up again, as after a restart."""
        batch = running.batch
        while batch.is_running:
            try:
                await self._attempt(running)
            except InvalidInput as invalid:
                batch.fail(invalid.errors, self._now())
                await self._save(batch)
            except Exception as error:
                self._parts.caught("batch", error)
                if has_no_room(error):
                    self._pause(batch, "no space is left on the disk")
                await asyncio.sleep(_RETRY_SECONDS)
        self._log.info("batch_ended", batch=batch.id, status=batch.status, lines=batch.total, failed=batch.tally.failed)
        self._running.pop(batch.id, None)

    async def _attempt(self, running: _Running) -> None:
        batch, is_new = running.batch, running.batch.status == "validating"
        checked = await self._check(batch, is_new=is_new)
        if batch.status == "validating":
            batch.begin(checked.model, len(checked.index), self._now())
            await self._save(batch)
        elif not batch.total:  # cancelled while it was checked
            batch.begin(checked.model, len(checked.index), self._now())
        await asyncio.to_thread(_arrange, checked, self._parts.engines_of(checked.model), self._parts.breather())
        run = running.run = await self._open(batch, checked)
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

    async def _check(self, batch: Batch, *, is_new: bool) -> CheckedInput:
        """Check the input file. Raises InvalidInput."""
        path, breathe, limits = self._files.path(batch.input_file_id), self._parts.breather(), self._limits
        if not is_new:  # it was within the limits of then
            limits = replace(limits, max_lines=max(limits.max_lines, batch.total), max_embedding_inputs=sys.maxsize)
        async with self._checking:
            try:
                checked = await asyncio.to_thread(check_input, path, batch.endpoint, limits, breathe)
            except FileNotFoundError:
                raise InvalidInput([batch_error("input_file_missing", "The input file has been deleted.")]) from None
        if not is_new:
            return checked
        if not self._knows_model(checked.model):
            message = f"The model {checked.model[:200]!r} does not exist. GET /v1/models lists the available models."
            raise InvalidInput([batch_error("model_not_found", message, 1, "body.model")])
        others = (running.batch for running in self._running.values())
        enqueued = sum(
            other.total - other.tally.lines
            for other in others
            if other.owner.key == batch.owner.key and other is not batch
        )
        if enqueued + len(checked.index) > self._most_enqueued:
            raise InvalidInput(
                [
                    batch_error(
                        "enqueued_request_limit_exceeded",
                        f"The running batches of this API key have {enqueued} requests, and this one has"
                        f" {len(checked.index)} more; the limit is {self._most_enqueued}"
                        " (batches.max_enqueued_lines_per_key). Retry when others have ended.",
                    )
                ]
            )
        return checked

    async def _open(self, batch: Batch, checked: CheckedInput) -> BatchRun:
        """The run of a batch, which knows the answers that its journal has."""
        tally = Tally()
        answered: set[int] = set()
        for failed, file_id in ((False, batch.output_id), (True, batch.error_id)):
            await _to_its_end(self._recover, file_id, checked, failed, tally, answered)
        answers = await _to_its_end(self._parts.open_answers, batch.output_id)
        errors = await _to_its_end(self._parts.open_answers, batch.error_id)
        journal = Journal(answers, errors, lambda reason: self._pause(batch, reason))
        source = await _to_its_end(InputFile, self._files.path(batch.input_file_id))
        run = BatchRun(batch, checked, journal, source, self._parts)
        batch.recount(tally)
        for place in answered:
            run.answered(place)
        if answered:
            self._log.info("batch_resumed", batch=batch.id, answered=len(answered), lines=batch.total)
        return run

    def _recover(self, file_id: str, checked: CheckedInput, failed: bool, tally: Tally, answered: set[int]) -> None:
        for custom_id, usage in recover(self._files.path(file_id), self._parts.breather()):
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
            path, now = self._files.path(file_id), self._now()
            size_bytes = (await asyncio.to_thread(path.stat)).st_size
            if not size_bytes:
                await asyncio.to_thread(path.unlink)
                shown.append(None)
                continue
            expires_at = now + (batch.output_lifetime_seconds or self._lifetime_seconds)
            shown.append(
                StoredFile(file_id, batch.owner, f"{batch.id}_{name}.jsonl", OUTPUT, size_bytes, now, expires_at)
            )
        output_file_id, error_file_id = (None if each is None else each.id for each in shown)
        batch.end(output_file_id, error_file_id, self._now())
        written = tuple(each for each in shown if each is not None)
        await self._save(batch, written)
        for each in written:
            self._files.count(each.id, each.owner.key, each.size_bytes)
        self._parts.metrics.batches.add((batch.status,))


def _arrange(checked: CheckedInput, engines: int, breathe: Breathe) -> None:
    for _ in checked.order.arrange(max(1, engines)):
        breathe()


async def _to_its_end(do: Callable[..., Result], *args: Any) -> Result:
    """Do this in a thread. If this is cancelled, it ends first: another process may use the same files next."""
    doing = asyncio.get_running_loop().run_in_executor(None, partial(do, *args))
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait([doing])
        raise
