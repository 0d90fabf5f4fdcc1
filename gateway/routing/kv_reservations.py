"""KV tokens that running requests reserve on one engine: a prefix that several share counts once. Pure.

Prompts in use form a radix tree. Blocks that one request was the first to use are one node; other requests share a node
up to some block, and it is cut back to the last block still in use when its last users leave. Keys are chained, so the
point where two prompts part is found by bisection. Reserving and releasing cost
O(nodes of the own prompt x log blocks), whatever else is in use.

The forecast: running sequences all grow by one token in a step and release everything when they end. What must fit is
the peak over time, at the end of one of them, and not the sum of all final lengths. Sequences that began together have
their peak at that sum; sequences at different stages have about half of their answers less.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from gateway.request import Demand


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
        # Of all that still run at each one's end.
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
        # Several sequences of one request count as one that grows, and others at full length from the beginning.
        present = request.present_tokens + (growth - 1) * left
        longer = bisect_left(self._left, -left)  # so many run on when it ends
        its_end = self._present[longer] + self._growth[longer] * left + present + left
        sooner = self._after[len(self._left) - longer]
        return max(self._before[longer], its_end, sooner + present if sooner else 0)


_GROWTH = 0.1  # of what is reserved for answers, when they become longer
_ENDLESS = 1 << 62
_REPORTED_TOKENS = 8  # of a stream between two reports of its progress
_LEAST_EVENTS = 32  # of a stream, to learn tokens for each event; the last few are not reported
_SMOOTHING = 0.2
_FORECAST_SECONDS = 1e-3  # validity of a forecast for each request in it, which bounds its CPU time


class _RadixNode:
    """Consecutive blocks of one prompt, from block `start` to before block `end`.

    `users` counts the requests and child nodes that need it, by the depth that they need; `children` is by first key.
    `tokens` is what is reserved for it; when it is cut back, its creator's measure decides how much of that is freed.
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


class Reservation:
    """KV tokens held by one request until it is released.

    `own_tokens` are not shared: the prompt beyond its last block, and its output. `output_tokens` of these are for the
    output, of which `streamed_tokens` have come.
    """

    __slots__ = ("_depth", "_node", "demand", "output_tokens", "own_tokens", "released", "streamed_tokens")

    def __init__(
        self, demand: Demand, own_tokens: int, output_tokens: int, node: _RadixNode | None, depth: int
    ) -> None:
        self.demand = demand
        self.own_tokens = own_tokens
        self.output_tokens = output_tokens
        self.streamed_tokens = 0
        self.released = False
        self._node = node
        self._depth = depth

    @property
    def tokens_alone(self) -> int:
        """What its release frees: its own tokens, and those of a node that no other request uses."""
        node = self._node
        if node is None or self._depth != node.end or len(node.users) > 1 or node.users[self._depth] > 1:
            return self.own_tokens
        return self.own_tokens + node.tokens

    def left_steps(self, tokens_of_event: float) -> int:
        """Steps of the engine until its answers are as long as expected."""
        return max(0, self.output_tokens - int(self.streamed_tokens * tokens_of_event)) // self.demand.sequences


class KvLedger:
    """Owner of the KV tokens that are reserved on one engine.

    `block_tokens` is the size of the engine's blocks; what is not shared takes whole blocks. Without `shares` (the
    engine caches no prefixes) every request counts for itself.
    """

    __slots__ = (
        "_forecast", "_forecast_seconds", "_held", "_root", "_tokens_of_event",
        "block_tokens", "shares", "taken_tokens",
    )  # fmt: skip

    def __init__(self, block_tokens: int = 16, *, shares: bool = True) -> None:
        self.block_tokens = block_tokens
        self.shares = shares
        self.taken_tokens = 0
        self._root = _RadixNode(Demand(""), 0, 0, 0, None)
        self._held: set[Reservation] = set()
        self._forecast: PeakForecast | None = None  # until a reservation changes
        self._forecast_seconds = 0.0
        self._tokens_of_event = 1.0  # a busy engine puts several tokens into one event

    def resize(self, block_tokens: int, *, shares: bool) -> None:
        """Follow the engine's settings; what is reserved stays as it is."""
        self.block_tokens, self.shares = block_tokens, shares

    def __repr__(self) -> str:
        return f"<KvLedger {self.taken_tokens} tokens, {len(self._held)} requests, {len(self._root.children)} prefixes>"

    def __len__(self) -> int:
        return len(self._held)

    def most_needed(self, demand: Demand, output_tokens: int) -> int:
        """Upper bound of `needed`, at little cost: as if the request shared nothing."""
        if not demand.sequences:
            return 0
        block = self.block_tokens
        return demand.prompt_tokens + block + demand.sequences * (output_tokens + block)

    def needed(self, demand: Demand, output_tokens: int) -> int:
        """Tokens that a request with answers of this length would add."""
        if not demand.sequences:
            return 0
        keys = self._keys(demand)
        last = demand.tokens_of(len(keys))
        shared = demand.tokens_of(self._shared(keys)[1])
        rest = max(0, demand.prompt_tokens - last)
        return last - shared + self._whole_blocks(rest) + demand.sequences * self._whole_blocks(output_tokens)

    def reserve(self, demand: Demand, output_tokens: int) -> Reservation:
        """Reserve what the request needs; `output_tokens` for each sequence. `release` gives it back."""
        if not demand.sequences:
            reservation = Reservation(demand, 0, 0, None, 0)  # no engine sequence
            self._held.add(reservation)
            return reservation
        if (keys := demand.keys) and self.shares and demand.reads_cache:
            last = demand.tokens_of(len(keys))
            node, depth = self._use(demand, keys, last)
        else:
            node, depth, last = None, 0, 0
        block, rest = self.block_tokens, demand.prompt_tokens - last
        answers = -(-output_tokens // block) * block * demand.sequences  # inlined: this runs for every request
        own = answers - (-rest // block) * block if rest > 0 else answers
        reservation = Reservation(demand, own, answers, node, depth)
        self.taken_tokens += own
        self._forecast = None
        self._held.add(reservation)
        return reservation

    def on_tokens(self, reservation: Reservation, tokens: int) -> int:
        """More tokens of the output came. A reservation that is used up grows by a tenth or more.

        Returns how many more may come before the next call.
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
        reservation.own_tokens += more
        reservation.output_tokens += more
        self.taken_tokens += more
        self._forecast = None
        return min(more - lacking, _REPORTED_TOKENS) if more > lacking else _ENDLESS

    def on_usage(self, reservation: Reservation, tokens: int) -> None:
        """Learn tokens for each event from the output tokens in the engine's usage."""
        if reservation.streamed_tokens >= _LEAST_EVENTS:
            share = max(1.0, tokens / reservation.streamed_tokens)
            self._tokens_of_event += _SMOOTHING * (share - self._tokens_of_event)

    def release(self, reservation: Reservation) -> None:
        """Free what it holds, except what other requests share. Only the first call counts."""
        if reservation.released:
            return
        reservation.released = True
        self._forecast = None
        self._held.discard(reservation)
        self.taken_tokens -= reservation.own_tokens
        node, depth = reservation._node, reservation._depth
        while node is not None:  # the root has a permanent user
            users = node.users
            if users[depth] > 1:
                users[depth] -= 1
                return
            del users[depth]
            if users:
                if depth == node.end:
                    self._cut(node, max(users))
                return
            self.taken_tokens -= node.tokens
            depth, first = node.start, node.creator.keys[node.start]
            gone, node = node, node.parent
            if node is not None and node.children.get(first) is gone:
                del node.children[first]

    def forecast(self, now: float) -> PeakForecast:
        """The peak of tokens in use, by the progress of each stream. Cached for longer the more requests there are."""
        forecast = self._forecast
        if forecast is None or now - self._forecast_seconds > _FORECAST_SECONDS * len(self._held):
            lasting, growths = self.taken_tokens, []
            for reservation in self._held:
                if reservation.demand.streams and reservation.demand.sequences:
                    alone = reservation.tokens_alone
                    lasting -= alone
                    growths.append(
                        self._growth_of(
                            alone, reservation.left_steps(self._tokens_of_event), reservation.demand.sequences
                        )
                    )
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
        return Growth(left_steps, final_tokens - sequences * (left_steps - left_steps % self.block_tokens), sequences)

    def _keys(self, demand: Demand) -> Sequence[int]:
        return demand.keys if self.shares and demand.reads_cache else ()

    def _whole_blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens) * self.block_tokens

    def _shared(self, keys: Sequence[int]) -> tuple[_RadixNode, int]:
        """The deepest node with blocks of the prompt, and how many of its leading blocks are in use."""
        node, depth, count = self._root, 0, len(keys)
        while depth < count:
            child = node.children.get(keys[depth])
            if child is None or child.start != depth:  # the latter: two blocks with the same hash
                break
            node, depth = child, _alike(keys, child.creator.keys, depth, min(count, child.end))
        return node, depth

    def _use(self, demand: Demand, keys: Sequence[int], last: int) -> tuple[_RadixNode, int]:
        """Add a user of the prompt's blocks, which have `last` tokens; returns its node, and the number of blocks."""
        node, depth = self._shared(keys)
        users = node.users
        users[depth] = users.get(depth, 0) + 1
        if depth == len(keys):
            return node, depth
        tokens = last - demand.tokens_of(depth)
        self.taken_tokens += tokens
        new = _RadixNode(demand, depth, len(keys), tokens, node)
        node.children.setdefault(keys[depth], new)
        return new, len(keys)

    def _cut(self, node: _RadixNode, end: int) -> None:
        """Free the node's blocks from `end` on, which no request uses."""
        measured = node.creator.tokens_of
        kept = min(node.tokens, measured(end) - measured(node.start))
        self.taken_tokens -= node.tokens - kept
        node.tokens, node.end = kept, end


def _alike(keys: Sequence[int], others: Sequence[int], low: int, high: int) -> int:
    """How many leading keys two prompts have in common, at most `high`; the one at `low` is."""
    high -= 1
    if keys[high] == others[high]:
        return high + 1
    while high - low > 1:
        middle = (low + high) // 2
        if keys[middle] == others[middle]:
            low = middle
        else:
            high = middle
    return high
