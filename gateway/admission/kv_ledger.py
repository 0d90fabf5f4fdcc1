"""What running requests take of one engine's KV cache, in tokens: a prefix that several of them use is counted once.

Prompts in use form a trie. Blocks that one request was the first to use are kept as one stretch of it, however many
they are; others lean on a stretch as far as they share it, and it is cut back to where somebody still does when its
last users leave. The set of keys in use is closed towards the start of a chain, so the first key that is not in use is
found by bisection. Taking costs O(log blocks + new blocks), giving back O(own blocks).
"""

from collections.abc import Sequence

from gateway.request import Ask


class _Stretch:
    """Consecutive blocks of one prompt, from block `start` to before block `end`.

    `users` says how many requests and later stretches lean on it, by the depth that they need. `tokens` is what is
    counted for it; what of that goes when it is cut back is reckoned as its creator measured it.
    """

    __slots__ = ("creator", "end", "leans_on", "start", "tokens", "users")

    def __init__(self, creator: Ask, start: int, end: int, tokens: int, leans_on: "_Stretch | None") -> None:
        self.creator = creator
        self.start = start
        self.end = end
        self.tokens = tokens
        self.leans_on = leans_on
        self.users: dict[int, int] = {}


class Reservation:
    """KV tokens held by one request until it is released.

    `own_tokens` nobody shares: the prompt beyond its last block, and the answer. `output_tokens` of these are for the
    answer's tokens.
    """

    __slots__ = ("_depth", "_stretch", "output_tokens", "own_tokens", "released")

    def __init__(self, own_tokens: int, output_tokens: int, stretch: _Stretch | None, depth: int) -> None:
        self.own_tokens = own_tokens
        self.output_tokens = output_tokens
        self.released = False
        self._stretch = stretch
        self._depth = depth


class KvLedger:
    """Owner of the KV tokens that are reserved on one engine.

    `block_tokens` is the size of the engine's blocks: nothing that is not shared takes less than whole ones. Without
    `shares`, as where an engine caches no prefixes, every request counts for itself.
    """

    __slots__ = ("_held", "_stretches", "block_tokens", "shares", "taken_tokens")

    def __init__(self, block_tokens: int = 16, *, shares: bool = True) -> None:
        self.block_tokens = block_tokens
        self.shares = shares
        self.taken_tokens = 0
        self._stretches: dict[int, _Stretch] = {}  # by the keys of their blocks: just these are in use
        self._held: set[Reservation] = set()

    def __repr__(self) -> str:
        return f"<KvLedger {self.taken_tokens} tokens, {len(self._held)} requests, {len(self._stretches)} blocks>"

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
        shared = ask.tokens_of(self._depth(keys)) if keys else 0
        return last - shared + self._rest(ask, last) + ask.sequences * self._whole_blocks(output_tokens)

    def reserve(self, ask: Ask, output_tokens: int) -> Reservation:
        """Take what the request needs; each of its sequences answers with so many tokens. Give it to `release` once."""
        if not ask.sequences:
            reservation = Reservation(0, 0, None, 0)  # no engine sequence
            self._held.add(reservation)
            return reservation
        keys = self._keys(ask)
        stretch, depth, last = self._lean(ask, keys) if keys else (None, 0, 0)
        answers = ask.sequences * self._whole_blocks(output_tokens)
        own = self._rest(ask, last) + answers
        reservation = Reservation(own, answers, stretch, depth)
        self.taken_tokens += own
        self._held.add(reservation)
        return reservation

    def grow(self, reservation: Reservation, output_tokens: int) -> None:
        """More of an answer came, or will come, than was reserved for: by so many tokens."""
        if reservation.released:
            return
        more = self._whole_blocks(output_tokens)
        reservation.own_tokens += more
        reservation.output_tokens += more
        self.taken_tokens += more

    def release(self, reservation: Reservation) -> None:
        """Give back what it holds, but for what others use too. Only the first call counts."""
        if reservation.released:
            return
        reservation.released = True
        self._held.discard(reservation)
        self.taken_tokens -= reservation.own_tokens
        stretch, depth = reservation._stretch, reservation._depth
        while stretch is not None:
            users = stretch.users
            if users[depth] > 1:
                users[depth] -= 1
                return
            del users[depth]
            if users and depth < stretch.end:
                return  # somebody needs more of it
            start = stretch.start
            self._cut(stretch, max(start, *users) if users else start)
            if users:
                return
            stretch, depth = stretch.leans_on, start

    def recount(self) -> int:
        """The tokens taken, summed up anew from what holds them; differs from `taken_tokens` only if that is wrong."""
        stretches: dict[int, int] = {}
        for reservation in self._held:
            stretch = reservation._stretch
            while stretch is not None and id(stretch) not in stretches:
                stretches[id(stretch)] = stretch.tokens
                stretch = stretch.leans_on
        return sum(stretches.values()) + sum([reservation.own_tokens for reservation in self._held])

    def _keys(self, ask: Ask) -> Sequence[int]:
        return ask.keys if self.shares and ask.reads_cache else ()

    def _rest(self, ask: Ask, last: int) -> int:
        """The prompt beyond its blocks, which have `last` tokens."""
        rest = ask.prompt_tokens - last
        return self._whole_blocks(rest) if rest > 0 else 0

    def _whole_blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens) * self.block_tokens

    def _depth(self, keys: Sequence[int]) -> int:
        """How many of the leading blocks are in use."""
        known = self._stretches
        if keys[0] not in known:
            return 0
        if keys[-1] in known:
            return len(keys)
        low, high = 0, len(keys) - 1  # the first is in use, the last is not
        while high - low > 1:
            middle = (low + high) // 2
            if keys[middle] in known:
                low = middle
            else:
                high = middle
        return high

    def _lean(self, ask: Ask, keys: Sequence[int]) -> tuple[_Stretch, int, int]:
        """Use the prompt's blocks: the deepest stretch, how far into it, and the tokens of all blocks."""
        known = self._stretches
        depth = self._depth(keys)
        last = ask.tokens_of(len(keys))
        stretch = known[keys[depth - 1]] if depth else None
        if stretch is not None:
            depth = min(depth, stretch.end)  # keys that a client made to collide must not unbalance the sums
        if stretch is None or depth < len(keys):
            tokens = last - ask.tokens_of(depth)
            if stretch is not None:
                stretch.users[depth] = stretch.users.get(depth, 0) + 1
            stretch = _Stretch(ask, depth, len(keys), tokens, stretch)
            for key in keys[depth:]:
                known[key] = stretch
            self.taken_tokens += tokens
            depth = len(keys)
        stretch.users[depth] = stretch.users.get(depth, 0) + 1
        return stretch, depth, last

    def _cut(self, stretch: _Stretch, end: int) -> None:
        """Nobody uses the stretch from there on."""
        creator, forget = stretch.creator, self._stretches.pop
        for key in creator.keys[end : stretch.end]:
            forget(key, None)
        kept = min(stretch.tokens, creator.tokens_of(end) - creator.tokens_of(stretch.start)) if stretch.users else 0
        self.taken_tokens -= stretch.tokens - kept
        stretch.tokens, stretch.end = kept, end
