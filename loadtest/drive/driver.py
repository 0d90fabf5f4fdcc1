"""Drives one worker's share of a plan, for every part of a mix: a closed loop of slots, or an open loop."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

from loadtest.drive.client import Client
from loadtest.drive.connections import Connections
from loadtest.drive.plan import Plan, schedule, shared_out
from loadtest.drive.record import ITL_TICKS_PER_SECOND, Record
from loadtest.workloads.prompts import NO_GROUP, BodyMaker, Prompt, Source, fingerprint
from loadtest.workloads.sources import source_of


@dataclass(frozen=True, slots=True)
class Lane:
    """One kind of request; a run without a mix has a single one, without a name."""

    name: str | None
    source: Source
    bodies: BodyMaker
    _: KW_ONLY
    client: Client


@dataclass(frozen=True, slots=True)
class Lanes:
    """Which kind each arrival is of: drawn by share, the same in every worker."""

    lanes: Sequence[Lane]
    shares: Sequence[float]
    seed: int

    def of(self, index: int) -> Lane:
        if len(self.lanes) == 1:
            return self.lanes[0]
        return random.Random(f"{self.seed}-part-{index}").choices(self.lanes, self.shares)[0]

    @property
    def count(self) -> int | None:
        """How many arrivals there can be; None: no end."""
        return self.lanes[0].source.count if len(self.lanes) == 1 else None

    @property
    def arrivals_seconds(self) -> Sequence[float]:
        """Recorded moments of its requests; empty without a recording, or with several lanes."""
        return self.lanes[0].source.arrivals_seconds if len(self.lanes) == 1 else ()


def lanes_of(plan: Plan, session: Connections, clock: Callable[[], float]) -> Lanes:
    """All lanes over one session. Reads the files that workloads name."""

    def lane(name: str | None, alone: Plan) -> Lane:
        return Lane(name, source_of(alone.workload), alone.body_maker(), client=Client(alone, session, clock))

    if not plan.mix:
        return Lanes([lane(None, plan)], [1.0], plan.seed)
    lanes = [lane(part.name, plan.part(part)) for part in plan.mix]
    return Lanes(lanes, [part.share for part in plan.mix], plan.seed)


_REFUSED_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
_WARMUPS_AT_ONCE = 8


class Driver:
    """One worker's requests. Cancelling `run` ends it early; requests in flight are recorded as interrupted."""

    def __init__(
        self,
        plan: Plan,
        worker: int,
        session: Connections,
        *,
        clock: Callable[[], float],
        emit: Callable[[Record], None],
    ) -> None:
        self._plan = plan
        self._worker = worker
        self._clock = clock
        self._emit = emit
        self._lanes = lanes_of(plan, session, clock)
        self._cap = shared_out(plan.max_in_flight, worker, plan.workers)
        self.in_flight = 0
        self._starting = 0
        self.itl_ticks: Counter[int] = Counter()

    async def warm_up(self) -> list[Record]:
        """Opens connections and heats code paths with prompts that share no prefix with the measured ones."""
        records: list[Record] = []
        gate = asyncio.Semaphore(_WARMUPS_AT_ONCE)

        async def one(index: int) -> None:
            async with gate:
                record = Record.planned(index, NO_GROUP, self._clock())
                lane = self._lanes.lanes[index % len(self._lanes.lanes)]
                prompt = lane.source.warmup(index)
                await lane.client.send(record, lane.bodies.body(prompt), lane.bodies.call(prompt))
                records.append(record)

        async with asyncio.TaskGroup() as group:
            for index in range(self._worker, self._plan.warmup_requests, self._plan.workers):
                group.create_task(one(index))
        return records

    async def run(self) -> None:
        """Sends everything and waits for every answer."""
        if self._plan.concurrency is not None:
            await self._closed_loop()
        else:
            await self._open_loop()

    async def _closed_loop(self) -> None:
        ends = [end for end in (self._plan.requests, self._lanes.count) if end is not None]
        indices: Iterator[int] = itertools.count(self._worker, self._plan.workers)
        if ends:
            indices = iter(range(self._worker, min(ends), self._plan.workers))
        async with asyncio.TaskGroup() as group:
            for slot in range(self._worker, self._plan.slots, self._plan.workers):
                group.create_task(self._slot(indices, *self._plan.presence(slot)))

    async def _slot(self, indices: Iterator[int], comes: float, leaves: float) -> None:
        """One user: sends, waits for the end, sends again; after a refusal it pauses, longer each time."""
        pause_seconds = _REFUSED_PAUSE_SECONDS
        if not await self._reached(comes):
            return
        while (now := self._clock()) < leaves and not self._over(now):
            index = next(indices, None)
            if index is None:
                return
            if await self._converse(index, now):
                pause_seconds = _REFUSED_PAUSE_SECONDS
            else:
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(pause_seconds * 2, _LONGEST_PAUSE_SECONDS)

    async def _open_loop(self) -> None:
        async with asyncio.TaskGroup() as group:
            for index, due in schedule(self._plan, self._lanes.arrivals_seconds):
                if self._lanes.count is not None and index >= self._lanes.count:
                    return
                if index % self._plan.workers != self._worker:
                    continue
                # Always yields, so that an overdue burst does not starve the reads of requests in flight.
                await asyncio.sleep(max(0.0, due - self._clock()))
                if self._is_full():
                    lane = self._lanes.of(index)
                    self._drop(
                        _planned(lane, index, 0, prompt=next(iter(lane.source.turns(index))).prompt, intended=due)
                    )
                else:
                    self._starting += 1
                    group.create_task(self._arrival(index, due))

    async def _arrival(self, index: int, due: float) -> None:
        self._starting -= 1
        await self._converse(index, due)

    async def _converse(self, index: int, due: float) -> bool:
        """All turns, each after the answer to the one before; a turn that fails is the last. Whether none failed."""
        history: tuple[str, ...] = ()
        lane = self._lanes.of(index)
        for number, turn in enumerate(lane.source.turns(index)):
            if number and not await self._reached(due := due + turn.pause_seconds):
                return True
            if number and self._plan.concurrency is None and self._is_full():
                self._drop(_planned(lane, index, number, prompt=turn.prompt, intended=due))
                return False
            prompt = turn.prompt.after(history)
            record, answer = await self._one(
                lane, index, turn=number, prompt=prompt, intended=due, keeps_text=turn.remembers
            )
            if not record.ok:
                return False
            due = record.end
            if turn.remembers:
                history += (turn.prompt.tail, answer)
        return True

    async def _reached(self, due: float) -> bool:
        """Waits until then; not if the run is over by then."""
        if self._over(due):
            return False
        if due > self._clock():
            await asyncio.sleep(due - self._clock())
        return True

    def _over(self, now: float) -> bool:
        return self._plan.duration_seconds is not None and now >= self._plan.duration_seconds

    async def _one(
        self, lane: Lane, index: int, turn: int, prompt: Prompt, intended: float, *, keeps_text: bool
    ) -> tuple[Record, str]:
        record = _planned(lane, index, turn, prompt=prompt, intended=intended)
        body = lane.bodies.body(prompt)
        self.in_flight += 1
        try:
            answer = await lane.client.send(record, body, lane.bodies.call(prompt, keeps_text=keeps_text))
        finally:
            self.in_flight -= 1
            record.note_body(fingerprint(body))
            self._emit(record)
        if record.ok:
            gaps = itertools.pairwise(answer.read_times)
            self.itl_ticks.update(round((b - a) * ITL_TICKS_PER_SECOND) for a, b in gaps)
        return record, answer.text

    def _is_full(self) -> bool:
        return self.in_flight + self._starting >= self._cap

    def _drop(self, record: Record) -> None:
        record.drop(self._clock())
        self._emit(record)


def _planned(lane: Lane, index: int, turn: int, prompt: Prompt, intended: float) -> Record:
    return Record.planned(
        index,
        prompt.group,
        intended,
        asked_tokens=prompt.max_tokens if lane.bodies.endpoint.generates else 0,
        asked_prompt_tokens=prompt.asked_tokens,
        part=lane.name,
        turn=turn,
        audio_seconds=None if prompt.audio is None else prompt.audio.seconds,
    )
