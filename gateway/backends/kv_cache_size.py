"""The size of a backend's KV cache: as reported, or as large as its usage shows that it is. Pure.

Reported sizes can be too small: a product of blocks and block size for a model that mixes attention kinds, or a wrong
label. Then the gateway reserves a fraction of the cache. The engine's usage contradicts such a size: sequences that
certainly hold so many tokens fill only this share of the cache. The opposite is no evidence, because other traffic, and
what the gateway does not count, use the cache too. So a size is only ever raised.
"""

from collections.abc import Iterable

from gateway.routing.engine import Engine

_LEAST_USAGE = 0.05  # of the cache, to say something about its size
_LEAST_SAMPLES = 5
_FADE = 0.9  # of the weight of earlier samples, at each
_CONTRADICTS = 1.25  # times the reported size; prompts are measured with less error than that
_MOVES = 0.05  # smaller changes of the size are not worth what follows from them


class KvCacheSize:
    """Tokens in the KV cache of a backend, over its engines; None = unknown."""

    def __init__(self) -> None:
        self.tokens: int | None = None
        self._reported: int | None = None
        self.forget()

    def report(self, tokens: int | None) -> None:
        """Follow the reported size; another one voids the evidence."""
        if tokens != self._reported:
            self._reported = self.tokens = tokens
            self.forget()

    def forget(self) -> None:
        """Void the evidence: another process answers."""
        self.tokens = self._reported
        self._samples, self._products, self._squares = 0, 0.0, 0.0

    def observe(self, held_tokens: int, usage: float) -> None:
        """Compare the tokens that requests certainly hold with the share of the cache in use (least squares)."""
        reported = self._reported
        if reported is None or usage < _LEAST_USAGE or not held_tokens:
            return
        self._samples += 1
        self._products = _FADE * self._products + held_tokens * usage
        self._squares = _FADE * self._squares + usage * usage
        if self._samples < _LEAST_SAMPLES:
            return
        shown = self._products / self._squares
        tokens = round(shown) if shown > _CONTRADICTS * reported else reported
        if self.tokens is None or abs(tokens - self.tokens) > _MOVES * self.tokens:
            self.tokens = tokens


def held_tokens(engines: Iterable[Engine]) -> int:
    """KV tokens that requests in flight certainly hold: shared prefixes once, and of answers what has been streamed."""
    held = 0
    for engine in engines:
        held += engine.kv.taken_tokens
        for request in engine.kv.held:
            if request in engine.load.pending or not request.demand.streams:
                held -= request.tokens_alone  # it may still wait inside
            else:
                held -= max(0, request.output_tokens - request.streamed_tokens)
    return held
