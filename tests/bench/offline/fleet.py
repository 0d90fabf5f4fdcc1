"""Simulated engines under the gateway's own scheduler, in virtual time: interactive requests and offline lines.

As in the gateway, the queue is scanned once after all events of a moment, and every 50 ms. A revoked line is aborted at
once, frees its place at the engine's next step, and goes on when its turn comes: what it had generated is part of its
prompt then. The engine reuses the blocks of its first prompt that its cache still has: free blocks are used for others
in the order in which they became free. Lines and requests share no prefix with each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from gateway.core.feedback import Learning
from gateway.core.request import Demand, Usage
from gateway.core.routing.cache_view import HitAccuracy, PrefixIndex
from gateway.core.routing.engine import Engine
from gateway.core.routing.estimates import Calibrations, CostModel, Estimates, OutputLengths
from gateway.core.routing.policy import Affinity, HitPredictor, PrefixPolicy
from gateway.core.scheduling.scheduler import Lease, Scheduler, SchedulerSettings
from gateway.core.scheduling.wait_queue import Queue, Ticket
from gateway.features.batches.offline import OfflineQueue
from gateway.features.batches.pace import OfflineLine
from loadtest.engine import scheduler as simulated
from loadtest.engine.kv_cache import SequenceState
from loadtest.engine.step_time import PRESETS, Preset

ENGINES = 4
MODEL = "m"
_BLOCK_TOKENS, _BLOCKS = 16, 27_000
_LIMITS = simulated.Limits(num_blocks=_BLOCKS, block_size=_BLOCK_TOKENS)
_TICK_SECONDS = 0.05
_REPORTED_TOKENS = 8  # of a stream, between two reports to the scheduler
_DAY_SECONDS = 86400.0
_KEY_BITS = 16  # of the number of a block in its prompt


@dataclass(slots=True, eq=False)
class Request:
    """A request and what happened to it. Times are negative until they have come."""

    number: int
    arrived_seconds: float
    prompt_tokens: int
    output_tokens: int
    is_line: bool  # of the offline batch
    sequence: SequenceState | None = None
    lease: Lease | None = None
    first_token_seconds: float = -1.0
    finished_seconds: float = -1.0
    earlier_tokens: int = 0  # of the answer, before a line was paused
    paused_number: int | None = None  # of the line, before it was first paused

    @property
    def first_number(self) -> int:
        """By which its prompt is told from others."""
        return self.number if self.paused_number is None else self.paused_number

    @property
    def own_prompt_tokens(self) -> int:
        """Without what had been generated when it was paused."""
        return self.prompt_tokens - self.earlier_tokens

    def keys(self, tokens: int) -> range:
        """Of the full blocks of its first tokens; no other line or request has the same."""
        first = self.first_number << _KEY_BITS
        return range(first, first + tokens // _BLOCK_TOKENS)

    @property
    def ttft_seconds(self) -> float:
        return self.first_token_seconds - self.arrived_seconds

    @property
    def tpot_seconds(self) -> float:
        return (self.finished_seconds - self.first_token_seconds) / max(1, self.output_tokens - 1)


class Rule(Protocol):
    """How many lines of the batch are in flight or waiting, and in which class."""

    is_offline: bool  # the gateway's own class; else they are batch requests

    @property
    def lines(self) -> int:
        """As many as may be sent or wait now."""

    def answered(self, request: Request) -> None:
        """A request got its answer."""


@dataclass
class _Site:
    """One engine: simulated, and as the scheduler knows it."""

    known: Engine
    engine: simulated.Scheduler = field(default_factory=lambda: simulated.Scheduler(_LIMITS, PRESETS[Preset.H100_8B]))
    running: dict[int, Request] = field(default_factory=dict)
    step: simulated.Step | None = None
    ends_seconds: float = math.inf

    def begin(self, now: float) -> None:
        """Start a step, if none runs and there is work."""
        if self.step is None:
            self.step = self.engine.schedule(now)
            self.ends_seconds = math.inf if self.step is None else now + self.step.duration_seconds


class Fleet:
    """Runs interactive requests by their arrival, and lines of an endless batch beside them."""

    def __init__(self, arrivals: Sequence[Request], rule: Rule | None, itl_objective_seconds: float | None) -> None:
        self._arrivals = arrivals
        self._rule = rule
        kv_tokens = _BLOCK_TOKENS * _BLOCKS
        sites = [
            Engine(index, f"engine-{index}", None, cap=256, slots=256, kv_cache_tokens=kv_tokens)
            for index in range(ENGINES)
        ]
        self._sites = [_Site(site) for site in sites]
        index, accuracy, estimates = PrefixIndex([kv_tokens] * ENGINES), HitAccuracy(), Estimates()
        policy = PrefixPolicy(HitPredictor(index, accuracy), estimates, Affinity())
        self._learning = Learning(estimates, index, accuracy)
        self._lengths = OutputLengths()
        self._queue = Queue(1 << 30, 1 << 60)
        settings, calibrations = SchedulerSettings(), Calibrations(CostModel())
        self._scheduler = Scheduler(
            {MODEL: sites}.get,
            policy,
            queue=self._queue,
            lengths=self._lengths,
            calibrations=calibrations,
            settings=settings,
        )
        self._offline = OfflineQueue(
            scheduler=self._scheduler, queue=self._queue, itl_objective_seconds=itl_objective_seconds
        )
        self._tickets: dict[Ticket, Request] = {}
        self._numbers = count(len(arrivals))
        self._lines = 0  # in flight or waiting
        self._now = 0.0
        self.revoked = 0
        self.done: list[Request] = []

    def run(self, seconds: float) -> list[Request]:
        """All requests that were answered in this time."""
        at, tick = 0, _TICK_SECONDS
        while True:
            arrival = self._arrivals[at].arrived_seconds if at < len(self._arrivals) else math.inf
            now = self._now = min(arrival, tick, *[site.ends_seconds for site in self._sites])
            if now >= seconds:
                return self.done
            if arrival == now:
                self._place(self._arrivals[at])
                at += 1
            for site in self._sites:
                if site.ends_seconds == now:
                    self._commit(site)
            tick = now + _TICK_SECONDS if now >= tick else tick
            self._feed()
            self._scan()
            for site in self._sites:
                site.begin(now)

    def _feed(self) -> None:
        """New lines, as far as the rule has them sent."""
        while self._rule is not None and self._lines < self._rule.lines:
            self._lines += 1
            number = next(self._numbers)
            prompt_tokens, output_tokens = lengths(number)
            self._place(Request(number, self._now, prompt_tokens, output_tokens, True))

    def _place(self, request: Request) -> None:
        offline = None
        if request.is_line and self._rule is not None and self._rule.is_offline:
            offline = OfflineLine(
                _DAY_SECONDS,
                lambda now: _DAY_SECONDS - now,
                lambda: self._abort(request),
                continues=True,
            )
        keys = request.keys(request.own_prompt_tokens)
        demand = Demand(
            MODEL,
            "batch" if request.is_line else "",
            batch=request.is_line,
            keys=tuple(keys),
            edges=tuple(range(_BLOCK_TOKENS, _BLOCK_TOKENS * len(keys) + 1, _BLOCK_TOKENS)),
            prompt_size=request.prompt_tokens,
            prompt_tokens=request.prompt_tokens,
            streams=True,
            generated_tokens=0 if offline is None else request.earlier_tokens,
            offline=offline,
        )
        placed = (self._scheduler if offline is None else self._offline).place(demand, self._now)
        if isinstance(placed, Ticket):
            self._tickets[placed] = request
        else:
            self._send(request, placed)

    def _send(self, request: Request, lease: Lease) -> None:
        keys = request.keys(request.prompt_tokens)
        sequence = SequenceState(request.number, request.prompt_tokens, request.output_tokens, prompt_keys=keys)
        sequence.arrive(self._now)
        request.sequence, request.lease = sequence, lease
        site = self._sites[lease.engine_index]
        site.running[request.number] = request
        site.engine.add(sequence)

    def _abort(self, request: Request) -> None:
        """The line's lease is revoked: its connection is closed, and it waits again."""
        assert request.lease is not None
        assert request.sequence is not None
        self.revoked += 1
        site = self._sites[request.lease.engine_index]
        del site.running[request.number]
        generated = min(site.engine.generated_tokens(request.sequence), request.output_tokens - 1)
        site.engine.abort(request.sequence)
        request.lease.on_failure()
        self._scheduler.release(request.lease, self._now, served_tokens=0)
        prompt, output = request.prompt_tokens + generated, request.output_tokens - generated
        rest = Request(next(self._numbers), self._now, prompt, output, True)
        rest.earlier_tokens = request.earlier_tokens + generated
        rest.paused_number = request.first_number
        self._place(rest)

    def _scan(self) -> None:
        granted = self._scheduler.scan_queue(MODEL, self._now)
        if self._offline:
            granted += self._offline.scan(self._now)
        for ticket, lease_or_error in granted:
            assert isinstance(lease_or_error, Lease)
            self._send(self._tickets.pop(ticket), lease_or_error)

    def _commit(self, site: _Site) -> None:
        assert site.step is not None
        done = site.engine.commit(site.step, self._now)
        site.step, site.ends_seconds = None, math.inf
        for sequence in done.started:
            if (request := site.running.get(sequence.sequence_id)) is not None and request.lease is not None:
                request.first_token_seconds = self._now
                self._scheduler.first_token(request.lease, self._now)
        for request in site.running.values():
            self._report(site, request)
        for sequence in done.finished:
            if (request := site.running.pop(sequence.sequence_id, None)) is not None:
                self._finish(request)

    def _report(self, site: _Site, request: Request) -> None:
        lease, sequence = request.lease, request.sequence
        if lease is not None and sequence is not None:
            more = site.engine.generated_tokens(sequence) - lease.streamed_tokens
            if more >= _REPORTED_TOKENS:
                lease.on_tokens(more)

    def _finish(self, request: Request) -> None:
        assert request.lease is not None
        assert request.sequence is not None
        request.finished_seconds = self._now
        usage = Usage(request.prompt_tokens, request.output_tokens, request.sequence.cached_tokens)
        request.lease.on_usage(usage)
        self._scheduler.release(request.lease, self._now, answered=True, served_tokens=request.lease.served_tokens)
        self._lengths.answered(request.lease.demand, usage)
        self._learning.answered(request.lease.demand, request.lease.engine_index, request.lease.hit_tokens, usage)
        self._lines -= request.is_line
        self.done.append(request)
        if self._rule is not None:
            self._rule.answered(request)


def lengths(number: int) -> tuple[int, int]:
    """Tokens of prompt and answer: on average 1,000 and 200, for lines and interactive requests alike."""
    return 600 + 100 * (number * 7 % 9), 100 + 20 * (number * 5 % 11)
