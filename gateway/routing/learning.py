"""What answers teach: tokens, answer lengths, and whether a backend's cache holds what it is thought to."""

from gateway.request import Ask, Usage
from gateway.routing.estimate import Estimates
from gateway.routing.hit_accuracy import HitAccuracy
from gateway.routing.prefix_index import PrefixIndex

_WORTH_A_LOOK_TOKENS = 1024
_SHARE_THAT_IS_GONE = 0.25
_MISSES = 2  # in a row: one may be a prompt that the engine evicted a little earlier than the record


class Learning:
    """Corrects estimates, the prefix index and the trust in it from reported usage."""

    def __init__(self, estimates: Estimates, index: PrefixIndex, trust: HitAccuracy) -> None:
        self._estimates = estimates
        self._index = index
        self._trust = trust
        self._misses: dict[int, int] = {}  # large hits that did not happen, in a row, by engine

    def answered(self, ask: Ask, seat: int, predicted_hit_tokens: int, usage: Usage) -> None:
        """An answer's usage. A large hit that did not happen means that the backend's cache was lost."""
        prompt, output, cached = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
        if ask.sequences != 1:  # the tokens are those of all its prompts and answers
            self._estimates.learn(ask.model, 0, 0, output // max(1, ask.sequences))
            return
        self._estimates.learn(ask.model, ask.learnable_bytes, prompt, output)
        if not ask.keys or prompt < 1:
            return
        last = ask.keys[-1]
        if ask.edges[-1] == ask.prompt_size:
            self._estimates.remember(last, prompt, output)
        if cached is not None:
            self._trust.observed(seat, int(predicted_hit_tokens / self._trust.share(seat)), cached)
            if predicted_hit_tokens >= _WORTH_A_LOOK_TOKENS and self._is_gone(seat, predicted_hit_tokens, cached):
                self._index.wipe(seat)
                self._index.record(seat, ask.keys, ask.edges)
        if output > 1:
            size = self._estimates.bytes_per_token(ask.model) if ask.learnable_bytes else ask.prompt_size / prompt
            self._index.record_answer(seat, last, int(output * size))

    def _is_gone(self, seat: int, predicted_hit_tokens: int, cached_tokens: int) -> bool:
        """Whether enough large hits in a row did not happen."""
        missed = cached_tokens < _SHARE_THAT_IS_GONE * predicted_hit_tokens
        misses = self._misses.get(seat, 0) + 1 if missed else 0
        self._misses[seat] = misses % _MISSES
        return misses == _MISSES
