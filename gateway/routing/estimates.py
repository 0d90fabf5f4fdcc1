"""Running estimates learned from answers: bytes per token, tokens of known prompts, answer lengths, prefill seconds.

Seconds per uncached prefill token come from times to first token, one value for each model. Learning a speed for each
backend of a model would feed back on itself (the faster-looking one gets more, and looks slower), so relative speeds
come from the configuration.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gateway.request import Ask, Usage
from gateway.routing.cache_view import HitAccuracy
from gateway.routing.cost import CostModel
from gateway.routing.prefix_index import PrefixIndex

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


_MIN_TOKENS = 64
_CLIP = (0.25, 4.0)
_LEAST_WEIGHT = 0.05
_B_RANGE = (1e-7, 1e-1)
_STEP = 0.02  # share by which a value has to move before the model follows: every change voids what costs were kept
_WINDOW_TOKENS = 3600  # prefill that may be ahead on an open backend: about 0.4 of a token budget
_WINDOW_FLOOR_SECONDS = 0.02  # the way to the backend and back, and tokenization, must be covered


class Calibrations:
    """Owner of what is learned of each model. `family` names the model whose engines a model runs on: an adapter's
    base, or the model that goes by several names."""

    def __init__(
        self,
        start: CostModel,
        window_seconds: float | None = None,
        family: Callable[[str], str] = lambda model: model,
    ) -> None:
        self._start = start
        self._window_seconds = window_seconds
        self._family = family
        self._unknown = Calibration(start, window_seconds)
        self._known: dict[str, Calibration] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, model: str) -> "Calibration":
        """What is known of a model, to be read."""
        return self._known.get(self._family(model), self._unknown)

    def learning(self, model: str) -> "Calibration":
        """The same, to be taught: of a model that has answered."""
        family = self._family(model)
        known = self._known.get(family)
        if known is None:
            if len(self._known) >= _MOST_MODELS:
                del self._known[next(iter(self._known))]
            known = self._known[family] = Calibration(self._start, self._window_seconds)
        return known


class Calibration:
    """Owner of one model's cost model in force."""

    def __init__(self, model: CostModel, window_seconds: float | None = None) -> None:
        self.model = model
        self._b = model.b  # as learned; the model's follows in steps
        self._window_seconds = window_seconds
        self._samples = 0

    @property
    def window_seconds(self) -> float:
        """Most prefill that may be ahead on a backend that is open."""
        if self._window_seconds is not None:
            return self._window_seconds
        return max(_WINDOW_FLOOR_SECONDS, _WINDOW_TOKENS * self.model.b)

    def first_token(self, uncached_tokens: int, predicted_seconds: float, seconds: float) -> None:
        """A request that was alone in prefill on its backend got its first token after this time."""
        if uncached_tokens < _MIN_TOKENS or predicted_seconds <= 0 or seconds <= 0:
            return
        self._samples += 1
        weight = max(_LEAST_WEIGHT, 1 / (self._samples + 1))
        ratio = min(_CLIP[1], max(_CLIP[0], seconds / predicted_seconds))
        b = self._b = min(_B_RANGE[1], max(_B_RANGE[0], self._b * ratio**weight))
        if abs(b - self.model.b) > _STEP * self.model.b:
            self.model = CostModel(b, self.model.decode_weight, self.model.max_batched_tokens)

    def at_most(self, uncached_tokens: int, predicted_seconds: float, seconds: float) -> None:
        """The same for a request whose first token was not seen, but whose whole answer came in less than predicted."""
        if seconds < predicted_seconds:
            self.first_token(uncached_tokens, predicted_seconds, seconds)


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

    def answered(self, ask: Ask, engine: int, predicted_hit_tokens: int, usage: Usage) -> None:
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
            self._trust.observed(engine, int(predicted_hit_tokens / self._trust.share(engine)), cached)
            if predicted_hit_tokens >= _WORTH_A_LOOK_TOKENS and self._is_gone(engine, predicted_hit_tokens, cached):
                self._index.wipe(engine)
                self._index.record(engine, ask.keys, ask.edges)
        if output > 1:
            size = self._estimates.bytes_per_token(ask.model) if ask.learnable_bytes else ask.prompt_size / prompt
            self._index.record_answer(engine, last, int(output * size))

    def _is_gone(self, engine: int, predicted_hit_tokens: int, cached_tokens: int) -> bool:
        """Whether enough large hits in a row did not happen."""
        missed = cached_tokens < _SHARE_THAT_IS_GONE * predicted_hit_tokens
        misses = self._misses.get(engine, 0) + 1 if missed else 0
        self._misses[engine] = misses % _MISSES
        return misses == _MISSES
