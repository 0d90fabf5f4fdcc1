"""Running estimates learned from what engines report: bytes per token, tokens of known prompts, tokens per answer."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

_MAX_KNOWN = 65536
_MOST_MODELS = 1024
_ALIKE = 2.0  # an answer that comes back may differ by this factor in length, and 64 bytes, from what was generated


class Counted(NamedTuple):
    """What an engine counted in a prompt, and in its answer."""

    prompt_tokens: int
    output_tokens: int


class Measure(NamedTuple):
    """A prompt's tokens, the first part of it for which an engine has told them, and whether its last answer is whole.

    A client may leave out what a model only thought; then the cache holds something else than the conversation.
    """

    prompt_tokens: int
    anchor_size: int = 0
    anchor_tokens: int = 0
    answer_is_whole: bool = False


class Estimates:
    """Estimates of each model, and of prompts that engines have counted."""

    def __init__(self, bytes_per_token: float = 4.0, output_tokens: float = 200.0) -> None:
        self._start_ratio = bytes_per_token
        self._ratios: dict[str, tuple[float, int]] = {}
        self._known: OrderedDict[int, Counted] = OrderedDict()  # by the prompt's last key
        self._start_output_tokens = output_tokens
        self._answers: dict[str, tuple[float, int]] = {}  # mean length and number, by model

    def bytes_per_token(self, model: str) -> float:
        """Prompt bytes that make one token of this model; 4 until an answer has told."""
        known = self._ratios.get(model)
        return known[0] if known else self._start_ratio

    def measure(
        self, model: str, keys: Sequence[int], edges: Sequence[int], size: int, turn: int, turn_end: int
    ) -> Measure:
        """The tokens of a prompt of `size` bytes; `turn` and `turn_end` as in `Ask`."""
        ratio, anchor, tokens, is_whole = self.bytes_per_token(model), 0, 0, False
        if turn and (known := self._known.get(keys[turn - 1])) is not None:
            anchor, tokens, after = edges[turn - 1], known.prompt_tokens, edges[turn_end - 1]
            expected = known.output_tokens * ratio
            is_whole = expected / _ALIKE - 64 <= after - anchor <= expected * _ALIKE + 64
            if is_whole:
                anchor, tokens = after, tokens + known.output_tokens
        if keys and edges[-1] == size and (known := self._known.get(keys[-1])) is not None:
            return Measure(known.prompt_tokens, size, known.prompt_tokens, is_whole)
        return Measure(max(1, tokens + int((size - anchor) / ratio)), anchor, tokens, is_whole)

    def output_tokens(self, model: str) -> float:
        """The mean length of this model's answers; 200 until one has told."""
        known = self._answers.get(model)
        return known[0] if known else self._start_output_tokens

    def expected_output_tokens(self, model: str, limit: int | None) -> float:
        """The expected length of an answer whose client allows it so many tokens; None = any number."""
        expected = self.output_tokens(model)
        return expected if limit is None or limit > expected else limit

    def learn(self, model: str, prompt_bytes: int, prompt_tokens: int, output_tokens: int) -> None:
        """An answer's usage. Short prompts are mostly chat template and tell nothing of the ratio."""
        if prompt_tokens >= 64 and prompt_bytes >= 256:
            ratio, seen = self._ratios.get(model, (self._start_ratio, 0))
            weight = max(0.02, 1 / (seen + 1))
            sample = min(16.0, max(0.5, prompt_bytes / prompt_tokens))
            _bound(self._ratios)
            self._ratios[model] = (ratio + weight * (sample - ratio), seen + 1)
        if output_tokens > 0:
            mean, answers = self._answers.get(model, (self._start_output_tokens, 0))
            answers = min(answers + 1, 500)
            _bound(self._answers)
            self._answers[model] = mean + (output_tokens - mean) / answers, answers

    def remember(self, prompt_key: int, prompt_tokens: int, output_tokens: int) -> None:
        """What an engine counted in the prompt whose last key this is."""
        self._known[prompt_key] = Counted(prompt_tokens, output_tokens)
        self._known.move_to_end(prompt_key)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)


def _bound(by_model: dict[str, tuple[float, int]]) -> None:
    """Make room: adapters come and go."""
    if len(by_model) > _MOST_MODELS:
        del by_model[next(iter(by_model))]
