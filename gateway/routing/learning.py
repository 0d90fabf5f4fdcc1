"""What answers teach: bytes per token, answer lengths, and whether a backend's cache holds what it is thought to."""

from gateway.request import Ask, Usage
from gateway.routing.estimate import Estimates
from gateway.routing.prefix_index import PrefixIndex

_WORTH_A_LOOK_TOKENS = 1024
_SHARE_THAT_IS_GONE = 0.25


class Learning:
    """Corrects estimates and the prefix index from reported usage."""

    def __init__(self, estimates: Estimates, index: PrefixIndex) -> None:
        self._estimates = estimates
        self._index = index

    def answered(self, ask: Ask, backend: int, predicted_hit_tokens: int, usage: Usage) -> None:
        """An answer's usage. A large hit that did not happen means that the backend's cache was lost."""
        self._estimates.learn(ask.model, ask.prompt_bytes, usage.prompt_tokens, usage.completion_tokens)
        cached = usage.cached_tokens
        if cached is None or predicted_hit_tokens < _WORTH_A_LOOK_TOKENS:
            return
        if cached < _SHARE_THAT_IS_GONE * predicted_hit_tokens:
            self._index.wipe(backend)
            self._index.record(backend, ask.keys)
