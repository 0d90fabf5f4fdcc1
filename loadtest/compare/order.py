"""In which order arms take their turns."""

from __future__ import annotations

import random
from collections.abc import Sequence


def turn_order(arms: Sequence[str], repetitions: int, seed: int) -> list[list[str]]:
    """The arms of each repetition: in another order each time, so that none always follows the same one or is last."""
    first = random.Random(f"order-{seed}").sample(list(arms), len(arms))
    step = max(1, len(first) // max(repetitions, 1))
    orders = []
    for repetition in range(repetitions):
        shift = repetition * step % max(len(first), 1)
        order = first[shift:] + first[:shift]
        orders.append(order[::-1] if repetition % 2 else order)
    return orders
