"""KV tokens reserved by running requests on one engine; a shared prefix counts once. Pure.

Prompts in use form a radix tree. A node has the blocks that one request was the first to use. Other requests share a
node up to some block; when its last users leave, it is cut back to the last block in use. Keys are chained, so the
point where two prompts part is found by bisection. Reserving and releasing cost O(nodes of the prompt x log blocks),
whatever else is in use.

Answers are reserved at their expected length. The sum of many deviates less than each: the margin is the root of the
sum of the squares of their margins.

The forecast: running sequences all grow by one token in a step and release everything when they end. The peak over
time, at the end of one of them, must fit, and not the sum of all final lengths. Sequences that began together have
their peak at that sum; sequences at different stages need about half of their answers less. It looks a few hundred
steps ahead: a preemption costs less than a second of recomputing, so a peak that is further away is no reason to wait.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate
from math import sqrt
from typing import Final, NamedTuple

from gateway.core.request import Demand


class Growth(NamedTuple):
    """A running request: steps until it ends, tokens now (rounded up), and tokens added in each step."""

    left_steps: int
    present_tokens: int
    growth_tokens: int


class PeakForecast:
    """The peak of tokens in use, if `base_tokens` stay in use as long as any request runs."""

    __slots__ = ("_after", "_before", "_growth", "_left", "_present", "base_tokens", "peak_tokens")

    def __init__(self, base_tokens: int, growths: Iterable[Growth]) -> None:
        lasting = sorted(growths, reverse=True)
        self.base_tokens = base_tokens
        self._left = [-request.left_steps for request in lasting]
        # Sums over the sequences that still run at the end of each.
        self._present = list(accumulate([request.present_tokens for request in lasting], initial=base_tokens))
        self._growth = list(accumulate([request.growth_tokens for request in lasting], initial=0))
        at_ends = [
            present + growth * request.left_steps
            for present, growth, request in zip(self._present[1:], self._growth[1:], lasting, strict=True)
        ]
        self._before = list(accumulate(at_ends, max, initial=base_tokens))
        with_one_more = [tokens + request.left_steps for tokens, request in zip(at_ends, lasting, strict=True)]
        self._after = list(accumulate(reversed(with_one_more), max, initial=0))
        self.peak_tokens = self._before[-1]

    def __repr__(self) -> str:
        return f"<PeakForecast {self.peak_tokens} tokens at most, {self.base_tokens} of them lasting>"

    def peak_with(self, request: Growth) -> int:
        """The peak if this request began now."""
        left, growth = request.left_steps, request.growth_tokens
        # Of several sequences of one request, one grows in the model; the others have full length from the beginning.
        present = request.present_tokens + (growth - 1) * left
        longer = bisect_left(self._left, -left)  # sequences that outlast the request
        its_end = self._present[longer] + self._growth[longer] * left + present + left
        sooner = self._after[len(self._left) - longer]
        return max(self._before[longer], its_end, sooner + present if sooner else 0)


HORIZON_STEPS: Final = 512  # of the forecast
_GROWTH: Final = 0.1  # of the reserved tokens for answers, when they become longer
_ENDLESS: Final = 1 << 62
_REPORTED_TOKENS: Final = 8  # of a stream between two reports of its progress
LEAST_EVENTS: Final = 32  # of a stream, to learn tokens for each event; the last few are not reported
_SMOOTHING: Final = 0.2
_FORECAST_SECONDS: Final = 1e-3  # validity of a forecast for each request in it, which bounds its CPU time


class _RadixNode:
    """Consecutive blocks of one prompt, from block `start` to before block `end`.

    `users` counts the requests and child nodes that need it, by depth; `children` is by first key. `tokens` is its
    reservation; when it is cut back, its creator's measure decides how much of that is freed.
    """

    __slots__ = ("children", "creator", "end", "parent", "start", "tokens", "users")

    def __init__(self, creator: Demand, start: int, end: int, tokens: int, parent: "_RadixNode | None") -> None:
        self.creator = creator
        self.start = start
        self.end = end
        self.tokens = tokens
        self.parent = parent
        self.users: dict[int, int] = {end: 1}
        self.children: dict[int, _RadixNode] = {}

    def cut(self, end: int) -> int:
        """Free the blocks from `end` on, which no request uses; returns their tokens."""
        measured = self.creator.tokens_of
        kept = min(self.tokens, measured(end) - measured(self.start))
        freed = self.tokens - kept
        self.tokens, self.end = kept, end
        return freed


class Reservation:
    """The resources of one request on an engine until its release: slots, its part in prefill, and KV tokens.

    `sequences`: the slots. `prefill_seconds`: predicted for the uncached prompt. `own_tokens` are unshared KV tokens:
    the prompt beyond its last block, and the output. `output_tokens` of these are for the output, `streamed_tokens` of
    which have arrived. `node` and `depth`: the shared ones.
    """

    __slots__ = (
        "alone", "demand", "depth", "margin_squared", "node", "output_tokens", "own_tokens", "prefill_seconds",
        "released", "sequences", "started_seconds", "streamed_tokens",
    )  # fmt: skip

    def __init__(self, demand: Demand, sequences: int, prefill_seconds: float) -> None:
        self.demand = demand
        self.sequences = sequences
        self.prefill_seconds = prefill_seconds
        self.started_seconds = 0.0
        self.alone = False  # no other request was in prefill with it
        self.own_tokens = self.output_tokens = self.streamed_tokens = 0
        self.margin_squared = 0
        self.node: _RadixNode | None = None
        self.depth = 0
        self.released = False

    def grow(self, tokens: int) -> None:
        """Reserve these additional tokens for its output."""
        self.own_tokens += tokens
        self.output_tokens += tokens

    @property
    def tokens_alone(self) -> int:
        """The tokens that its release frees: its own, and a node that no other request uses."""
        node = self.node
        if node is None or self.depth != node.end or len(node.users) > 1 or node.users[self.depth] > 1:
            return self.own_tokens
        return self.own_tokens + node.tokens


@dataclass(slots=True, eq=False, repr=False)
class KvLedger:
    """Owner of the reserved KV tokens of one engine.

    `block_tokens` is the size of the engine's blocks; unshared tokens take whole blocks. Without `shares` (the engine
    caches no prefixes) every request counts for itself.
    """

    block_tokens: int = 16
    _: KW_ONLY
    shares: bool = True
    taken_tokens: int = 0
    margins_squared: int = 0
    held: set[Reservation] = field(default_factory=set)
    _root: _RadixNode = field(default_factory=lambda: _RadixNode(Demand(""), 0, 0, 0, None))
    _forecast: PeakForecast | None = None  # until a reservation changes
    _forecast_seconds: float = 0.0
    _tokens_of_event: float = 1.0  # a busy engine puts several tokens into one event

    def resize(self, block_tokens: int, *, shares: bool) -> None:
        """Take over the engine's settings; existing reservations stay unchanged."""
        self.block_tokens, self.shares = block_tokens, shares

    def __repr__(self) -> str:
        return f"<KvLedger {self.taken_tokens} tokens, {len(self.held)} requests, {len(self._root.children)} prefixes>"

    def __len__(self) -> int:
        return len(self.held)

    @property
    def margin_tokens(self) -> float:
        """The expected excess of all answers together over their reservations."""
        return sqrt(self.margins_squared)

    def fits(self, demand: Demand, output_tokens: int, margin_tokens: int, limit_tokens: float, now: float) -> bool:
        """Whether the request fits below the limit, with answers of this length and margin.

        If the sum of all reservations leaves too little, the forecast peak of concurrent use decides.
        """
        sequences, block = demand.sequences, self.block_tokens
        spare = limit_tokens - self.taken_tokens - demand.prompt_tokens - block - sequences * (output_tokens + block)
        margins_squared = self.margins_squared + sequences * margin_tokens * margin_tokens
        if sequences and spare >= 0.0 and spare * spare >= margins_squared:
            return True  # even if it shared nothing; the usual case, and cheap
        limit_tokens -= sqrt(self.margins_squared + _margin_squared(sequences, output_tokens, margin_tokens))
        free = limit_tokens - self.taken_tokens
        return self.needed(demand, output_tokens) <= free or self.peak_with(demand, output_tokens, now) <= limit_tokens

    def needed(self, demand: Demand, output_tokens: int) -> int:
        """Tokens that a request with answers of this length would add."""
        if not demand.sequences:
            return 0
        keys = demand.keys if self.shares and demand.reads_cache else ()
        last = demand.tokens_of(len(keys))
        shared = demand.tokens_of(self._shared(keys)[1])
        rest = max(0, demand.prompt_tokens - last)
        return last - shared + self._whole_blocks(rest) + demand.sequences * self._whole_blocks(output_tokens)

    def reserve(self, reservation: Reservation, output_tokens: int, margin_tokens: int = 0) -> None:
        """Reserve KV tokens for the request; `output_tokens` for each sequence. Undone by `release`."""
        demand = reservation.demand
        self.held.add(reservation)
        if not demand.sequences:
            return  # no engine sequence
        last = 0
        if (keys := demand.keys) and self.shares and demand.reads_cache:
            last = demand.tokens_of(len(keys))
            node, depth = self._shared(keys)
            node.users[depth] = node.users.get(depth, 0) + 1
            if depth < len(keys):  # it is the first to use the rest
                tokens = last - demand.tokens_of(depth)
                self.taken_tokens += tokens
                parent, node = node, _RadixNode(demand, depth, len(keys), tokens, node)
                parent.children.setdefault(keys[depth], node)
                depth = len(keys)
            reservation.node, reservation.depth = node, depth
        block, rest = self.block_tokens, demand.prompt_tokens - last
        answers = -(-output_tokens // block) * block * demand.sequences  # inlined: this runs for every request
        own = answers - (-rest // block) * block if rest > 0 else answers
        reservation.own_tokens, reservation.output_tokens = own, answers
        reservation.margin_squared = _margin_squared(demand.sequences, output_tokens, margin_tokens)
        self.margins_squared += reservation.margin_squared
        self.taken_tokens += own
        self._forecast = None

    def on_tokens(self, reservation: Reservation, tokens: int) -> int:
        """More output tokens arrived. A used-up reservation grows by a tenth or more.

        Returns the number of tokens until the next call.
        """
        reservation.streamed_tokens += tokens
        reserved = reservation.output_tokens
        lacking = reservation.streamed_tokens - reserved
        if lacking < 0:
            return min(-lacking, _REPORTED_TOKENS)
        limit = reservation.demand.output_tokens
        most = _ENDLESS if limit is None else self._whole_blocks(limit) * reservation.demand.sequences
        if reservation.released or reserved >= most or not reservation.demand.sequences:
            return _ENDLESS
        more = min(most - reserved, self._whole_blocks(max(lacking + 1, int(reserved * _GROWTH))))
        reservation.grow(more)
        self.taken_tokens += more
        self._forecast = None
        return min(more - lacking, _REPORTED_TOKENS) if more > lacking else _ENDLESS

    def on_usage(self, reservation: Reservation, tokens: int) -> None:
        """Learn tokens for each event from the output tokens in the engine's usage."""
        if reservation.streamed_tokens >= LEAST_EVENTS:
            share = max(1.0, tokens / reservation.streamed_tokens)
            self._tokens_of_event += _SMOOTHING * (share - self._tokens_of_event)

    def release(self, reservation: Reservation) -> None:
        """Free its resources, except shared ones. Only the first call counts."""
        if reservation.released:
            return
        reservation.released = True
        self._forecast = None
        self.held.discard(reservation)
        self.taken_tokens -= reservation.own_tokens
        self.margins_squared -= reservation.margin_squared
        node, depth = reservation.node, reservation.depth
        while node is not None:  # the root has a permanent user
            users = node.users
            if users[depth] > 1:
                users[depth] -= 1
                return
            del users[depth]
            if users:
                if depth == node.end:
                    self.taken_tokens -= node.cut(max(users))
                return
            self.taken_tokens -= node.tokens
            depth, first = node.start, node.creator.keys[node.start]
            gone, node = node, node.parent
            if node is not None and node.children.get(first) is gone:
                del node.children[first]

    def forecast(self, now: float) -> PeakForecast:
        """The peak of tokens in use, by the progress of each stream. Cached for longer the more requests there are."""
        forecast = self._forecast
        if forecast is None or now - self._forecast_seconds > _FORECAST_SECONDS * len(self.held):
            lasting, growths = self.taken_tokens, []
            for held in self.held:
                if held.demand.streams and (sequences := held.demand.sequences):
                    alone = held.tokens_alone
                    lasting -= alone
                    left_tokens = max(0, held.output_tokens - int(held.streamed_tokens * self._tokens_of_event))
                    growths.append(self._growth_of(alone, left_tokens // sequences, sequences))
            forecast = self._forecast = PeakForecast(lasting, growths)
            self._forecast_seconds = now
        return forecast

    def peak_with(self, demand: Demand, output_tokens: int, now: float) -> int:
        """The peak of tokens in use if a request with answers of this length begins now."""
        forecast, needed = self.forecast(now), self.needed(demand, output_tokens)
        if not demand.streams or not demand.sequences:
            return forecast.peak_tokens + needed  # its progress will not be seen
        return forecast.peak_with(self._growth_of(needed, output_tokens, demand.sequences))

    def _growth_of(self, final_tokens: int, left_steps: int, sequences: int) -> Growth:
        """The growth of a request that has `final_tokens` in the end; partial blocks count as whole ones."""
        if left_steps > HORIZON_STEPS:
            final_tokens -= sequences * (left_steps - HORIZON_STEPS)
            left_steps = HORIZON_STEPS
        return Growth(left_steps, final_tokens - sequences * (left_steps - left_steps % self.block_tokens), sequences)

    def _whole_blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens) * self.block_tokens

    def _shared(self, keys: tuple[int, ...]) -> tuple[_RadixNode, int]:
        """The deepest node with blocks of the prompt, and how many of its leading blocks are in use."""
        node, depth, count = self._root, 0, len(keys)
        while depth < count:
            child = node.children.get(keys[depth])
            if child is None or child.start != depth:  # the latter: two blocks with the same hash
                break
            node, depth = child, alike(keys, child.creator.keys, depth, min(count, child.end))
        return node, depth


def _margin_squared(sequences: int, output_tokens: int, margin_tokens: int) -> int:
    """Of answers reserved at this length, without the part beyond the horizon."""
    within = HORIZON_STEPS - output_tokens
    margin = margin_tokens if margin_tokens < within else within
    return sequences * margin * margin if margin > 0 else 0


def alike(keys: tuple[int, ...], others: tuple[int, ...], low: int, high: int, start: int = 0) -> int:
    """The number of leading keys that two prompts share, at most `high`; the key at `low` is shared.

    `others` begins at `start`.
    """
    high -= 1
    if keys[high] == others[high - start]:
        return high + 1
    while high - low > 1:
        middle = (low + high) // 2
        if keys[middle] == others[middle - start]:
            low = middle
        else:
            high = middle
    return high
