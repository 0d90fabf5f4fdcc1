"""The adaptive limit of sequences in flight on a backend: it grows while in use, and falls at signs of overload. Pure.

Its inputs are samples of the engine's metrics and the pace of completed streams. `routing.kv_reservations` predicts KV
cache needs; this is the feedback for everything unpredictable.

Metrics may mislead, so they must be plausible for an engine. It preempts only with a full KV cache. Requests wait only
while others run, and with room in the KV cache a lower limit reduces the waiting requests, not the running ones;
otherwise the shown requests do not really wait. Requests behind a long prefill wait for that, whatever the limit.
"""

import math
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum

from gateway.core.backends.facts import Telemetry

DEFAULT_MAX_NUM_SEQS = 256  # vLLM's own default on most GPUs

_FALL = 0.9  # of the running sequences, if these were too many
_LEAST_FALL = 0.95  # of the running sequences, if streams are only a little too slow
_GROWTH = 8  # a step is an eighth of the limit at most
_APPROACH = 4  # below a level that was too high, a quarter of the way
_HOLD_SECONDS = 5.0  # at such a level before passing it: outputs go on growing for a while
_FULL = 8  # the limit is in use when at most an eighth of it is free: the last slots are kept for some, and
_FEW = 4  # a request may need several together. Of fewer slots than these all must be taken.
_KV_FULL = 0.9  # of the KV cache: growing now would preempt as soon as the answers grow
_PREEMPTED = 0.2  # of the running sequences, in recent time: fewer preemptions cost less than fewer sequences
_RECENT_SECONDS = 30.0  # time constant of their sum
_WAITING = 2  # harmless number of requests waiting inside the engine, and one more for each 64 in flight
_ASSUMED_STEP_SECONDS = 0.05  # until streams have shown the pace
_LATE_SECONDS = 10.0  # most lag of metrics: after this a fall counts as effective
_FOREIGN_FLOOR = 32  # this part of the upper bound remains in the presence of others' traffic
_ENOUGH_STREAMS = 8  # to judge their pace
_UNHEARD_SECONDS = 30.0  # after too slow streams, the limit waits at least this long for others before it grows
_UNHEARD_LIVES = 2.0  # and at least this many stream durations
_RISE, _SINK = 0.2, 0.05  # weights of slower and faster streams: the mean of an upper part


class LimitReason(StrEnum):
    """Why the limit moved."""

    PREEMPTIONS = "preemptions"
    WAITING = "waiting"
    INTER_TOKEN_LATENCY = "inter_token_latency"
    ROOM = "room"  # all is in use, and nothing speaks against more
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class LimitChange:
    """A change of the limit."""

    at_seconds: float
    reason: LimitReason
    before: int
    _: KW_ONLY
    after: int


class Limiter:
    """The limit of one backend, between 1 and `upper`; without `adaptive` always `upper`."""

    def __init__(self, *, adaptive: bool = True, itl_objective_seconds: float | None = None) -> None:
        self._adaptive = adaptive
        self._objective = itl_objective_seconds or math.inf
        self._known_upper: int | None = None
        self._start = DEFAULT_MAX_NUM_SEQS
        self.upper = self.limit = self._start
        self.last_change: LimitChange | None = None
        self._last: Telemetry | None = None
        self._settled_seconds: float | None = -math.inf  # since when the last fall has had its effect; None = not yet
        self._drained_seconds: float | None = None  # since when no more are in flight than the limit
        self._foreign = 0  # sequences of others, at the last fall
        self._ceiling: int | None = None  # a level that was too high, to be approached slowly
        self._probe = 1  # the next step beyond the ceiling
        self._preempted = 0.0  # recently
        self._not_waiting = 0  # of the sequences shown as waiting
        self._before: tuple[int, _Evidence] | None = None  # before a fall for waiting requests: limit and evidence
        self.pace_seconds = 0.0  # per token, of the slower recent streams; 0 = unknown
        self._life_seconds = 0.0  # of a stream
        self._streams = 0

    def apply(self, *, adaptive: bool, itl_objective_seconds: float | None) -> None:
        """Take over other settings. Learned state stays; without `adaptive` the limit returns to `upper`."""
        self._adaptive = adaptive
        self._objective = itl_objective_seconds or math.inf
        if not adaptive:
            self.limit, self._ceiling, self._before = self.upper, None, None

    def bind(self, known: int | None, engines: int) -> None:
        """Set the upper bound, configured or reported; None = learn it, beginning at vLLM's default."""
        start = known or DEFAULT_MAX_NUM_SEQS * engines
        if (known, start) == (self._known_upper, self._start):
            return
        untouched = self.limit == self.upper
        self._known_upper, self._start, self.upper = known, start, start
        self.limit = start if untouched else min(self.limit, start)

    def start_from(self, limit: int, upper: int) -> None:
        """Continue from the limit learned by another process, within the known bound."""
        self.upper = upper if self._known_upper is None else self._known_upper
        self.limit = min(limit, self.upper)

    def restarted(self, now: float) -> LimitChange | None:
        """Another process answers: discard the learned state."""
        self._last, self._ceiling, self._probe, self._before = None, None, 1, None
        self._preempted, self._not_waiting = 0.0, 0
        self._settled_seconds = now
        self.pace_seconds, self._streams = 0.0, 0
        self.upper = self._start
        return self._change_to(self._start, LimitReason.RESTART, now)

    def streamed(self, tpot_seconds: float, first_token_seconds: float, ended_seconds: float) -> None:
        """A stream ended, with its mean time per token after the first, including stalls by other prefills."""
        settled = self._settled_seconds
        if settled is None or ended_seconds - settled < settled - first_token_seconds:
            return  # most of it was sent under a former limit
        pace, life = self.pace_seconds, ended_seconds - first_token_seconds
        self._life_seconds += _RISE * (life - self._life_seconds)
        self._streams += 1
        if not pace:
            self.pace_seconds = tpot_seconds
        else:
            self.pace_seconds = pace + (_RISE if tpot_seconds > pace else _SINK) * (tpot_seconds - pace)

    def observe(self, sample: Telemetry | None) -> LimitChange | None:
        """Take a sample (None = none for a while). Effects of requests sent before the last fall change nothing."""
        last, self._last = self._last, sample
        if sample is not None and sample.running == 0:
            self._not_waiting = sample.waiting
        if not self._adaptive or last is None or sample is None:
            return None
        if sample.preemptions < last.preemptions:
            return self.restarted(sample.at_seconds)
        shown = min(last.waiting, sample.waiting)
        self._not_waiting = min(self._not_waiting, shown)
        if self._settled_seconds is None:
            self._settle(sample)  # only later counts show the effect of the new limit
            return None
        faded = math.exp((last.at_seconds - sample.at_seconds) / _RECENT_SECONDS)
        self._preempted = faded * self._preempted + sample.preemptions - last.preemptions
        evidence = _Evidence(
            last, sample, self.pace_seconds or _ASSUMED_STEP_SECONDS, limit=self.limit, not_waiting=self._not_waiting
        )
        signs = self._signs(evidence)
        if LimitReason.WAITING in signs and (before := self._for_nothing(evidence)):
            self._not_waiting, self._ceiling = shown, None
            return self._change_to(min(self.upper, max(self.limit, before)), LimitReason.ROOM, evidence.at_seconds)
        return self._fall(evidence, signs) if signs else self._grow(evidence)

    def _settle(self, sample: Telemetry) -> None:
        """Note when the requests sent before the fall have ended, by the gateway's count and by the engine's."""
        if sample.in_flight > self.limit:
            return
        if self._drained_seconds is None:
            self._drained_seconds = sample.at_seconds
        is_shown = sample.running + sample.waiting <= self.limit + self._foreign + _WAITING
        if is_shown or sample.at_seconds - self._drained_seconds >= _LATE_SECONDS:
            self._settled_seconds = sample.at_seconds

    def _for_nothing(self, evidence: "_Evidence") -> int | None:
        """The limit before a fall that reduced running rather than waiting requests of an engine with free KV cache."""
        if self._before is None or evidence.kv_usage > _KV_FULL:
            return None
        limit, before = self._before
        self._before = None
        return limit if before.running - evidence.running > before.waiting - evidence.waiting else None

    def _signs(self, evidence: "_Evidence") -> dict[LimitReason, float]:
        """The signs of overload, each with the level that would end it."""
        signs: dict[LimitReason, float] = {}
        if evidence.in_flight == 0:
            return signs  # whatever it is, it is not ours
        if evidence.kv_usage > _KV_FULL and self._preempted > _PREEMPTED * evidence.running:
            signs[LimitReason.PREEMPTIONS] = _FALL * evidence.ran
        if evidence.own_waiting > evidence.tolerated and evidence.generates:
            signs[LimitReason.WAITING] = evidence.ran + evidence.tolerated / 2
        if self._streams >= _ENOUGH_STREAMS and self.pace_seconds > self._objective:
            fall = min(_LEAST_FALL, self._objective / self.pace_seconds)
            signs[LimitReason.INTER_TOKEN_LATENCY] = evidence.in_flight * fall
        return signs

    def _fall(self, evidence: "_Evidence", signs: dict[LimitReason, float]) -> LimitChange | None:
        floor = max(1, self.upper // _FOREIGN_FLOOR) if evidence.foreign > evidence.tolerated else 1
        # Waiting requests are a number: a limit far above the sequences in flight need not be halved again and again.
        level = min(self.limit, evidence.in_flight) if LimitReason.WAITING in signs else self.limit
        after = min(self.limit - 1, max(math.ceil(level / 2), math.ceil(min(signs.values()))))
        after = min(self.limit, max(floor, after))
        if after == self.limit:
            return None
        ran = after if [*signs] == [LimitReason.INTER_TOKEN_LATENCY] else evidence.ran  # too slowly, all of them
        self._ceiling, self._probe = min(self.limit, max(after, ran)), 1
        self.pace_seconds, self._streams, self._preempted = 0.0, 0, 0.0
        self._settled_seconds, self._drained_seconds, self._foreign = None, None, evidence.foreign
        self._before = (self.limit, evidence) if LimitReason.WAITING in signs else None
        return self._change_to(after, next(iter(signs)), evidence.at_seconds)

    def _grow(self, evidence: "_Evidence") -> LimitChange | None:
        limit = self.limit
        unused = max(1, limit // _FULL) if limit >= _FEW else 0
        if evidence.in_flight < limit - unused or evidence.own_waiting > evidence.tolerated // 2:
            return None
        if evidence.kv_usage > _KV_FULL or self._may_be_slow(evidence.at_seconds):
            return None
        if limit >= self.upper and (self._known_upper is not None or evidence.waiting or evidence.running < limit):
            return None
        after = limit + self._step(evidence.at_seconds)
        if self._known_upper is not None or limit < self.upper:
            after = min(self.upper, after)  # beyond a learned bound, only sequences that ran count
        self.upper = max(self.upper, after)
        return self._change_to(after, LimitReason.ROOM, evidence.at_seconds)

    def _may_be_slow(self, now: float) -> bool:
        if self._streams >= _ENOUGH_STREAMS:
            return self.pace_seconds > _LEAST_FALL * self._objective
        last = self.last_change
        if last is None or last.reason is not LimitReason.INTER_TOKEN_LATENCY:
            return False
        return now - last.at_seconds < max(_UNHEARD_SECONDS, _UNHEARD_LIVES * self._life_seconds)

    def _step(self, now: float) -> int:
        limit, ceiling = self.limit, self._ceiling
        largest = max(1, limit // _GROWTH)
        if ceiling is None:
            return largest
        if limit < ceiling:
            return min(largest, math.ceil((ceiling - limit) / _APPROACH))
        if self.last_change is not None and now - self.last_change.at_seconds < _HOLD_SECONDS:
            return 0
        step, self._probe = min(self._probe, largest), 2 * self._probe
        self._ceiling = limit + step
        return step

    def _change_to(self, after: int, reason: LimitReason, now: float) -> LimitChange | None:
        before, self.limit = self.limit, after
        if before == after:
            return None
        self.last_change = LimitChange(now, reason, before, after=after)
        return self.last_change


class _Evidence:
    """Two consecutive samples. Short-lived values count only if both show them."""

    def __init__(
        self, last: Telemetry, sample: Telemetry, step_seconds: float, *, limit: int, not_waiting: int
    ) -> None:
        self.at_seconds = sample.at_seconds
        self.in_flight = sample.in_flight
        self.running, self.kv_usage = sample.running, sample.kv_usage
        waiting_before, self.waiting = max(0, last.waiting - not_waiting), max(0, sample.waiting - not_waiting)
        # An embedding engine has no batch limit and little KV cache: its requests wait for tokens of a step.
        self.generates = sample.generation_tokens is None or sample.generation_tokens != last.generation_tokens
        foreign = min(last.running + waiting_before - last.in_flight, sample.running + self.waiting - sample.in_flight)
        self.foreign = max(0, foreign)
        share = sample.in_flight / max(1, sample.in_flight + self.foreign)
        self.own_waiting = math.ceil(share * min(waiting_before, self.waiting))
        self.ran = max(1, min(limit, sample.in_flight - self.own_waiting))  # of the gateway's own sequences, at least
        # New arrivals wait for the current step to end: this is their mean number.
        seconds = sample.at_seconds - last.at_seconds
        arriving = 1.5 * (sample.sent - last.sent) / seconds * step_seconds if seconds > 0 else 0.0
        self.tolerated = _WAITING + limit // 64 + int(min(arriving, limit / _GROWTH)) + sample.behind_prefill
