"""One batch while it runs: its lines go to backends, their answers to its journal; what may pass is retried."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from itertools import filterfalse
from random import Random
from typing import NamedTuple

import structlog

from gateway.core.errors import (
    BackendBusy,
    BackendError,
    BackendFault,
    BackendRefusesKey,
    GatewayError,
    InternalError,
    MemoryFull,
    ModelMissing,
    ModelNotFound,
    QuotaExceeded,
)
from gateway.core.resources import Holding, MemoryBudget
from gateway.core.supervisor import Supervisor
from gateway.features.batches.batch import Batch, LineUsage, Tally
from gateway.features.batches.input import Breathe, CheckedInput, InputFile, Line, LineIndex, LineRequest
from gateway.features.batches.journal import Journal, answer_line, on_one_line, usage_in
from gateway.features.batches.metrics import BatchMetrics
from gateway.features.batches.order import PrefixOrder
from gateway.features.batches.pace import BatchPace, Urgency, urgency
from gateway.features.batches.partial import PartialAnswer
from gateway.features.batches.sender import LineAnswer, LinePaused, LineSender, LinesInFlight, error_answer
from gateway.features.batches.slots import Slots

_READ_LINES, _READ_BYTES = 32, 262144  # at once; one longer line is read alone
_MEMORY_SECONDS = 1.0  # between looks for memory to read lines
_LOOK_SECONDS = 5.0  # between looks at the urgency
_CANCELLING_SECONDS = 600.0  # most time for what is in flight
_FIRST_BACKOFF_SECONDS, _MOST_BACKOFF_SECONDS = 1.0, 60.0
_MOST_PARTIAL_BYTES = 8388608  # of a batch's paused lines: beyond it, they start anew
_MOST_ATTEMPTS = 3  # of a line that a backend fails at: the line may be what makes it fail
_PASSING = frozenset({429, 503, 504})


def _passes(error: GatewayError) -> bool:
    """Whether it is not the line that this failed for. Its model existed when the batch was created."""
    if isinstance(error, BackendError):
        return error.passing or isinstance(error, BackendBusy | BackendRefusesKey | ModelMissing)
    if isinstance(error, ModelNotFound):
        return error.param == "model"
    return error.status in _PASSING and not error.not_retryable


def _has_budget_within(error: GatewayError, seconds: float) -> bool:
    """Whether it failed for a budget of its key that is renewed before so many seconds are over."""
    after_seconds = error.retry_after_seconds if isinstance(error, QuotaExceeded) else None
    return after_seconds is not None and after_seconds < seconds


@dataclass(frozen=True, slots=True)
class RunParts:
    """What the gateway gives to all batches. `engines_of`: how many engines serve a model of this name."""

    sender: LineSender
    _: KW_ONLY
    memory: MemoryBudget
    slots: Slots
    metrics: BatchMetrics
    unix_seconds: Callable[[], float]
    new_id: Callable[[], str]
    random: Random
    breather: Callable[[], Breathe]
    engines_of: Callable[[str], int]
    knows_model: Callable[[str], bool]
    supervisor: Supervisor


class Backoff:
    """How long a batch waits after failures that pass. Lines that fail while it waits do not prolong it."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._failures = 0
        self._until = -math.inf

    def failed(self, now: float, retry_after_seconds: float) -> None:
        if now < self._until:
            return
        seconds = min(_MOST_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2.0**self._failures)
        self._failures = min(self._failures + 1, 6)
        least = min(retry_after_seconds, _MOST_BACKOFF_SECONDS)
        self._until = now + max(least, seconds) * self._random.uniform(1.0, 1.5)

    def succeeded(self) -> None:
        self._failures = 0

    def wait_seconds(self, now: float) -> float:
        """Seconds until lines may be sent."""
        return max(0.0, self._until - now)

    async def wait(self, clock: Callable[[], float]) -> None:
        """Return when lines may be sent."""
        while seconds := self.wait_seconds(clock()):  # noqa: ASYNC110 - nothing announces that time has passed
            await asyncio.sleep(seconds)


def arrange(checked: CheckedInput, parts: RunParts) -> None:
    """Put the lines in the order of their prefixes, in a thread."""
    breathe = parts.breather()
    for _ in checked.order.arrange(max(1, parts.engines_of(checked.model))):
        breathe()


def pause(batch: Batch, reason: str) -> None:
    """Note why nothing can be written at the moment; "" = it can."""
    log = structlog.get_logger("gateway")
    if reason and not batch.paused:
        log.error("batch_paused", batch=batch.id, reason=reason, hint="it goes on as soon as it can be written")
    if batch.paused and not reason:
        log.info("batch_goes_on", batch=batch.id)
    batch.pause(reason)


def new_pace(batch: Batch, lines: int, parts: RunParts) -> BatchPace:
    """The pace of a batch from now on, with so many lines left."""
    now = parts.sender.now()
    return BatchPace(now, now + batch.expires_at - parts.unix_seconds(), lines)


class BatchRun:
    """Runs lines of a batch whose input is checked. It owns their states; the batch's state changes by its methods.

    `tally`: of the lines that have an answer.
    """

    def __init__(
        self,
        batch: Batch,
        checked: CheckedInput,
        *,
        journal: Journal,
        source: InputFile,
        parts: RunParts,
        pace: BatchPace,
    ) -> None:
        self.batch = batch
        self.tally = Tally()
        self._index: LineIndex = checked.index
        self._order: PrefixOrder = checked.order
        self._journal = journal
        self._source = source
        self._parts = parts
        self._done = bytearray(len(checked.index))
        self._left = len(checked.index)  # without an answer
        self._again: deque[Line] = deque()  # to be sent before other lines: what they failed for passes
        self._last: deque[Line] = deque()  # to be sent after all others
        self._attempts: dict[int, int] = {}  # failures of backends, by line
        self._partial: dict[int, PartialAnswer] = {}  # of lines that are paused
        self._partials = Holding(parts.memory)  # what they take
        self._backoff = Backoff(parts.random)
        self._in_flight = LinesInFlight(pace)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._feeding: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._lacks_budget = False  # of its key; then the batch is paused

    def resume(self, places: Iterable[int], tally: Tally) -> None:
        """Parts have answers to these lines, which count so much."""
        self.tally = tally
        for place in places:
            self._answered(place)

    def _answered(self, place: int) -> None:
        self._left -= not self._done[place]
        self._done[place] = 1

    def stop_feeding(self) -> None:
        """Start no more lines, and withdraw those that wait; `run` ends when those on engines have ended."""
        self._is_stopping = True
        self._in_flight.withdraw()
        if self._feeding is not None:
            self._feeding.cancel()

    async def run(self) -> None:
        """Send lines until all have an answer, the window closes, or `stop_feeding` is called."""
        parts, seconds = self._parts, self.batch.expires_at - self._parts.unix_seconds()
        try:
            if not self._is_stopping and self._left and seconds > 0:
                self._feeding = asyncio.get_running_loop().create_task(self._feed(), name="batch_feed")
                await self._watch(self._feeding)
            if self._tasks and self._is_stopping:
                left = self.batch.expires_at - parts.unix_seconds()
                await asyncio.wait(self._tasks, timeout=max(0.0, min(_CANCELLING_SECONDS, left)))
        finally:
            await self._end_tasks()
            self._partial.clear()
            self._partials.release()
            self._feeding = None  # what it raised has frames that have this

    async def _watch(self, feeding: asyncio.Task[None]) -> None:
        """Wait for the last answer or the end of the window. Meanwhile, note how urgent the batch is."""
        while (seconds := self.batch.expires_at - self._parts.unix_seconds()) > 0:
            self._look()
            await asyncio.wait([feeding], timeout=min(seconds, _LOOK_SECONDS))
            if feeding.done():
                try:
                    return None if feeding.cancelled() else feeding.result()
                finally:
                    del feeding  # it has what is raised, whose traceback has this frame

    def _look(self) -> None:
        batch, laxity_seconds = self.batch, self._in_flight.pace.laxity_seconds(self._parts.sender.now())
        found = urgency(laxity_seconds)
        promoted = "" if found is Urgency.IDLE else found.name.lower()
        if promoted == batch.promoted:
            return
        batch.promote(promoted)
        structlog.get_logger("gateway").info(
            "batch_promoted" if promoted else "batch_on_idle_capacity",
            batch=batch.id,
            uses=promoted or "idle",
            lines_left=self._left,
            laxity_seconds=None if math.isinf(laxity_seconds) else round(laxity_seconds),
        )

    async def _end_tasks(self) -> None:
        tasks = [task for task in (self._feeding, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(self) -> None:
        fresh, clock = self._lines(self._order.in_turn()), asyncio.get_running_loop().time
        with Holding(self._parts.memory) as holding:
            while self._left:
                if lines := self._next_group(fresh):
                    for request in await self._requests(lines, holding):
                        await self._backoff.wait(clock)
                        self._go_on()
                        await self._start(request)
                    del request
                    holding.release()
                else:
                    self._changed.clear()
                    await self._changed.wait()

    def _lines(self, places: Iterable[int]) -> Iterator[Line]:
        """The lines at these places that have no answer."""
        return map(self._index.__getitem__, filterfalse(self._done.__getitem__, places))

    async def _requests(self, lines: list[Line], holding: Holding) -> list[LineRequest]:
        """Read lines when there is memory for them. Those that were read before with this holding are dropped."""
        size_bytes = sum(line.length for line in lines)
        holding.release()
        while True:
            try:
                holding.add(size_bytes)
                break
            except MemoryFull:
                await asyncio.sleep(_MEMORY_SECONDS)
        return await self._source.requests(lines)

    def _next_group(self, fresh: Iterator[Line]) -> list[Line]:
        group: list[Line] = []
        size_bytes = 0
        for line in self._next_lines(fresh):
            group.append(line)
            size_bytes += line.length
            if len(group) >= _READ_LINES or size_bytes >= _READ_BYTES:
                break
        return group

    def _next_lines(self, fresh: Iterator[Line]) -> Iterator[Line]:
        while self._again:
            yield self._again.popleft()
        yield from fresh
        while self._last:
            yield self._last.popleft()

    async def _start(self, request: LineRequest) -> None:
        await self._parts.slots.acquire()
        task = asyncio.get_running_loop().create_task(self._send(request))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._parts.slots.release()
        self._changed.set()

    async def _send(self, request: LineRequest) -> None:
        """Send a line once, and write its answer; or have it sent again."""
        line = request.line
        with Holding(self._parts.memory) as holding:
            written = await self._answer(request, holding)
            del request
            if written is not None:
                await self._journal.append(written.text, failed=written.failed, holding=holding)
                self._count(line, written)

    async def _answer(self, request: LineRequest, holding: Holding) -> "_Written | None":
        """What is written of a line, of which `holding` has the memory; None = the line is sent again."""
        parts, batch, line = self._parts, self.batch, request.line
        partial = self._partial.pop(line.place, None)
        may_stream = line.place not in self._attempts  # a line that failed is sent whole
        if partial is not None:
            self._partials.shrink(partial.size_bytes)
            parts.metrics.lines.add(("continued",))
        try:
            answer = await parts.sender.send(
                batch.endpoint,
                request,
                owner=batch.owner,
                lines=self._in_flight,
                holding=holding,
                partial=partial,
                may_stream=may_stream,
            )
        except LinePaused as paused:
            self._again.append(line)
            self._keep(line, paused.partial)
            parts.metrics.lines.add(("paused",))
            return None
        except GatewayError as error:
            if self._is_put_back(line, error):
                return None
            answer = error_answer(error, parts.new_id())
        except Exception as error:
            parts.supervisor.caught("batch_line", error)
            failure = InternalError(f"Internal error of the gateway ({type(error).__name__}).")
            answer = error_answer(failure, parts.new_id())
        else:
            self._backoff.succeeded()
        written = self._written(request.custom_id, answer)
        try:
            holding.fit(len(written.text))
        except MemoryFull as error:
            self._is_put_back(line, error)
            return None
        return written

    def _keep(self, line: Line, partial: PartialAnswer | None) -> None:
        """Keep what a line that is paused has, if there is memory for it; else it starts anew."""
        if partial is not None and self._partials.size_bytes + partial.size_bytes <= _MOST_PARTIAL_BYTES:
            with suppress(MemoryFull):
                self._partials.add(partial.size_bytes)
                self._partial[line.place] = partial

    def _is_put_back(self, line: Line, error: GatewayError) -> bool:
        """Whether the same line may succeed later. What passes is waited for until the window closes."""
        if _passes(error) or self._waits_for_budget(error):
            self._again.append(line)
            self._backoff.failed(asyncio.get_running_loop().time(), error.retry_after_seconds or 0.0)
        else:
            if error.not_retryable or not isinstance(error, BackendError):
                return False
            attempts = self._attempts[line.place] = self._attempts.get(line.place, 0) + 1
            if attempts >= _MOST_ATTEMPTS:
                return False
            self._last.append(line)
        self._parts.metrics.lines.add(("retried",))
        return True

    def _waits_for_budget(self, error: GatewayError) -> bool:
        if not _has_budget_within(error, self.batch.expires_at - self._parts.unix_seconds()):
            return False
        self._lacks_budget = True
        self.batch.pause(error.message)
        return True

    def _go_on(self) -> None:
        if self._lacks_budget:
            self._lacks_budget = False
            self.batch.go_on()

    def _written(self, custom_id: str, answer: LineAnswer) -> "_Written":
        body = on_one_line(answer.body)
        failed = answer.status >= 400
        if body is None:
            failed = True
            answer = error_answer(BackendFault("The backend's response is not valid JSON."), answer.request_id)
            body = answer.body
        usage = LineUsage() if failed else usage_in(body)
        text = answer_line(self._parts.new_id(), custom_id, answer.status, answer.request_id, body)
        return _Written(text, usage, failed)

    def _count(self, line: Line, written: "_Written") -> None:
        self._attempts.pop(line.place, None)
        self._answered(line.place)
        self._in_flight.pace.done(self._parts.sender.now())
        self.tally.add(written.usage, failed=written.failed)
        self._parts.metrics.lines.add(("failed" if written.failed else "completed",))

    @property
    def is_done(self) -> bool:
        return not self._left


class _Written(NamedTuple):
    """The line of an answer in its file, and what it counts as."""

    text: bytes
    usage: LineUsage
    failed: bool
