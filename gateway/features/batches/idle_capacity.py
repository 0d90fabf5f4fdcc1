"""Which capacity is idle: whether an engine takes one more offline line without an effect on other requests. Pure.

An engine has capacity for a line while slots and KV cache are left beyond the guarded ones, no prompt is in prefill
there, and the predicted time between tokens stays below the objective.

Of each interval between two tokens, a decode step takes a part, and prefills of interactive requests take another. The
prefills of lines may take the rest: that is the free share of the engine's time.
"""

from dataclasses import KW_ONLY, dataclass, field
from math import exp, inf
from typing import Final

from gateway.core.request import Demand
from gateway.core.routing.engine import MEMORY_SECONDS, Engine, prefill_seconds
from gateway.core.routing.estimates import CostModel
from gateway.core.scheduling.admission import Capacity
from gateway.core.scheduling.scheduler import Lease

OBJECTIVE_SHARE: Final = 0.92  # of the objective: the adaptive limit grows only while streams are faster than it
_MOST_SLOWDOWN: Final = 2.0  # of a decode step, compared with an empty engine: without an objective
_ENOUGH_SHARE: Final = 0.2  # of an engine's time, to be free for any prefill that others wait for
_FADING: Final = 0.98  # of earlier lines, with each that ends
_MOST_PREFILL_SHARE: Final = 0.9
_BURST_SECONDS: Final = 1.0  # of one engine's requests show that a burst has begun
_LEAST_BURST_SECONDS: Final = 0.2
_MOST_POOLED: Final = 2  # calls of pooled lines on an engine: one computes, and the next is there when it ends


class Prefills:
    """The prefills of one model's requests: the last offline one on each engine, the share of others, and what lines
    cost for a token; and how many calls of pooled lines are in flight on each engine.

    That share of time is a mean over a short time, because bursts begin suddenly, and over all engines, to be steady.
    """

    __slots__ = (
        "_added", "_at", "_last", "_others", "_others_share", "_pooled", "_spent_seconds", "_tokens", "_total",
    )  # fmt: skip

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, float]] = {}  # by the engine's index: when it was sent, and its length
        self._pooled: dict[int, int] = {}
        self._added = 0.0  # by offline lines, since the last look
        self._at = self._total = self._others = self._others_share = 0.0  # at the last look
        self._spent_seconds = self._tokens = 0.0  # of the last lines: for their prefills, and what they generated then

    def started(self, lease: Lease, now: float) -> None:
        """An offline line is sent: note its prefill, apart from those of others."""
        self._added += lease.prefill_seconds
        self._last[lease.engine_index] = now, lease.prefill_seconds
        self._count_pooled(lease, 1)

    def ended(self, lease: Lease) -> None:
        """An offline line is answered or paused: note what its prefill was good for."""
        self._count_pooled(lease, -1)
        if not lease.demand.divisible:
            tokens = max(lease.streamed_tokens, (lease.served_tokens or 0) - lease.uncached_tokens)
            model, engine = lease.calibration.model, lease.engine
            spent_seconds = prefill_seconds(model, engine.slowness, lease.demand.prompt_tokens, lease.hit_tokens)
            self._spent_seconds = _FADING * self._spent_seconds + spent_seconds
            self._tokens = _FADING * self._tokens + tokens

    def least_share(self, sequences: int, step_seconds: float) -> float:
        """The least free share of an engine's time for one more line to start there, if `sequences` generate a token
        in each step. With less, lines would only displace each other.
        """
        # The last lines took spent / tokens seconds of prefill for each token that they generated. If so many sequences
        # were lines, each step would use up `sequences` tokens' worth of prefill, which other lines have to bring
        # again for as many to be kept running: this part of the time. Before the first line ends, spent is 0.
        return min(_ENOUGH_SHARE, sequences * self._spent_seconds / (max(1.0, self._tokens) * step_seconds))

    def has_most_pooled(self, engine: Engine) -> bool:
        """Whether so many calls of pooled lines are in flight there as may be, however long they were predicted."""
        return self._pooled.get(engine.index, 0) >= _MOST_POOLED

    def _count_pooled(self, lease: Lease, more: int) -> None:
        if lease.demand.divisible:
            self._pooled[lease.engine_index] = self._pooled.get(lease.engine_index, 0) + more

    def next_seconds(self, engine: Engine, share: float) -> float:
        """When the next offline line may be sent there, so that they take this share of the time."""
        at, length = self._last.get(engine.index, (0.0, 0.0))
        return at + length / share

    def others_share(self, engines: list[Engine], now: float) -> float:
        """The share of the engines' time that prefills of other requests take."""
        passed = now - self._at
        if passed > 0 or self._added:
            count = len(engines)
            window_seconds = max(_BURST_SECONDS / count, _LEAST_BURST_SECONDS)
            # `total` is a sum of prefill seconds that fades with the time constant MEMORY_SECONDS. What is left of its
            # growth since the last look without the lines' own prefills was sent by others. That goes into a mean with
            # a shorter time constant, the window.
            total = MEMORY_SECONDS * sum([engine.load.prefill_share(now) for engine in engines])
            added = total - self._total * exp(-passed / MEMORY_SECONDS) - self._added
            self._others = self._others * exp(-passed / window_seconds) + added / (window_seconds * count)
            self._others_share = min(_MOST_PREFILL_SHARE, max(0.0, self._others))
            self._at, self._total, self._added = now, total, 0.0
        return self._others_share


@dataclass(frozen=True, slots=True)
class IdleCapacity(Capacity):
    """Checks engines for offline lines of one model."""

    _: KW_ONLY
    prefills: Prefills = field(default_factory=Prefills)
    engines: list[Engine] = field(default_factory=list)  # of the model
    itl_objective_seconds: float | None = None

    def is_open(self, engine: Engine, now: float, *, guarded: bool = True) -> bool:  # noqa: ARG002
        if self._is_busy(engine, now):  # first: it is the usual case, and cheap
            return False
        return Capacity.is_open(self, engine, now, guarded=True) and self._has_no_effect(engine, 0, 0, now)

    def admits(self, engine: Engine, demand: Demand, now: float, *, guarded: bool = True) -> bool:  # noqa: ARG002
        if self._is_busy(engine, now) or not Capacity.admits(self, engine, demand, now, guarded=True):
            return False
        if demand.divisible:
            return self._has_no_effect(engine, 0, 0, now)
        return self._has_no_effect(engine, demand.sequences, demand.prompt_tokens, now)

    def opens_seconds(self, engine: Engine, now: float) -> float:
        """When it may be open to the next line by time alone: a prefill ends, and its share of the time has passed."""
        ahead_seconds = engine.load.prefill_ahead_seconds(now)
        if self.prefills.has_most_pooled(engine) or (engine.load.pending and ahead_seconds <= 0):
            return inf
        free_share, least_share = self._shares(engine, 0, 0, now)
        opens = now + ahead_seconds
        if free_share > least_share:
            opens = max(opens, self.prefills.next_seconds(engine, free_share))
        return opens if opens > now else inf

    def excess(self, engine: Engine, now: float) -> int:
        """Sequences that are too many there for the time between tokens; about."""
        model, load = self.calibration.model, engine.load
        most = self._most_seconds(engine) * (1 - self.prefills.others_share(self.engines, now))
        over = step_seconds(model, engine) - most
        if over <= 0 or not load.in_flight:
            return 0
        # The step is longer by this for each sequence with a mean context.
        return 1 + int(over / (engine.slowness * (model.c + model.d * load.context_tokens / load.in_flight)))

    def _is_busy(self, engine: Engine, now: float) -> bool:
        """Whether a prompt is in prefill there, or as many pooled lines are in flight as may be."""
        load = engine.load
        if load.pending:
            load.prefill_ahead_seconds(now)  # it ends prefills that are not seen
        return bool(load.pending) or self.prefills.has_most_pooled(engine)

    def _has_no_effect(self, engine: Engine, sequences: int, tokens: int, now: float) -> bool:
        """Whether interactive requests there, and those that may come, would not feel so many more sequences."""
        if not engine.load.in_flight:
            return True
        free_share, least_share = self._shares(engine, sequences, tokens, now)
        return free_share > least_share and now >= self.prefills.next_seconds(engine, free_share)

    def _shares(self, engine: Engine, sequences: int, tokens: int, now: float) -> tuple[float, float]:
        """The free share of the engine's time with so many more sequences and tokens, and the least one for a line."""
        step, most = step_seconds(self.calibration.model, engine, sequences, tokens), self._most_seconds(engine)
        prefills, running = self.prefills, engine.load.in_flight - engine.load.pooled
        return 1 - step / most - prefills.others_share(self.engines, now), prefills.least_share(running, most)

    def _most_seconds(self, engine: Engine) -> float:
        """The most time between two tokens there."""
        objective = self.itl_objective_seconds
        if objective is not None:
            return OBJECTIVE_SHARE * objective
        return _MOST_SLOWDOWN * engine.slowness * self.calibration.model.a


def step_seconds(model: CostModel, engine: Engine, sequences: int = 0, tokens: int = 0) -> float:
    """A step without prefill, with so many more sequences and tokens in the KV cache; 0 = none generates tokens."""
    load = engine.load
    generating = load.in_flight - load.pooled + sequences
    if generating <= 0:
        return 0.0
    return engine.slowness * (model.a + model.c * generating + model.d * (load.context_tokens + tokens))
