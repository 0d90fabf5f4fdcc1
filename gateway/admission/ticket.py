"""A place in the waiting line."""

from math import inf

import numpy as np

from gateway.admission.fairness import expected_tokens
from gateway.request import Ask
from gateway.routing.matrix import Hit

_NO_HITS: Hit = np.zeros(0)


class Ticket:
    """One waiting request."""

    __slots__ = (
        "arrived_seconds", "ask", "avoid", "goes_anywhere", "hits", "hits_of", "hits_seconds", "late_seconds",
        "opening", "prefill_seconds", "tokens", "turn",
    )  # fmt: skip

    def __init__(self, ask: Ask, arrived_seconds: float, avoid: frozenset[str], prefill_seconds: float) -> None:
        self.ask = ask
        self.arrived_seconds = arrived_seconds
        self.avoid = avoid
        self.goes_anywhere = not avoid and ask.pinned is None and ask.rank is None and ask.sequences == 1
        self.prefill_seconds = prefill_seconds  # on the backend that holds most of its prompt
        # When even the least prefill would end after its deadline.
        self.late_seconds = inf if ask.deadline_seconds is None else ask.deadline_seconds - prefill_seconds
        self.turn = prefill_seconds  # who comes first: the least prefill, and what was waited for counts against it
        self.tokens = expected_tokens(ask, 0, 0.0)  # that it will take of its tenant's share
        self.opening = ask.keys[0] if ask.keys else 0
        self.hits = _NO_HITS  # predicted, for each of the seats `hits_of`, at `hits_seconds`
        self.hits_of: object = None
        self.hits_seconds = 0.0
