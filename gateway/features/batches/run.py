"""One batch while it runs: its lines go to backends, their answers to its journal; what may pass is retried."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from itertools import filterfalse
from random import Random
from typing import BinaryIO

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
from gateway.core.threads import breather
from gateway.features.batches.batch import Batch, Tally
from gateway.features.batches.checks import InputChecks
from gateway.features.batches.contents import Contents
from gateway.features.batches.files import Files
from gateway.features.batches.input import CheckedInput, Line, LineIndex, LineRequest, read_lines
from gateway.features.batches.journal import Journal, LineName, answer_line, on_one_line, tally_of
from gateway.features.batches.metrics import BatchCounters
from gateway.features.batches.order import PrefixOrder
from gateway.features.batches.pace import BatchPace, Urgency, urgency
from gateway.features.batches.partial import PartialAnswer
from gateway.features.batches.parts import JoinedParts
from gateway.features.batches.sender import LineAnswer, LinePaused, LineSender, LinesInFlight, SentLine, error_answer
from gateway.features.batches.slots import Slots
from gateway.features.batches.store import Store

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
class BatchTools:
    """What all batches of a gateway work with. `holder`: its id; `engines_of`: how many engines serve a model of this
    name; None = there is no such model.
    """

    holder: str
    _: KW_ONLY
    store: Store
    files: Files
    contents: Contents
    checks: InputChecks
    sender: LineSender
    memory: MemoryBudget
    slots: Slots
    counters: BatchCounters
    unix_seconds: Callable[[], float]
    new_id: Callable[[], str]
    random: Random
    engines_of: Callable[[str], int | None]
    supervisor: Supervisor


class Standing:
    """How a batch goes on at the moment, on this gateway.

    `paused`: why it does not; `promoted`: the class of its lines, once its window leaves too little time for idle
    capacity alone. Both empty = it goes on, on idle capacity.
    """

    def __init__(self, batch_id: str) -> None:
        self.paused = self.promoted = ""
        self._lacks_budget = False  # of its key
        self._log = structlog.get_logger("gateway").bind(batch=batch_id)

    def pause(self, reason: str) -> None:
        """Nothing can be written at the moment; "" = it can again."""
        if reason and not self.paused:
            self._log.error("batch_paused", reason=reason, hint="it goes on as soon as it can be written")
        if self.paused and not reason:
            self._log.info("batch_goes_on")
        self.paused = reason

    def lack_budget(self, reason: str) -> None:
        """No line can be sent, until the budget of its key is renewed."""
        self._lacks_budget, self.paused = True, reason

    def go_on(self) -> None:
        """A line is sent, so that there is a budget, if there was none."""
        if self._lacks_budget:
            self._lacks_budget, self.paused = False, ""

    def look(self, laxity_seconds: float, lines_left: int) -> None:
        """Note how urgent the batch is."""
        found = urgency(laxity_seconds)
        promoted = "" if found is Urgency.IDLE else found.name.lower()
        if promoted == self.promoted:
            return
        self.promoted = promoted
        self._log.info(
            "batch_promoted" if promoted else "batch_on_idle_capacity",
            uses=promoted or "idle",
            lines_left=lines_left,
            laxity_seconds=None if math.isinf(laxity_seconds) else round(laxity_seconds),
        )


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
        return max(0.0, self._until - now)

    async def wait(self, clock: Callable[[], float]) -> None:
        while seconds := self.wait_seconds(clock()):  # noqa: ASYNC110 - nothing announces that time has passed
            await asyncio.sleep(seconds)


def arrange(checked: CheckedInput, tools: BatchTools) -> None:
    """Put the lines in the order of their prefixes, in a thread."""
    breathe = breather()
    for _ in checked.order.arrange(max(1, tools.engines_of(checked.model) or 0)):
        breathe()


@dataclass(frozen=True, slots=True)
class BatchWork:
    """What the claims of a gateway have in common: its part in one batch. `source`: the input file."""

    batch: Batch
    _: KW_ONLY
    source: BinaryIO
    checked: CheckedInput
    journal: Journal
    standing: Standing
    pace: BatchPace


class BatchRun:
    """Runs the lines of one claim. It owns their states. `tally`: of the lines that have an answer."""

    def __init__(self, work: BatchWork, lines: CheckedInput, joined: JoinedParts, *, tools: BatchTools) -> None:
        """`joined`: the answers to these lines that parts have."""
        self.tally = joined.tally
        self._work = work
        self._tools = tools
        self._first = joined.wanted.start  # the place of the first line in the file
        self._index: LineIndex = lines.index
        self._order: PrefixOrder = lines.order
        self._done = joined.has
        self._left = len(lines.index) - sum(self._done)  # without an answer
        self._again: deque[Line] = deque()  # to be sent before other lines: what they failed for passes
        self._last: deque[Line] = deque()  # to be sent after all others
        self._attempts: dict[int, int] = {}  # failures of backends, by line
        self._partial: dict[int, PartialAnswer] = {}  # of lines that are paused
        self._partials = Holding(tools.memory)  # what they take
        self._backoff = Backoff(tools.random)
        self._in_flight = LinesInFlight(work.pace)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._feeding: asyncio.Task[None] | None = None
        self._is_stopping = False

    def stop_feeding(self) -> None:
        """Start no more lines, and withdraw those that wait; `run` ends when those on engines have ended."""
        self._is_stopping = True
        self._in_flight.withdraw()
        if self._feeding is not None:
            self._feeding.cancel()

    @property
    def is_done(self) -> bool:
        return not self._left

    @property
    def _seconds_left(self) -> float:
        return self._work.batch.expires_at - self._tools.unix_seconds()

    async def run(self) -> None:
        """Send lines until all have an answer, the window closes, or `stop_feeding` is called."""
        try:
            if not self._is_stopping and self._left and self._seconds_left > 0:
                self._feeding = asyncio.get_running_loop().create_task(self._feed(), name="batch_feed")
                await self._watch(self._feeding)
            if self._tasks and self._is_stopping:
                await asyncio.wait(self._tasks, timeout=max(0.0, min(_CANCELLING_SECONDS, self._seconds_left)))
        finally:
            await self._end_tasks()
            self._partial.clear()
            self._partials.release()
            self._feeding = None  # what it raised has frames that have this

    async def _watch(self, feeding: asyncio.Task[None]) -> None:
        """Wait for the last answer or the end of the window. Meanwhile, note how urgent the batch is."""
        while (seconds := self._seconds_left) > 0:
            self._work.standing.look(self._work.pace.laxity_seconds(self._tools.sender.now()), self._left)
            await asyncio.wait([feeding], timeout=min(seconds, _LOOK_SECONDS))
            if feeding.done():
                try:
                    return None if feeding.cancelled() else feeding.result()
                finally:
                    del feeding  # it has what is raised, whose traceback has this frame

    async def _end_tasks(self) -> None:
        tasks = [task for task in (self._feeding, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(self) -> None:
        clock = asyncio.get_running_loop().time
        unanswered = filterfalse(self._done.__getitem__, self._order.in_turn())
        fresh = map(self._index.__getitem__, unanswered)
        with Holding(self._tools.memory) as holding:
            while self._left:
                if lines := self._next_group(fresh):
                    for request in await self._requests(lines, holding):
                        await self._backoff.wait(clock)
                        self._work.standing.go_on()
                        await self._start(request)
                    del request
                    holding.release()
                else:
                    self._changed.clear()
                    await self._changed.wait()

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
        return await self._tools.contents.threads.run(read_lines, self._work.source, lines)

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
        await self._tools.slots.acquire()
        task = asyncio.get_running_loop().create_task(self._send(request))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._tools.slots.release()
        self._changed.set()

    async def _send(self, request: LineRequest) -> None:
        """Send a line once, and write its answer; or have it sent again."""
        line = request.line
        with Holding(self._tools.memory) as holding:
            written = await self._answer(request, holding)
            del request
            if written is not None:
                text, counts = written
                await self._work.journal.append(text, failed=counts.failed > 0, holding=holding)
                self._count(line, counts)

    async def _answer(self, request: LineRequest, holding: Holding) -> tuple[bytes, Tally] | None:
        """What is written of a line, of which `holding` has the memory, and what it counts as; None = the line is sent
        again.
        """
        tools, batch, line = self._tools, self._work.batch, request.line
        partial = self._partial.pop(line.place, None)
        sent = SentLine(
            request,
            endpoint=batch.endpoint,
            owner=batch.owner,
            lines=self._in_flight,
            holding=holding,
            partial=partial,
            may_stream=line.place not in self._attempts,  # a line that failed is sent whole
        )
        if partial is not None:
            self._partials.shrink(partial.size_bytes)
            tools.counters.lines.add(("continued",))
        try:
            answer = await tools.sender.send(sent)
        except LinePaused as paused:
            self._again.append(line)
            self._keep(line, paused.partial)
            tools.counters.lines.add(("paused",))
            return None
        except GatewayError as error:
            if self._is_put_back(line, error):
                return None
            answer = error_answer(error, tools.new_id())
        except Exception as error:
            tools.supervisor.caught("batch_line", error)
            failure = InternalError(f"Internal error of the gateway ({type(error).__name__}).")
            answer = error_answer(failure, tools.new_id())
        else:
            self._backoff.succeeded()
        written = self._written(line, request.custom_id, answer)
        try:
            holding.fit(len(written[0]))
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
        self._tools.counters.lines.add(("retried",))
        return True

    def _waits_for_budget(self, error: GatewayError) -> bool:
        if not _has_budget_within(error, self._seconds_left):
            return False
        self._work.standing.lack_budget(error.message)
        return True

    def _written(self, line: Line, custom_id: str, answer: LineAnswer) -> tuple[bytes, Tally]:
        body = on_one_line(answer.body)
        failed = answer.status >= 400
        if body is None:
            failed = True
            answer = error_answer(BackendFault("The backend's response is not valid JSON."), answer.request_id)
            body = answer.body
        name = LineName(self._first + line.place, self._tools.new_id(), custom_id)
        text = answer_line(name, answer.status, answer.request_id, body)
        return text, Tally(failed=1) if failed else tally_of(body)

    def _count(self, line: Line, counts: Tally) -> None:
        self._attempts.pop(line.place, None)
        self._left -= not self._done[line.place]
        self._done[line.place] = 1
        self._work.pace.done(self._tools.sender.now())
        self.tally += counts
        self._tools.counters.lines.add(("failed" if counts.failed else "completed",))
