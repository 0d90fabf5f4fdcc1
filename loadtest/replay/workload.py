"""A trace as the traffic of N engines: copies rotated in time, each with its own prefixes, at a chosen rate.

An engine also caches the blocks of answers, which a later prompt of the same conversation contains.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import count

from loadtest.replay.engine import ReplayRequest
from loadtest.replay.scenario import Lengths
from loadtest.workloads.trace import Row, Trace


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """What a trace shows of one request's answer, and of the answer before it.

    `answer_keys` are those of the blocks that its answer completes. Its prompt holds an earlier answer after the first
    `turn` blocks, up to the end of block `turn_end`; both are 0 if it holds none.
    """

    answer_keys: tuple[int, ...] = ()
    turn: int = 0
    turn_end: int = 0


def turns_of(rows: Sequence[Row], block_tokens: int) -> list[TraceTurn]:
    """For each row, what later and earlier rows show of its conversation.

    A row continues an earlier one if its prompt begins with all full blocks of the earlier prompt and is at least as
    long as that prompt and its answer. A prompt that ends inside a widely shared opening is no earlier turn.
    The first continuation decides; one that branches off later may differ from the answer.
    """
    turns = [TraceTurn() for _ in rows]
    ending: dict[int, int] = {}  # last full block -> the latest row whose prompt ends with it
    shared = _shared(rows)
    for number, row in enumerate(rows):
        parent = _parent(row, rows, ending)
        if parent is not None:
            before = rows[parent]
            # The last token is never computed, so it is not cached.
            done = (before.prompt_tokens + before.output_tokens - 1) // block_tokens
            answer = row.keys[len(before.keys) : done]
            if answer and turns[parent].answer_keys in ((), answer):
                turns[parent] = replace(turns[parent], answer_keys=answer)
                turns[number] = TraceTurn(turn=len(before.keys), turn_end=done)
        if row.keys and row.keys[-1] not in shared:
            ending[row.keys[-1]] = number
    return turns


def _parent(row: Row, rows: Sequence[Row], ending: dict[int, int]) -> int | None:
    for key in reversed(row.keys):
        parent = ending.get(key)
        if parent is not None and rows[parent].prompt_tokens + rows[parent].output_tokens <= row.prompt_tokens:
            return parent
    return None


def _shared(rows: Sequence[Row]) -> set[int]:
    """Blocks that more than three different blocks follow: the end of an opening such as a system prompt."""
    follower: dict[int, int] = {}
    branching: dict[int, int] = {}
    for row in rows:
        for key, after in zip(row.keys, row.keys[1:], strict=False):
            known = follower.setdefault(key, after)
            if known != after:
                branching[key] = branching.get(key, 0) + 1
    return {key for key, count in branching.items() if count > 2}


_ENGINES_PER_COPY = 4
_NAMESPACE = 1 << 44  # added to the keys of a copy
_CROWD_KEY = 1 << 60
_COMMON_SHARE = 0.5  # a block that at least this share of requests begins with stays common to all copies


@dataclass(frozen=True, slots=True)
class FlashCrowd:
    """Many requests on one new prefix, spread evenly over a part of the replay."""

    share: float = 0.12  # of the other requests
    begins: float = 0.4
    _: KW_ONLY
    ends: float = 0.6
    prefix_tokens: int = 8192
    own_tokens: int = 512
    output_tokens: int = 150


def copies_for(trace: Trace, engines: int, rate_per_second: float) -> int:
    """How often the trace is laid over itself.

    Of requests: once for each four engines, so that the rate alone sets how close repeated prompts follow each other.
    Of sessions: as often as the rate needs, because think times are people's and do not shrink.
    """
    if trace.sessions:
        return max(1, math.ceil(rate_per_second / trace.rate_per_second))
    return max(1, engines // _ENGINES_PER_COPY)


def requests_of(
    trace: Trace,
    engines: int,
    rate_per_second: float,
    seed: int,
    crowd: FlashCrowd | None = None,
    lengths: Lengths | None = None,
) -> list[ReplayRequest]:
    """All requests, those of an open loop with their arrivals; of a session the first turn alone has one."""
    lengths = lengths or Lengths()
    rng = random.Random(f"{trace.name}/{seed}")
    copies = copies_for(trace, engines, rate_per_second)
    stretch = copies * trace.rate_per_second / rate_per_second
    turns = turns_of(trace.rows, trace.block_tokens)
    common = _common_key(trace.rows)
    made: list[ReplayRequest] = []
    for copy in range(copies):
        offset = rng.random() * trace.span_seconds if copy or seed else 0.0
        made += _copy(trace, turns, renamed=_renamed(copy, common), offset=offset, stretch=stretch, rng=rng)
    if crowd is not None:
        made += _crowd(crowd, len(made), trace.span_seconds * stretch, block_tokens=trace.block_tokens, rng=rng)
    made.sort(key=lambda request: request.arrival_seconds)
    for number, request in enumerate(made):
        output_tokens = lengths.output_tokens(request.output_tokens)
        believed_tokens = lengths.believed_tokens(request.prompt_tokens, number)
        request.plan(number, output_tokens, lengths.max_tokens(output_tokens), believed_tokens)
    return made


def _copy(
    trace: Trace,
    turns: Sequence[TraceTurn],
    renamed: Callable[[tuple[int, ...]], tuple[int, ...]],
    offset: float,
    stretch: float,
    rng: random.Random,
) -> list[ReplayRequest]:
    span, made, latest = trace.span_seconds, [], dict[int, ReplayRequest]()
    for row, turn in zip(trace.rows, turns, strict=True):
        at = row.at_seconds + (rng.random() * trace.tick_seconds if trace.tick_seconds else 0.0)
        request = ReplayRequest(
            0,
            arrival_seconds=(at + offset) % span * stretch,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            keys=renamed(row.keys),
            answer_keys=renamed(turn.answer_keys),
            think_seconds=row.think_seconds,
            turn=turn.turn,
            turn_end=turn.turn_end,
        )
        made.append(request)
        if row.session is not None:
            before = latest.get(row.session)
            if before is not None:
                before.lead_to(request)
            latest[row.session] = request
    return made


def _renamed(copy: int, common: int | None) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """Keys in the copy's own namespace; one object for each key, however often it occurs."""
    if copy == 0:
        return lambda keys: keys
    names: dict[int, int] = {} if common is None else {common: common}

    def renamed(keys: tuple[int, ...]) -> tuple[int, ...]:
        for key in keys:
            if key not in names:
                names[key] = key + copy * _NAMESPACE
        return tuple([names[key] for key in keys])

    return renamed


def _common_key(rows: Sequence[Row]) -> int | None:
    """The block that most prompts begin with, such as a system prompt."""
    firsts = Counter(row.keys[0] for row in rows if row.keys)
    for key, times in firsts.most_common(1):
        if times >= _COMMON_SHARE * len(rows):
            return key
    return None


def _crowd(
    crowd: FlashCrowd, others: int, length_seconds: float, block_tokens: int, rng: random.Random
) -> list[ReplayRequest]:
    prefix = tuple(range(_CROWD_KEY, _CROWD_KEY + crowd.prefix_tokens // block_tokens))
    own = crowd.own_tokens // block_tokens
    fresh = count(_CROWD_KEY << 1)
    made = []
    for _ in range(int(crowd.share * others)):
        at = (crowd.begins + rng.random() * (crowd.ends - crowd.begins)) * length_seconds
        keys = prefix + tuple(next(fresh) for _ in range(own))
        made.append(
            ReplayRequest(
                0,
                arrival_seconds=at,
                prompt_tokens=crowd.prefix_tokens + crowd.own_tokens,
                output_tokens=crowd.output_tokens,
                keys=keys,
            )
        )
    return made
