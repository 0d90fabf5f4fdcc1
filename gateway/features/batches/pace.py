"""How urgent an offline batch is: the time left in its window beyond what its lines need at the measured pace. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from math import exp, inf
from typing import Final


class Urgency(IntEnum):
    """What lines of a batch may use: idle capacity, the share of batch requests, or a part of the interactive one."""

    IDLE = 0
    BATCH = 1
    INTERACTIVE = 2


_BATCH_LAXITY_SECONDS: Final = 1800.0
_INTERACTIVE_LAXITY_SECONDS: Final = 300.0


def urgency(laxity_seconds: float) -> Urgency:
    """By the time left beyond what the remaining lines need at the measured pace."""
    if laxity_seconds > _BATCH_LAXITY_SECONDS:
        return Urgency.IDLE
    return Urgency.BATCH if laxity_seconds > _INTERACTIVE_LAXITY_SECONDS else Urgency.INTERACTIVE


_PACE_SECONDS: Final = 600.0  # over which the pace is averaged: longer than bursts of interactive requests
_LEAST_PACE_SECONDS: Final = 60.0  # before, the pace is unknown


class BatchPace:
    """The pace of one batch, and its laxity. Times are on one clock; `expires_seconds` is the end of its window."""

    __slots__ = ("_at", "_began", "_done", "expires_seconds", "left")

    def __init__(self, began_seconds: float, expires_seconds: float, lines: int) -> None:
        self._began = self._at = began_seconds
        self.expires_seconds = expires_seconds
        self.left = lines
        self._done = 0.0  # fades with time

    def done(self, now: float) -> None:
        self._done = self._done * exp((self._at - now) / _PACE_SECONDS) + 1
        self._at = now
        self.left -= 1

    def remain(self, lines: int) -> None:
        """So many lines are left: other gateways have run some."""
        self.left = lines

    def laxity_seconds(self, now: float) -> float:
        """Time left less the remaining work; the work counts as nothing until the pace is known."""
        left_seconds, passed = self.expires_seconds - now, now - self._began
        if passed < _LEAST_PACE_SECONDS or not self.left:
            return left_seconds
        faded_seconds = _PACE_SECONDS * (1 - exp(-passed / _PACE_SECONDS))
        lines = self._done * exp((self._at - now) / _PACE_SECONDS)
        return left_seconds - self.left * faded_seconds / lines if lines else -inf


@dataclass(frozen=True, slots=True, eq=False)
class OfflineLine:
    """What places a request of an offline batch, besides its demand, which has this.

    `expires_seconds`: the end of the batch's window, on the gateway's clock. `laxity_seconds`: by the time, how much is
    left until then beyond the remaining work. `on_revoked`: the lease is revoked; the request has to be cancelled.
    `continues`: what is generated until then is kept.
    """

    expires_seconds: float
    laxity_seconds: Callable[[float], float]
    on_revoked: Callable[[], None]
    continues: bool = False

    def as_short_call(self) -> "OfflineLine":
        """The same for a call that is not aborted when its lease is revoked: it ends soon by itself."""
        return replace(self, on_revoked=_end_soon)


def _end_soon() -> None:
    """Nothing is to be done: it ends by itself."""
