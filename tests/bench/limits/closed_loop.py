"""More users than fit, each of whom asks again as soon as it is answered, at one modelled engine in virtual time."""

import random
from collections import deque
from dataclasses import dataclass, field, replace

from gateway.core.backends.concurrency_limit import Limiter
from gateway.core.backends.facts import Telemetry
from loadtest.engine.kv_cache import SequenceState
from loadtest.engine.scheduler import Limits
from loadtest.engine.step_time import PRESETS
from loadtest.replay.engine import ReplayEngine

_LOOK_SECONDS = 2.0  # how often the gateway reads an engine's metrics
_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Crowd:
    """Users, what they ask for, and the engine they ask. Lengths are spread evenly over half to one and a half."""

    name: str
    prompt_tokens: int
    output_tokens: int
    kv_tokens: int
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    users: int = 1500
    late_looks: int = 0  # by how many looks the engine's metrics lag behind
    itl_objective_seconds: float | None = None

    def limits(self) -> Limits:
        return Limits(
            self.max_num_seqs,
            self.max_num_batched_tokens,
            block_size=_BLOCK_TOKENS,
            num_blocks=self.kv_tokens // _BLOCK_TOKENS,
        )


@dataclass(slots=True)
class Course:
    """What happened after the warm-up."""

    tokens_per_second: float = 0.0
    preemptions: int = 0
    waiting: list[int] = field(default_factory=list)  # inside the engine, at each look
    limit: list[int] = field(default_factory=list)
    tpot_seconds: list[float] = field(default_factory=list)  # of each answer that ended


class ClosedLoop:
    """One run. The limiter is asked before anything is sent, and looks at the engine as the gateway does."""

    def __init__(self, crowd: Crowd, limiter: Limiter, seed: int) -> None:
        self._crowd = crowd
        self._limiter = limiter
        self._engine = ReplayEngine(crowd.limits(), PRESETS["h100-8b"])
        self._rng = random.Random(seed)
        self._line: deque[int] = deque(range(crowd.users))
        self._in_flight = 0
        self._sent = 0
        self._seen: deque[Telemetry] = deque()  # what the engine's metrics will show

    def run(self, warm_up_seconds: float, seconds: float) -> Course:
        course, look, engine = Course(), _LOOK_SECONDS, self._engine
        counters, begun, since = engine.scheduler.counters, (0, 0), 0.0
        end = warm_up_seconds + seconds
        self._send(0.0)
        while (now := min(look, engine.next_event_seconds)) <= end:
            if now == engine.next_event_seconds:
                tpots = self._advance(now)
                if now >= warm_up_seconds:
                    course.tpot_seconds += tpots
            else:
                look = now + _LOOK_SECONDS
                self._look(now)
                if now >= warm_up_seconds:
                    if not since:
                        since, begun = now, (counters.generation_tokens, counters.preemptions)
                    course.waiting.append(engine.scheduler.num_waiting)
                    course.limit.append(self._limiter.limit)
            self._send(now)
        course.tokens_per_second = (counters.generation_tokens - begun[0]) / (look - _LOOK_SECONDS - since)
        course.preemptions = counters.preemptions - begun[1]
        return course

    def _advance(self, now: float) -> list[float]:
        tpots = []
        for sequence in self._engine.advance().finished:
            self._in_flight -= 1
            self._line.append(sequence.sequence_id)
            if sequence.output_tokens > 1:
                tpots.append((now - sequence.first_token_seconds) / (sequence.output_tokens - 1))
                self._limiter.streamed(tpots[-1], sequence.first_token_seconds, now)
        return tpots

    def _look(self, now: float) -> None:
        scheduler = self._engine.scheduler
        running, waiting = scheduler.num_running, scheduler.num_waiting
        usage = scheduler.pool.num_used / scheduler.pool.num_blocks
        self._seen.append(
            Telemetry(
                now,
                running=running,
                waiting=waiting,
                preemptions=scheduler.counters.preemptions,
                kv_usage=usage,
                in_flight=0,
                sent=0,
            )
        )
        if len(self._seen) > self._crowd.late_looks:
            shown = self._seen.popleft()
            self._limiter.observe(replace(shown, at_seconds=now, in_flight=self._in_flight, sent=self._sent))

    def _send(self, now: float) -> None:
        while self._line and self._in_flight < self._limiter.limit:
            self._line.popleft()
            self._in_flight += 1
            self._sent += 1
            prompt, output = self._around(self._crowd.prompt_tokens), self._around(self._crowd.output_tokens)
            self._engine.submit(SequenceState(self._sent, prompt, output), now)

    def _around(self, tokens: int) -> int:
        return self._rng.randint(tokens // 2, tokens * 3 // 2)


def static(limit: int) -> Limiter:
    """One that stays where it is."""
    limiter = Limiter(adaptive=False)
    limiter.bind(limit, 1)
    return limiter
