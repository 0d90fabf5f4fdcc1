"""The one constant that has to be learned: seconds per uncached prefill token, from times to first token.

One value for each model: an 8B tells nothing of a 70B. Learning a speed for each backend of a model would feed back on
itself (the faster-looking one gets more, and looks slower), so relative speeds come from the configuration.
"""

from collections.abc import Callable

from gateway.routing.cost import CostModel

_MIN_TOKENS = 64
_CLIP = (0.25, 4.0)
_LEAST_WEIGHT = 0.05
_B_RANGE = (1e-7, 1e-1)
_STEP = 0.02  # share by which a value has to move before the model follows: every change voids what costs were kept
_WINDOW_TOKENS = 3600  # prefill that may be ahead on an open backend: about 0.4 of a token budget
_WINDOW_FLOOR_SECONDS = 0.02  # the way to the backend and back, and tokenization, must be covered


_MOST_MODELS = 1024


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
