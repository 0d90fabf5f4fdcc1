"""KV tokens that running requests reserve on one engine: a prefix that several share counts once. Pure.

Prompts in use form a trie. Blocks that one request was the first to use are one stretch of it; other requests share a
stretch up to some block, and it is cut back to the last block still in use when its last users leave. Keys are chained,
so the point where two prompts part is found by bisection. Reserving and releasing cost
O(stretches of the own prompt x log blocks), whatever else is in use.

The forecast: running sequences all grow by one token in a step and release everything when they end. What must fit is
the peak over time, at the end of one of them, and not the sum of all final lengths. Sequences that began together have
their peak at that sum; sequences at different stages have about half of their answers less.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from gateway.request import Ask


class Growth(NamedTuple):
    """A request that runs: steps until it ends, tokens it has now (more, if in doubt), and those it gets in a step."""

    left_steps: int
    present_tokens: int
    growth_tokens: int


class PeakForecast:
    """The peak to come, if `base_tokens` stay taken as long as anything runs."""

    __slots__ = ("_after", "_before", "_growth", "_left", "_present", "base_tokens", "peak_tokens")

    def __init__(self, base_tokens: int, courses: Iterable[Growth]) -> None:
        lasting = sorted(courses, reverse=True)
        self.base_tokens = base_tokens
        self._left = [-course.left_steps for course in lasting]
        # Of all that still run at each one's end.
        self._present = list(accumulate([course.present_tokens for course in lasting], initial=base_tokens))
        self._growth = list(accumulate([course.growth_tokens for course in lasting], initial=0))
        at_ends = [
            present + growth * course.left_steps
            for present, growth, course in zip(self._present[1:], self._growth[1:], lasting, strict=True)
        ]
        self._before = list(accumulate(at_ends, max, initial=base_tokens))
        with_one_more = [tokens + course.left_steps for tokens, course in zip(at_ends, lasting, strict=True)]
        self._after = list(accumulate(reversed(with_one_more), max, initial=0))
        self.peak_tokens = self._before[-1]

    def __repr__(self) -> str:
        return f"<PeakForecast {self.peak_tokens} tokens at most, {self.base_tokens} of them lasting>"

    def peak_with(self, course: Growth) -> int:
        """The peak if this request began now."""
        left, growth = course.left_steps, course.growth_tokens
        # Several sequences of one request are reckoned as one that grows and others that are there from the beginning.
        present = course.present_tokens + (growth - 1) * left
        longer = bisect_left(self._left, -left)  # so many run on when it ends
        its_end = self._present[longer] + self._growth[longer] * left + present + left
        sooner = self._after[len(self._left) - longer]
        return max(self._before[longer], its_end, sooner + present if sooner else 0)


_GROWTH = 0.1  # of what is reserved for answers, when they become longer
_ENDLESS = 1 << 62
_COUNTED_TOKENS = 8  # of a stream that come before it is told again how far it is
_TELLING_EVENTS = 32  # of a stream that tell how many tokens are in one; the last few were not told
_SMOOTHING = 0.2
_OUTLOOK_SECONDS = 1e-3  # that one is good for, for each request in it: a thousandth of the time goes into them


class _RadixNode:
    """Consecutive blocks of one prompt, from block `start` to before block `end`.

    `users` says how many requests and later stretches lean on it, by the depth that they need; `below` has the later
    ones by their first key. `tokens` is what is counted for it; what of that goes when it is cut back is reckoned as
    its creator measured it.
    """

    __slots__ = ("below", "creator", "end", "leans_on", "start", "tokens", "users")

    def __init__(self, creator: Ask, start: int, end: int, tokens: int, leans_on: "_RadixNode | None") -> None:
        self.creator = creator
        self.start = start
        self.end = end
        self.tokens = tokens
        self.leans_on = leans_on
        self.users: dict[int, int] = {end: 1}
        self.below: dict[int, _RadixNode] = {}


class Reservation:
    """KV tokens held by one request until it is released.

    `own_tokens` nobody shares: the prompt beyond its last block, and its answers. `output_tokens` of these are for the
    answers, of which `came_tokens` have come.
    """

    __slots__ = ("_depth", "_stretch", "ask", "came_tokens", "output_tokens", "own_tokens", "released")

    def __init__(self, ask: Ask, own_tokens: int, output_tokens: int, stretch: _RadixNode | None, depth: int) -> None:
        self.ask = ask
        self.own_tokens = own_tokens
        self.output_tokens = output_tokens
        self.came_tokens = 0
        self.released = False
        self._stretch = stretch
        self._depth = depth

    @property
    def tokens_alone(self) -> int:
        """What is free as soon as it is released: its own, and the stretch that nobody else leans on."""
        stretch = self._stretch
        if stretch is None or self._depth != stretch.end or len(stretch.users) > 1 or stretch.users[self._depth] > 1:
            return self.own_tokens
        return self.own_tokens + stretch.tokens

    def left_steps(self, tokens_of_event: float) -> int:
        """Steps of the engine until its answers are as long as expected."""
        return max(0, self.output_tokens - int(self.came_tokens * tokens_of_event)) // self.ask.sequences


class KvLedger:
    """Owner of the KV tokens that are reserved on one engine.

    `block_tokens` is the size of the engine's blocks: nothing that is not shared takes less than whole ones. Without
    `shares`, as where an engine caches no prefixes, every request counts for itself.
    """

    __slots__ = (
        "_held", "_outlook", "_outlook_seconds", "_root", "_tokens_of_event", "block_tokens", "shares", "taken_tokens",
    )  # fmt: skip

    def __init__(self, block_tokens: int = 16, *, shares: bool = True) -> None:
        self.block_tokens = block_tokens
        self.shares = shares
        self.taken_tokens = 0
        self._root = _RadixNode(Ask(""), 0, 0, 0, None)
        self._held: set[Reservation] = set()
        self._outlook: PeakForecast | None = None  # until something is taken or given back
        self._outlook_seconds = 0.0
        self._tokens_of_event = 1.0  # engines that are short of time to send put several into one

    def resize(self, block_tokens: int, *, shares: bool) -> None:
        """Follow the engine's settings; what is reserved stays as it is."""
        self.block_tokens, self.shares = block_tokens, shares

    def __repr__(self) -> str:
        return f"<KvLedger {self.taken_tokens} tokens, {len(self._held)} requests, {len(self._root.below)} prefixes>"

    def __len__(self) -> int:
        return len(self._held)

    def most_needed(self, ask: Ask, output_tokens: int) -> int:
        """What a request with answers of this length takes at most: `needed`, if it shares nothing. Costs little."""
        if not ask.sequences:
            return 0
        block = self.block_tokens
        return ask.prompt_tokens + block + ask.sequences * (output_tokens + block)

    def needed(self, ask: Ask, output_tokens: int) -> int:
        """What a request with answers of this length would newly take."""
        if not ask.sequences:
            return 0
        keys = self._keys(ask)
        last = ask.tokens_of(len(keys))
        shared = ask.tokens_of(self._shared(keys)[1])
        rest = max(0, ask.prompt_tokens - last)
        return last - shared + self._whole_blocks(rest) + ask.sequences * self._whole_blocks(output_tokens)

    def reserve(self, ask: Ask, output_tokens: int) -> Reservation:
        """Take what the request needs; each of its sequences answers with so many tokens. Give it to `release` once."""
        if not ask.sequences:
            reservation = Reservation(ask, 0, 0, None, 0)  # no engine sequence
            self._held.add(reservation)
            return reservation
        if (keys := ask.keys) and self.shares and ask.reads_cache:
            last = ask.tokens_of(len(keys))
            stretch, depth = self._lean(ask, keys, last)
        else:
            stretch, depth, last = None, 0, 0
        block, rest = self.block_tokens, ask.prompt_tokens - last
        answers = -(-output_tokens // block) * block * ask.sequences  # written out: this is made for every request
        own = answers - (-rest // block) * block if rest > 0 else answers
        reservation = Reservation(ask, own, answers, stretch, depth)
        self.taken_tokens += own
        self._outlook = None
        self._held.add(reservation)
        return reservation

    def on_tokens(self, reservation: Reservation, tokens: int) -> int:
        """So many more tokens of the answers came. What is reserved grows by a tenth, or more, when it is used up.

        Returns how many more may come until this has to be called again.
        """
        reservation.came_tokens += tokens
        reserved = reservation.output_tokens
        lacking = reservation.came_tokens - reserved
        if lacking < 0:
            return min(-lacking, _COUNTED_TOKENS)
        limit = reservation.ask.output_tokens
        most = _ENDLESS if limit is None else self._whole_blocks(limit) * reservation.ask.sequences
        if reservation.released or reserved >= most or not reservation.ask.sequences:
            return _ENDLESS
        more = min(most - reserved, self._whole_blocks(max(lacking + 1, int(reserved * _GROWTH))))
        reservation.own_tokens += more
        reservation.output_tokens += more
        self.taken_tokens += more
        self._outlook = None
        return min(more - lacking, _COUNTED_TOKENS) if more > lacking else _ENDLESS

    def on_usage(self, reservation: Reservation, tokens: int) -> None:
        """The engine says that the answers had so many tokens: tells how many each event stands for."""
        if reservation.came_tokens >= _TELLING_EVENTS:
            share = max(1.0, tokens / reservation.came_tokens)
            self._tokens_of_event += _SMOOTHING * (share - self._tokens_of_event)

    def release(self, reservation: Reservation) -> None:
        """Give back what it holds, but for what others use too. Only the first call counts."""
        if reservation.released:
            return
        reservation.released = True
        self._outlook = None
        self._held.discard(reservation)
        self.taken_tokens -= reservation.own_tokens
        stretch, depth = reservation._stretch, reservation._depth
        while stretch is not None:  # the root has a user that never leaves
            users = stretch.users
            if users[depth] > 1:
                users[depth] -= 1
                return
            del users[depth]
            if users:
                if depth == stretch.end:
                    self._cut(stretch, max(users))
                return
            self.taken_tokens -= stretch.tokens
            depth, first = stretch.start, stretch.creator.keys[stretch.start]
            gone, stretch = stretch, stretch.leans_on
            if stretch is not None and stretch.below.get(first) is gone:
                del stretch.below[first]

    def outlook(self, now: float) -> PeakForecast:
        """The most that will be in use at once, by how far answers are; a little older, the more of them there are."""
        outlook = self._outlook
        if outlook is None or now - self._outlook_seconds > _OUTLOOK_SECONDS * len(self._held):
            lasting, courses = self.taken_tokens, []
            for reservation in self._held:
                if reservation.ask.streams and reservation.ask.sequences:
                    alone = reservation.tokens_alone
                    lasting -= alone
                    courses.append(
                        self._course(alone, reservation.left_steps(self._tokens_of_event), reservation.ask.sequences)
                    )
            outlook = self._outlook = PeakForecast(lasting, courses)
            self._outlook_seconds = now
        return outlook

    def peak_with(self, ask: Ask, output_tokens: int, now: float) -> int:
        """The most that will be in use at once if a request with answers of this length begins now."""
        outlook, needed = self.outlook(now), self.needed(ask, output_tokens)
        if not ask.streams or not ask.sequences:
            return outlook.peak_tokens + needed  # nobody will see how far it is
        return outlook.peak_with(self._course(needed, output_tokens, ask.sequences))

    def _course(self, final_tokens: int, left_steps: int, sequences: int) -> Growth:
        """Of a request that has so many tokens in the end; blocks that are begun count as whole ones."""
        return Growth(left_steps, final_tokens - sequences * (left_steps - left_steps % self.block_tokens), sequences)

    def _keys(self, ask: Ask) -> Sequence[int]:
        return ask.keys if self.shares and ask.reads_cache else ()

    def _whole_blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens) * self.block_tokens

    def _shared(self, keys: Sequence[int]) -> tuple[_RadixNode, int]:
        """The deepest stretch that the prompt has blocks in, and how many of its leading blocks are in use."""
        stretch, depth, count = self._root, 0, len(keys)
        while depth < count:
            below = stretch.below.get(keys[depth])
            if below is None or below.start != depth:  # the latter: keys are hashes, and those of two blocks collide
                break
            stretch, depth = below, _alike(keys, below.creator.keys, depth, min(count, below.end))
        return stretch, depth

    def _lean(self, ask: Ask, keys: Sequence[int], last: int) -> tuple[_RadixNode, int]:
        """Use the prompt's blocks, which have `last` tokens: the deepest stretch, and how many blocks."""
        stretch, depth = self._shared(keys)
        users = stretch.users
        users[depth] = users.get(depth, 0) + 1
        if depth == len(keys):
            return stretch, depth
        tokens = last - ask.tokens_of(depth)
        self.taken_tokens += tokens
        new = _RadixNode(ask, depth, len(keys), tokens, stretch)
        stretch.below.setdefault(keys[depth], new)
        return new, len(keys)

    def _cut(self, stretch: _RadixNode, end: int) -> None:
        """Nobody uses the stretch from there on."""
        measured = stretch.creator.tokens_of
        kept = min(stretch.tokens, measured(end) - measured(stretch.start))
        self.taken_tokens -= stretch.tokens - kept
        stretch.tokens, stretch.end = kept, end


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
