"""How far predicted hits are believed, by what engines report: an error that persists lowers it."""

from collections.abc import Callable

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

    def share(self, seat: int) -> float:
        """What a predicted hit is worth there: 1 while predictions hold."""
        return self.lowered.get(seat, 1.0)

    def observed(self, seat: int, predicted_tokens: int, actual_tokens: int) -> None:
        """A request's predicted hit, before it was discounted, and what the engine reported."""
        if predicted_tokens < _LEAST_TOKENS:
            return
        known = self._shares.get(seat, 1.0)
        lately = min(1.0, actual_tokens / predicted_tokens)
        share = self._shares[seat] = max(_LEAST, known + _WEIGHT * (lately - known))
        if share < _GOOD_ENOUGH:
            self.lowered[seat] = share
        else:
            self.lowered.pop(seat, None)
        if seat not in self._low and share < _LOW:
            self._low.add(seat)
        elif seat in self._low and share >= _GOOD_ENOUGH:
            self._low.remove(seat)
        else:
            return
        for tell in self.on_change:
            tell(seat, share, share >= _GOOD_ENOUGH)

    def reset(self, seat: int) -> None:
        """Another process, another cache: what was learned of the old one is void."""
        self._shares.pop(seat, None)
        self.lowered.pop(seat, None)
        self._low.discard(seat)
