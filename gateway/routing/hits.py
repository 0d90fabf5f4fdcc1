"""Predicted hits: how many of a prompt's tokens each engine holds in its KV cache already."""

from collections.abc import Sequence

from gateway.request import Ask
from gateway.routing.exact_index import ExactIndex
from gateway.routing.hit_accuracy import HitAccuracy
from gateway.routing.pending_blocks import PendingBlocks
from gateway.routing.prefix_index import PrefixIndex
from gateway.routing.seat import Seat


class Hits:
    """Reads the exact blocks where there are any, else the own record, as far as that is trusted."""

    def __init__(self, index: PrefixIndex, trust: HitAccuracy, exact: ExactIndex | None = None) -> None:
        self.index = index
        self._trust = trust
        self._exact = exact
        self.coming = PendingBlocks()

    def of(self, ask: Ask, seats: Sequence[Seat]) -> list[int]:
        """Tokens, for each seat. An engine finds whole blocks only, and always computes the last token."""
        if not ask.reads_cache:
            return [0] * len(seats)
        depths = self.index.depths(ask.keys)
        exact = self._exact_depths(ask)
        if not exact and not any(depths):
            return [0] * len(seats)
        turn, turn_end, most = ask.turn, ask.turn_end, ask.prompt_tokens - 1
        answered = self.index.answered(ask.keys[turn - 1]) if turn_end else 0
        lowered, known, hits = self._trust.lowered, {0: 0}, [0] * len(seats)
        for place, seat in enumerate(seats):
            index = seat.index
            if index in exact:
                held = exact[index] * seat.block_tokens
            elif depth := depths[index]:
                has_answer = answered and turn <= depth < turn_end and answered >> index & 1
                if has_answer:
                    depth = turn_end
                if depth not in known:
                    known[depth] = ask.tokens_shared(depth)
                held = known[depth] - 1 if has_answer else known[depth]  # an answer's last token is never computed
                if index in lowered:
                    held = int(held * lowered[index])
            else:
                continue
            if seat.caches_prefixes:
                block = seat.block_tokens
                hits[place] = (held if held < most else most) // block * block
        return hits

    def _exact_depths(self, ask: Ask) -> dict[int, int]:
        """Blocks held or on their way, by engine, of those that tell."""
        keys, exact = ask.token_keys, self._exact
        if not keys or exact is None:
            return {}
        found = {engine: depth for engine, depth in enumerate(exact.depths(keys)) if exact.live(engine)}
        if self.coming:
            for engine, depth in found.items():
                while depth < len(keys) and (more := self.coming.run(engine, keys, depth)):
                    depth += more
                    depth += exact.depths(keys[depth:])[engine]  # engines evict a block before its successors
                found[engine] = depth
        return found

    def placed(self, ask: Ask, seat: Seat) -> None:
        """The engine will hold this prompt."""
        if ask.turn_end:
            self.index.supersede_answer(seat.index, ask.keys[ask.turn - 1])
        self.index.record(seat.index, ask.keys, ask.edges)
        if ask.token_keys and self._exact is not None and self._exact.live(seat.index):
            held = self._exact.depths(ask.token_keys)[seat.index]
            self.coming.expect(seat.index, ask.token_keys[held:])
