"""Predicted hits: how many of a prompt's tokens each engine has in its KV cache.

The prediction joins the gateway's own record, the engines' KV events, blocks that were sent and are not in the events
yet (events are tens of milliseconds late, and requests that begin alike often come closer together), how accurate
predictions were lately, and engines whose events have stopped although the connection stands.
"""

from collections.abc import Callable, Iterable, Sequence

from gateway.request import Ask
from gateway.routing.engine import Engine
from gateway.routing.exact_index import ExactIndex
from gateway.routing.prefix_index import PrefixIndex

LIFE_SECONDS = 5.0  # what was not told after this to twice this never will be: the request failed


class PendingBlocks:
    """Keys of `routing.token_blocks`, by engine, until events tell of them."""

    def __init__(self) -> None:
        self._young: dict[int, int] = {}  # key -> bit mask of engines
        self._old: dict[int, int] = {}
        self._since_seconds = 0.0

    def __bool__(self) -> bool:
        return bool(self._young or self._old)

    def expect(self, engine: int, keys: Iterable[int]) -> None:
        """A prompt with these blocks was sent there."""
        young, bit = self._young, 1 << engine
        for key in keys:
            young[key] = young.get(key, 0) | bit

    def told(self, engine: int, keys: Iterable[int]) -> None:
        """The engine's events speak for these blocks from now on."""
        if not self:
            return
        others = ~(1 << engine)
        for key in keys:
            for generation in (self._young, self._old):
                if key not in generation:
                    continue
                if left := generation[key] & others:
                    generation[key] = left
                else:
                    del generation[key]

    def forget(self, engine: int) -> None:
        """Nothing is on its way there."""
        self.told(engine, [*self._young, *self._old])

    def age(self, now: float) -> None:
        """Time has passed; to be told now and then."""
        if now - self._since_seconds >= LIFE_SECONDS:
            self._since_seconds = now
            self._young, self._old = {}, self._young

    def run(self, engine: int, keys: Sequence[int], start: int) -> int:
        """How many of these blocks, from `start` on, follow each other on their way to the engine."""
        young, old, end = self._young, self._old, start
        while end < len(keys) and (young.get(keys[end], 0) | old.get(keys[end], 0)) >> engine & 1:
            end += 1
        return end - start


_WEIGHT = 0.2
_LEAST_TOKENS = 64  # predicted; less says little
_GOOD_ENOUGH = (
    0.8  # no correction for what a partly filled block, or a prompt that was still being computed, takes away
)
_LOW = 0.5
_LEAST = 0.1  # share: what is predicted must stay large enough to be confirmed


class HitAccuracy:
    """Share of the predicted hit tokens that each engine has lately confirmed.

    `on_change` hears of falls and rises: the engine, its share, and whether predictions hold there.
    """

    def __init__(self) -> None:
        self._shares: dict[int, float] = {}
        self.lowered: dict[int, float] = {}  # the shares of those whose predictions do not hold
        self._low: set[int] = set()
        self.on_change: list[Callable[[int, float, bool], None]] = []

    def share(self, engine: int) -> float:
        """What a predicted hit is worth there: 1 while predictions hold."""
        return self.lowered.get(engine, 1.0)

    def observed(self, engine: int, predicted_tokens: int, actual_tokens: int) -> None:
        """A request's predicted hit, before it was discounted, and what the engine reported."""
        if predicted_tokens < _LEAST_TOKENS:
            return
        known = self._shares.get(engine, 1.0)
        lately = min(1.0, actual_tokens / predicted_tokens)
        share = self._shares[engine] = max(_LEAST, known + _WEIGHT * (lately - known))
        if share < _GOOD_ENOUGH:
            self.lowered[engine] = share
        else:
            self.lowered.pop(engine, None)
        if engine not in self._low and share < _LOW:
            self._low.add(engine)
        elif engine in self._low and share >= _GOOD_ENOUGH:
            self._low.remove(engine)
        else:
            return
        for tell in self.on_change:
            tell(engine, share, share >= _GOOD_ENOUGH)

    def reset(self, engine: int) -> None:
        """Another process, another cache: what was learned of the old one is void."""
        self._shares.pop(engine, None)
        self.lowered.pop(engine, None)
        self._low.discard(engine)


class Hits:
    """Reads the exact blocks where there are any, else the own record, as far as that is trusted."""

    def __init__(self, index: PrefixIndex, trust: HitAccuracy, exact: ExactIndex | None = None) -> None:
        self.index = index
        self._trust = trust
        self._exact = exact
        self.coming = PendingBlocks()

    def of(self, ask: Ask, engines: Sequence[Engine]) -> list[int]:
        """Tokens, for each engine. An engine finds whole blocks only, and always computes the last token."""
        if not ask.reads_cache:
            return [0] * len(engines)
        depths = self.index.depths(ask.keys)
        exact = self._exact_depths(ask)
        if not exact and not any(depths):
            return [0] * len(engines)
        turn, turn_end, most = ask.turn, ask.turn_end, ask.prompt_tokens - 1
        answered = self.index.answered(ask.keys[turn - 1]) if turn_end else 0
        lowered, known, hits = self._trust.lowered, {0: 0}, [0] * len(engines)
        for place, engine in enumerate(engines):
            index = engine.index
            if index in exact:
                held = exact[index] * engine.block_tokens
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
            if engine.caches_prefixes:
                block = engine.block_tokens
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

    def placed(self, ask: Ask, engine: Engine) -> None:
        """The engine will hold this prompt."""
        if ask.turn_end:
            self.index.supersede_answer(engine.index, ask.keys[ask.turn - 1])
        self.index.record(engine.index, ask.keys, ask.edges)
        if ask.token_keys and self._exact is not None and self._exact.live(engine.index):
            held = self._exact.depths(ask.token_keys)[engine.index]
            self.coming.expect(engine.index, ask.token_keys[held:])


PATIENCE_SECONDS = 3.0  # events follow an answer by tens of milliseconds


class StaleEventDetector:
    """Who is waited for, since when. Times are those at which requests ended."""

    def __init__(self) -> None:
        self._unheard: dict[int, float] = {}
        self._silent: set[int] = set()

    def __contains__(self, engine: int) -> bool:
        return engine in self._silent

    def answered(self, engine: int, now: float) -> None:
        """It has computed blocks of which it has told nothing yet."""
        self._unheard.setdefault(engine, now)

    def heard(self, engine: int) -> bool:
        """It told something. Whether it had fallen silent."""
        self._unheard.pop(engine, None)
        was_silent = engine in self._silent
        self._silent.discard(engine)
        return was_silent

    def fallen(self, now: float) -> list[int]:
        """Engines that have been waited for too long by now, each told once."""
        fallen = [engine for engine, since in self._unheard.items() if now - since > PATIENCE_SECONDS]
        for engine in fallen:
            del self._unheard[engine]
        self._silent.update(fallen)
        return fallen
