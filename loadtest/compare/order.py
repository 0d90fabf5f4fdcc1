"""In which order arms take their turns."""

from __future__ import annotations

import random
from collections.abc import Sequence


def turn_order(arms: Sequence[str], repetitions: int, seed: int) -> list[list[str]]:
    """The arms of each repetition: another one begins it, and every second goes round the other way."""
    drawn = random.Random(f"order-{seed}").sample(list(arms), len(arms))
    many, step = len(drawn), max(1, len(drawn) // max(repetitions, 1))
    return [
        [drawn[(repetition * step + (-place if repetition % 2 else place)) % many] for place in range(many)]
        for repetition in range(repetitions)
    ]
