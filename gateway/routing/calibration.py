"""The one constant that has to be learned: seconds per uncached prefill token, from times to first token.

One value for the fleet: learning a speed for each backend feeds back on itself (the faster-looking one gets more, and
looks slower), so relative speeds come from the configuration.
"""

from gateway.routing.cost import CostModel

_MIN_TOKENS = 64
_CLIP = (0.25, 4.0)
_LEAST_WEIGHT = 0.05
_B_RANGE = (1e-7, 1e-1)
_STEP = 0.02  # share by which a value has to move before the model follows: every change voids what costs were kept
_WINDOW_TOKENS = 3600  # prefill that may be ahead on an open backend: about 0.4 of a token budget
_WINDOW_FLOOR_SECONDS = 0.02  # the way to the backend and back, and tokenization, must be covered


class Calibration:
    """Owner of the cost model in force."""

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
