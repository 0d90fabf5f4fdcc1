"""Waiting for an engine to come to rest; an engine in virtual time."""

import asyncio
from collections.abc import Callable

from loadtest.engine import SimulatedEngine
from loadtest.engine.kv_cache import SequenceState
from loadtest.engine.scheduler import Committed, Limits, Scheduler, Step
from loadtest.engine.step_time import StepTime

DEADLINE_SECONDS = 60.0


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds, for some seconds at most."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


def idle(engine: SimulatedEngine) -> bool:
    """Whether the engine holds nothing for any request."""
    schedulers = [rank.scheduler for rank in engine.service.engine.ranks]
    return (
        not any(scheduler.num_running or scheduler.num_waiting or scheduler.pool.num_used for scheduler in schedulers)
        and not engine.service.engine.num_requests
        and not engine.service.ledger.in_flight
    )


class VirtualEngine:
    """One engine whose clock moves only when it is advanced."""

    def __init__(self, limits: Limits, step_time: StepTime) -> None:
        self.scheduler = Scheduler(limits, step_time)
        self.now_seconds = 0.0
        self._step: Step | None = None
        self._step_ends_seconds = 0.0

    @property
    def next_event_seconds(self) -> float | None:
        """When the step under way ends; None when idle."""
        return self._step_ends_seconds if self._step else None

    def submit(self, sequence: SequenceState) -> None:
        sequence.arrive(self.now_seconds)
        self.scheduler.add(sequence)

    def advance(self, until_seconds: float) -> list[SequenceState]:
        """Run all steps that begin before `until_seconds`; who ended by then, in order of their ends."""
        finished: list[SequenceState] = []
        while True:
            if self._step is None:
                if self.now_seconds >= until_seconds:
                    break
                self._step = self.scheduler.schedule(self.now_seconds, until_seconds)
                if self._step is None:
                    break
                self._step_ends_seconds = self.now_seconds + self._step.duration_seconds
            if self._step_ends_seconds > until_seconds:
                break
            self.now_seconds = self._step_ends_seconds
            finished += self._commit().finished
        if until_seconds != float("inf"):
            self.now_seconds = until_seconds
        return finished

    def _commit(self) -> Committed:
        assert self._step is not None
        done = self.scheduler.commit(self._step, self.now_seconds)
        self._step = None
        return done
