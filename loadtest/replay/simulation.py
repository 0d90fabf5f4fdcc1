"""The replay itself: arrivals, engine steps and the router's reactions, in order of virtual time."""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace

from loadtest.engine.kv_cache import SequenceState
from loadtest.engine.scheduler import Committed
from loadtest.engine.step_time import StepTime
from loadtest.replay.engine import ReplayEngine, ReplayRequest, Sending
from loadtest.replay.policies import RouterContext, router_of
from loadtest.replay.router import Router
from loadtest.replay.scenario import Scenario
from loadtest.replay.summary import PolicyFigures, figures_of
from loadtest.replay.workload import FlashCrowd, requests_of
from loadtest.workloads.trace import Trace

_MOST_ANSWER_BLOCKS_BITS = 24
_LOOK_SECONDS = 0.05  # how often the gateway looks through its line though nothing happened


def engines_of(scenario: Scenario, block_tokens: int) -> list[ReplayEngine]:
    limits = scenario.limits(block_tokens)
    return [ReplayEngine(limits, _slowed(scenario.step_time, speed)) for speed in scenario.speeds()]


def _slowed(step: StepTime, factor: float) -> StepTime:
    if factor == 1.0:
        return step
    return replace(
        step,
        base_seconds=step.base_seconds * factor,
        per_prefill_token_seconds=step.per_prefill_token_seconds * factor,
        per_attention_pair_seconds=step.per_attention_pair_seconds * factor,
        per_decode_sequence_seconds=step.per_decode_sequence_seconds * factor,
        per_context_token_seconds=step.per_context_token_seconds * factor,
    )


class Simulation:
    """Owner of virtual time. A request is sent on at once: the network takes none."""

    def __init__(
        self,
        requests: Sequence[ReplayRequest],
        engines: Sequence[ReplayEngine],
        router: Router,
        *,
        wipe: tuple[float, Sequence[int]] | None = None,
        join_seconds: float = math.inf,
    ) -> None:
        self._engines = engines
        self._router = router
        self._requests = requests
        self._arrivals = [(r.arrival_seconds, r.number) for r in requests if r.arrival_seconds != math.inf]
        heapq.heapify(self._arrivals)
        self._events = [math.inf] * len(engines)
        self._wipe = wipe
        self._join_seconds = join_seconds
        self._look_seconds = math.inf
        self._scrape_seconds = router.scrape_seconds
        self.now_seconds = 0.0
        self.left = len(requests)

    def run(self) -> None:
        events, arrivals = self._events, self._arrivals
        while self.left:
            engine_event = min(events)
            arrival = arrivals[0][0] if arrivals else math.inf
            now = min(engine_event, arrival, self._look_seconds, self._scrape_seconds, self._join_seconds)
            if now == math.inf or (now == self._scrape_seconds and self._is_idle()):
                raise RuntimeError(f"{self.left} requests are never answered")
            self.now_seconds = now
            if self._wipe is not None and now >= self._wipe[0]:
                self._forget()
            if now >= self._join_seconds:
                self._join_seconds = math.inf
                self._router.joined(now)
            if now >= self._scrape_seconds:
                self._scrape(now)
            elif engine_event == now:
                self._advance(events.index(now), now)
            elif arrival == now:
                self._arrive(now)
            self._settle(now)
            for index, engine in enumerate(self._engines):  # whoever looks at an engine makes it catch up
                self._events[index] = engine.next_event_seconds

    def _arrive(self, now: float) -> None:
        _, number = heapq.heappop(self._arrivals)
        self._send(self._router.arrived(self._requests[number], now), now)

    def _advance(self, index: int, now: float) -> None:
        engine = self._engines[index]
        done: Committed = engine.advance()
        self._events[index] = engine.next_event_seconds
        for sequence in done.started:
            request = self._requests[sequence.sequence_id]
            if request.first_token_seconds < 0:
                request.begin(now, sequence.cached_tokens)
                self._router.first_token(request, now)
        for sequence in done.finished:
            self._finish(self._requests[sequence.sequence_id], sequence, now)

    def _finish(self, request: ReplayRequest, sequence: SequenceState, now: float) -> None:
        request.finish(now, sequence)
        self.left -= 1
        self._router.finished(request, now)
        following = request.following
        if following is not None:
            following.arrive(now + following.think_seconds)
            heapq.heappush(self._arrivals, (following.arrival_seconds, following.number))

    def _settle(self, now: float) -> None:
        is_look = now >= self._look_seconds
        self._send(self._router.settle(now, is_look=is_look), now)
        if not self._router.waiting:
            self._look_seconds = math.inf
        elif is_look or self._look_seconds == math.inf:
            self._look_seconds = now + _LOOK_SECONDS

    def _send(self, sendings: list[Sending], now: float) -> None:
        for request, index in sendings:
            engine = self._engines[index]
            sequence = _sequence(request, engine.scheduler.limits.block_size)
            request.send(sequence, index, now)
            engine.submit(sequence, now)
            self._events[index] = engine.next_event_seconds

    def _is_idle(self) -> bool:
        return not self._arrivals and min(self._events) == math.inf == self._look_seconds

    def _scrape(self, now: float) -> None:
        """The gateway reads the engines' metrics."""
        for engine in self._engines:
            engine.catch_up(now)
        self._router.scraped(now)
        self._scrape_seconds = now + self._router.scrape_seconds

    def _forget(self) -> None:
        assert self._wipe is not None
        for index in self._wipe[1]:
            self._engines[index].forget_cache()
        self._wipe = None


def _sequence(request: ReplayRequest, block_tokens: int) -> SequenceState:
    return SequenceState(
        request.number,
        request.prompt_tokens,
        request.output_tokens,
        prompt_keys=request.keys,
        output_keys=lambda: _answer_keys(request, block_tokens),
    )


def _answer_keys(request: ReplayRequest, block_tokens: int) -> Sequence[int]:
    """Keys of the blocks that the answer completes: those that a later prompt has, else keys of its own."""
    if request.answer_keys:
        return request.answer_keys
    completed = (request.prompt_tokens + request.output_tokens - 1) // block_tokens - len(request.keys)
    first = -(request.number + 1) << _MOST_ANSWER_BLOCKS_BITS
    return range(first, first + completed)


def replay(trace: Trace, scenario: Scenario, policy: str) -> PolicyFigures:
    """Replay the trace under a policy. The same arguments give the same figures, but for the CPU time."""
    faults = scenario.faults
    requests = requests_of(
        trace,
        scenario.engines,
        rate_per_second=scenario.rate_per_second,
        seed=scenario.seed,
        crowd=FlashCrowd() if faults.flash_crowd else None,
        lengths=scenario.lengths,
    )
    engines = engines_of(scenario, trace.block_tokens)
    lots = random.Random(f"{policy}/{scenario.seed}")
    router = router_of(policy, RouterContext(scenario, trace.block_tokens, engines, rng=lots))
    # Of a closed loop the last arrival is not known beforehand: the sessions' starts give its length.
    length = max(request.arrival_seconds for request in requests if request.arrival_seconds < math.inf)
    wipe = None
    if faults.restart_at is not None:
        wipe = faults.restart_at * length, range(round(faults.restart_share * scenario.engines))
    join_seconds = math.inf if faults.join_at is None else faults.join_at * length
    began = time.process_time()
    Simulation(requests, engines, router, wipe=wipe, join_seconds=join_seconds).run()
    return figures_of(requests, scenario, engines, cpu_seconds=time.process_time() - began, join_seconds=join_seconds)
