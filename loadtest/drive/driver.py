"""Drives one worker's share of a plan: a closed loop of slots, or an open loop of arrivals."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator

from loadtest.drive.client import Client
from loadtest.drive.plan import Plan, schedule, shared_out
from loadtest.drive.record import DROPPED, INTERRUPTED, Record
from loadtest.workloads.body import BodyMaker
from loadtest.workloads.prompts import NO_GROUP, Prompt, PromptSource

# Gaps between reads are counted in ticks of 10 µs: finer than any timer here, and any number of them stays small.
ITL_TICKS_PER_SECOND = 100_000

_REFUSED_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
_WARMUPS_AT_ONCE = 8


class Driver:
    """One worker's requests. Cancelling `run` ends it early; what was in flight is recorded as interrupted."""

    def __init__(
        self, plan: Plan, worker: int, client: Client, clock: Callable[[], float], emit: Callable[[Record], None]
    ) -> None:
        self._plan = plan
        self._worker = worker
        self._client = client
        self._clock = clock
        self._emit = emit
        self._prompts = PromptSource(plan.workload)
        self._bodies: BodyMaker = plan.body_maker()
        self.in_flight = 0
        self._starting = 0
        self.itl_ticks: Counter[int] = Counter()

    async def warm_up(self) -> list[Record]:
        """Opens connections and heats code paths with prompts that share no prefix with the measured ones."""
        records: list[Record] = []
        gate = asyncio.Semaphore(_WARMUPS_AT_ONCE)

        async def one(index: int) -> None:
            async with gate:
                record = _blank(index, NO_GROUP, self._clock())
                await self._client.send(record, self._bodies.body(self._prompts.warmup(index)))
                records.append(record)

        async with asyncio.TaskGroup() as group:
            for index in range(self._worker, self._plan.warmup_requests, self._plan.workers):
                group.create_task(one(index))
        return records

    async def run(self) -> None:
        """Sends everything and waits for every answer."""
        if self._plan.concurrency is not None:
            await self._closed_loop(shared_out(self._plan.concurrency, self._worker, self._plan.workers))
        else:
            await self._open_loop()

    async def _closed_loop(self, slots: int) -> None:
        indices: Iterator[int] = itertools.count(self._worker, self._plan.workers)
        if self._plan.requests is not None:
            indices = iter(range(self._worker, self._plan.requests, self._plan.workers))
        async with asyncio.TaskGroup() as group:
            for _ in range(slots):
                group.create_task(self._slot(indices))

    async def _slot(self, indices: Iterator[int]) -> None:
        """One user: sends, waits for the end, sends again; one that is refused pauses, longer each time."""
        pause_seconds = _REFUSED_PAUSE_SECONDS
        for index in indices:
            now = self._clock()
            if self._plan.duration_seconds is not None and now >= self._plan.duration_seconds:
                return
            record = await self._one(index, now)
            if record.ok:
                pause_seconds = _REFUSED_PAUSE_SECONDS
            else:
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(pause_seconds * 2, _LONGEST_PAUSE_SECONDS)

    async def _open_loop(self) -> None:
        cap = shared_out(self._plan.max_in_flight, self._worker, self._plan.workers)
        async with asyncio.TaskGroup() as group:
            for index, due in schedule(self._plan):
                if index % self._plan.workers != self._worker:
                    continue
                # Always yields, so that a burst that is overdue does not starve the reads of what is in flight.
                await asyncio.sleep(max(0.0, due - self._clock()))
                if self.in_flight + self._starting >= cap:
                    self._drop(index, due)
                else:
                    self._starting += 1
                    group.create_task(self._arrival(index, due))

    async def _arrival(self, index: int, due: float) -> None:
        self._starting -= 1
        await self._one(index, due)

    async def _one(self, index: int, intended: float) -> Record:
        prompt: Prompt = self._prompts.prompt(index)
        record = _blank(index, prompt.group, intended)
        record.asked_tokens = prompt.max_tokens
        self.in_flight += 1
        try:
            times = await self._client.send(record, self._bodies.body(prompt))
        finally:
            self.in_flight -= 1
            self._emit(record)
        if record.ok:
            self.itl_ticks.update(round((b - a) * ITL_TICKS_PER_SECOND) for a, b in itertools.pairwise(times))
        return record

    def _drop(self, index: int, due: float) -> None:
        record = _blank(index, self._prompts.prompt(index).group, due)
        record.sent = record.end = self._clock()
        record.outcome = DROPPED
        self._emit(record)


def _blank(index: int, group: int, intended: float) -> Record:
    return Record(index=index, group=group, intended=intended, sent=intended, end=intended, outcome=INTERRUPTED)
