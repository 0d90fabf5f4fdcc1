"""How many sequences a backend should have in flight: more while all goes well, fewer at signs of overload. Pure.

It is told what each look at the engine's metrics showed, and the pace of the streams that ended. What requests will
need of the KV cache is reckoned elsewhere; this is the feedback for what cannot be known beforehand.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

DEFAULT_MAX_NUM_SEQS = 256  # vLLM's own default on most GPUs

_FALL = 0.9  # of what ran, where that was too much
_LEAST_FALL = 0.95  # of what ran, where streams are only a little too slow
_GROWTH = 8  # a step is an eighth of the limit at most
_APPROACH = 4  # below a level that was too much, a quarter of the way
_HOLD_SECONDS = 5.0  # at such a level, before it is passed: answers go on growing for a while
_FULL = 8  # the limit is in use when no more than an eighth of it is free: the last slots are kept for some, and
_FEW = 4  # a request may want several at once. Of fewer slots than these all must be taken.
_KV_FULL = 0.9  # of the KV cache: growing now would preempt as soon as the answers grow
_WAITING = 2  # so many may wait inside the engine without harm, and one more for each 64 in flight
_ASSUMED_STEP_SECONDS = 0.05  # while no stream has told
_LATE_SECONDS = 10.0  # metrics may lag behind by this much: then a fall is taken to have had its effect
_FOREIGN_FLOOR = 32  # this part of the upper bound is left beside the traffic of others
_ENOUGH_STREAMS = 8  # to judge their pace
_UNHEARD_SECONDS = 30.0  # after streams were too slow, others are waited for at least so long before it grows
_UNHEARD_LIVES = 2.0  # and as long as that many streams take
_RISE, _SINK = 0.2, 0.05  # weights of slower and faster streams: the mean of an upper part


class LimitReason(StrEnum):
    """Why the limit moved."""

    PREEMPTIONS = "preemptions"
    WAITING = "waiting"
    INTER_TOKEN_LATENCY = "inter_token_latency"
    ROOM = "room"  # all is in use, and nothing speaks against more
    RESTART = "restart"


FALLS = frozenset((LimitReason.PREEMPTIONS, LimitReason.WAITING, LimitReason.INTER_TOKEN_LATENCY))


@dataclass(frozen=True, slots=True)
class EngineSample:
    """An engine's metrics at one moment, and the gateway's own counts of sequences in flight there and sent so far.

    `waiting`: for capacity alone, where the engine tells the reasons. `kv_usage`: from 0 to 1. `generation_tokens`: so
    far; None = it does not tell.
    """

    at_seconds: float
    running: int
    waiting: int
    preemptions: float
    kv_usage: float
    in_flight: int
    sent: int
    generation_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class LimitChange:
    """A change of the limit."""

    at_seconds: float
    reason: LimitReason
    before: int
    after: int


class Limiter:
    """The limit of one backend, between 1 and `upper`. One that is not adaptive stays at `upper`."""

    def __init__(self, *, adaptive: bool = True, itl_objective_seconds: float | None = None) -> None:
        self._adaptive = adaptive
        self._objective = itl_objective_seconds
        self._told: int | None = None
        self._start = DEFAULT_MAX_NUM_SEQS
        self.upper = self.limit = self._start
        self.last_move: LimitChange | None = None
        self._last: EngineSample | None = None
        self._settled_seconds: float | None = -math.inf  # since when the last fall has had its effect; None = not yet
        self._drained_seconds: float | None = None  # since when no more are in flight than the limit
        self._foreign = 0  # sequences of others, at the last fall
        self._ceiling: int | None = None  # a level that was too much, to be approached slowly
        self._probe = 1  # by how much the ceiling is passed next
        self._pace_seconds: float | None = None  # between two tokens of a stream, of the slower streams
        self._life_seconds = 0.0  # of a stream
        self._streams = 0

    def __repr__(self) -> str:
        return f"<Limiter {self.limit} of {self.upper}, {self.last_move.reason if self.last_move else 'never moved'}>"

    @property
    def pace_seconds(self) -> float | None:
        """Seconds a token of the slower ones of the streams that ended lately; None = none has."""
        return self._pace_seconds

    def bind(self, told: int | None, engines: int) -> None:
        """The upper bound: what was configured or the engine told; None = to be learned, from vLLM's default on."""
        start = told or DEFAULT_MAX_NUM_SEQS * engines
        if (told, start) == (self._told, self._start):
            return
        untouched = self.limit == self.upper
        self._told, self._start, self.upper = told, start, start
        self.limit = start if untouched else min(self.limit, start)

    def restarted(self, now: float) -> LimitChange | None:
        """Another process answers: what was learned of the former one is void."""
        self._last, self._ceiling, self._probe = None, None, 1
        self._settled_seconds = now
        self._pace_seconds, self._streams = None, 0
        self.upper = self._start
        return self._moved(self._start, LimitReason.RESTART, now)

    def lost(self) -> None:
        """The engine's metrics could not be read for a while."""
        self._last = None

    def streamed(self, tpot_seconds: float, first_token_seconds: float, ended_seconds: float) -> None:
        """A stream ended, with its mean time per token after the first. Stalls by others' prefills are part of it."""
        settled = self._settled_seconds
        if settled is None or ended_seconds - settled < settled - first_token_seconds:
            return  # most of it was sent under a former limit
        pace, life = self._pace_seconds, ended_seconds - first_token_seconds
        self._life_seconds += _RISE * (life - self._life_seconds)
        self._streams += 1
        if pace is None:
            self._pace_seconds = tpot_seconds
        else:
            self._pace_seconds = pace + (_RISE if tpot_seconds > pace else _SINK) * (tpot_seconds - pace)

    def observe(self, look: EngineSample) -> LimitChange | None:
        """A look at the engine. At most one move, and none for the effects of what was sent before the last fall."""
        last, self._last = self._last, look
        if not self._adaptive or last is None:
            return None
        if look.preemptions < last.preemptions:
            return self.restarted(look.at_seconds)
        if self._settled_seconds is None:
            self._settle(look)  # only what is counted from then on has the new limit caused
            return None
        evidence = _Evidence(last, look, self._pace_seconds or _ASSUMED_STEP_SECONDS, self.limit)
        signs = self._signs(evidence)
        return self._fall(evidence, signs) if signs else self._grow(evidence)

    def _settle(self, look: EngineSample) -> None:
        """Whether what was sent before the fall has ended, by the own count and by the engine's."""
        if look.in_flight > self.limit:
            return
        if self._drained_seconds is None:
            self._drained_seconds = look.at_seconds
        is_shown = look.running + look.waiting <= self.limit + self._foreign + _WAITING
        if is_shown or look.at_seconds - self._drained_seconds >= _LATE_SECONDS:
            self._settled_seconds = look.at_seconds

    def _signs(self, evidence: "_Evidence") -> list[LimitReason]:
        if evidence.in_flight == 0:
            return []  # whatever it is, it is not ours
        signs = []
        if evidence.preemptions:
            signs.append(LimitReason.PREEMPTIONS)
        if evidence.own_waiting > evidence.tolerated and evidence.generates:
            signs.append(LimitReason.WAITING)
        if self._objective is not None and self._streams >= _ENOUGH_STREAMS and self._pace > self._objective:
            signs.append(LimitReason.INTER_TOKEN_LATENCY)
        return signs

    def _fall(self, evidence: "_Evidence", signs: list[LimitReason]) -> LimitChange | None:
        targets = []
        for sign in signs:
            if sign is LimitReason.PREEMPTIONS:
                targets.append(_FALL * evidence.ran)
            elif sign is LimitReason.WAITING:
                targets.append(evidence.ran + evidence.tolerated / 2)
            elif self._objective is not None:
                targets.append(evidence.in_flight * min(_LEAST_FALL, self._objective / self._pace))
        floor = max(1, self.upper // _FOREIGN_FLOOR) if evidence.foreign > evidence.tolerated else 1
        # What waits is a number: a limit far above what is in flight need not be halved again and again.
        level = min(self.limit, evidence.in_flight) if LimitReason.WAITING in signs else self.limit
        after = min(self.limit - 1, max(math.ceil(level / 2), math.ceil(min(targets))))
        after = min(self.limit, max(floor, after))
        if after == self.limit:
            return None
        ran = after if signs == [LimitReason.INTER_TOKEN_LATENCY] else evidence.ran  # too slowly, all of them
        self._ceiling, self._probe = min(self.limit, max(after, ran)), 1
        self._pace_seconds, self._streams = None, 0
        self._settled_seconds, self._drained_seconds, self._foreign = None, None, evidence.foreign
        return self._moved(after, signs[0], evidence.at_seconds)

    def _grow(self, evidence: "_Evidence") -> LimitChange | None:
        limit = self.limit
        unused = max(1, limit // _FULL) if limit >= _FEW else 0
        if evidence.in_flight < limit - unused or evidence.own_waiting > evidence.tolerated // 2:
            return None
        if evidence.kv_usage > _KV_FULL or self._may_be_slow(evidence.at_seconds):
            return None
        if limit >= self.upper and (self._told is not None or evidence.waiting or evidence.running < limit):
            return None
        step = self._step(evidence.at_seconds)
        if not step:
            return None
        after = limit + step if self._told is None else min(self.upper, limit + step)
        if limit < self.upper < after:
            after = self.upper  # beyond it, only what has run counts
        self.upper = max(self.upper, after)
        return self._moved(after, LimitReason.ROOM, evidence.at_seconds)

    def _may_be_slow(self, now: float) -> bool:
        if self._objective is None:
            return False
        if self._streams >= _ENOUGH_STREAMS:
            return self._pace > _LEAST_FALL * self._objective
        last = self.last_move
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
        if self.last_move is not None and now - self.last_move.at_seconds < _HOLD_SECONDS:
            return 0
        step, self._probe = min(self._probe, largest), 2 * self._probe
        self._ceiling = limit + step
        return step

    @property
    def _pace(self) -> float:
        return self._pace_seconds or 0.0

    def _moved(self, after: int, reason: LimitReason, now: float) -> LimitChange | None:
        before, self.limit = self.limit, after
        if before == after:
            return None
        self.last_move = LimitChange(now, reason, before, after)
        return self.last_move


class _Evidence:
    """What two looks in a row tell. Of what comes and goes, only what both have seen counts."""

    def __init__(self, last: EngineSample, look: EngineSample, step_seconds: float, limit: int) -> None:
        self.at_seconds = look.at_seconds
        self.in_flight = look.in_flight
        self.running, self.waiting, self.kv_usage = look.running, look.waiting, look.kv_usage
        self.preemptions = look.preemptions - last.preemptions
        # One that embeds has no batch to be full, nor KV cache to speak of: who waits does so for tokens of a step.
        self.generates = look.generation_tokens is None or look.generation_tokens != last.generation_tokens
        self.foreign = max(0, min(each.running + each.waiting - each.in_flight for each in (last, look)))
        share = look.in_flight / max(1, look.in_flight + self.foreign)
        self.own_waiting = math.ceil(share * min(last.waiting, look.waiting))
        self.ran = max(1, min(limit, look.in_flight - self.own_waiting))  # of the gateway's own sequences, at least
        # Whoever arrives waits for the step under way to end; that is how many do so at any moment.
        seconds = look.at_seconds - last.at_seconds
        arriving = 1.5 * (look.sent - last.sent) / seconds * step_seconds if seconds > 0 else 0.0
        self.tolerated = _WAITING + limit // 64 + int(min(arriving, limit / _GROWTH))
