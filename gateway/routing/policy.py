"""Routing policies: given one request and the backends that could take it, what would each cost?"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gateway.request import Ask
from gateway.routing.blocks import bytes_of
from gateway.routing.calibration import Calibration
from gateway.routing.cost import placement_seconds, prefill_seconds
from gateway.routing.estimate import Estimates
from gateway.routing.load import Load
from gateway.routing.prefix_index import PrefixIndex


@dataclass(slots=True, eq=False)
class Seat:
    """One backend as placement keeps it: its number, its load, and its sizes at this moment."""

    index: int
    name: str
    load: Load = field(default_factory=Load)
    cap: int = 256
    slots: int = 256  # the cap, less while the backend starts slowly
    kv_cache_tokens: int | None = None
    caches_prefixes: bool = True
    slowness: float = 1.0  # the root of its configured relative time: full weight would overload the fast ones
    placed: int = 0


@dataclass(slots=True)
class Option:
    """What one backend means for one request: cost in seconds, its own prefill, and predicted hit."""

    seat: Seat
    cost: float
    prefill_seconds: float
    hit_tokens: int


class Policy(Protocol):
    """A policy ranks; placement decides what is open and who waits.

    `waits_for_best`: a request may wait for its best backend though another is open.
    """

    waits_for_best: bool

    def options(self, ask: Ask, seats: Sequence[Seat], now: float) -> list[Option]:
        """One option for each seat, in the same order."""

    def placed(self, ask: Ask, option: Option) -> None:
        """The request is sent to the option's backend."""


class PrefixPolicy:
    """Marginal cost, with the part of the prompt that each backend already holds taken off."""

    waits_for_best = True

    def __init__(self, calibration: Calibration, index: PrefixIndex, estimates: Estimates) -> None:
        self._calibration = calibration
        self._index = index
        self._estimates = estimates

    def options(self, ask: Ask, seats: Sequence[Seat], now: float) -> list[Option]:
        """Costs by `routing.cost`."""
        depths = self._index.depths(ask.keys)
        ratio = self._estimates.bytes_per_token(ask.model)
        output = self._estimates.output_tokens
        if ask.output_tokens is not None:
            output = min(output, ask.output_tokens)
        mean_batch = sum([seat.load.in_flight for seat in seats]) / max(1, len(seats))
        tokens, model, options = ask.prompt_tokens, self._calibration.model, []
        for seat in seats:
            depth, slowness = depths[seat.index] if seat.caches_prefixes else 0, seat.slowness
            hit = min(int(bytes_of(depth) / ratio), tokens) if depth else 0
            own = prefill_seconds(model, slowness, tokens, hit)
            cost = placement_seconds(
                model, seat.load, seat.slots, seat.kv_cache_tokens, slowness, tokens, hit, own, output, mean_batch, now
            )
            options.append(Option(seat, cost, own, hit))
        return options

    def placed(self, ask: Ask, option: Option) -> None:
        """The backend will hold this prompt."""
        self._index.record(option.seat.index, ask.keys)


class LeastLoadedPolicy:
    """The backend with the smallest share of its slots taken."""

    waits_for_best = False

    def options(self, ask: Ask, seats: Sequence[Seat], now: float) -> list[Option]:  # noqa: ARG002
        """Cost is the share of slots taken."""
        return [Option(seat, seat.load.in_flight / seat.slots, 0.0, 0) for seat in seats]

    def placed(self, ask: Ask, option: Option) -> None:
        """Nothing is remembered."""


class RoundRobinPolicy:
    """Each backend in turn."""

    waits_for_best = False

    def __init__(self) -> None:
        self._last = -1

    def options(self, ask: Ask, seats: Sequence[Seat], now: float) -> list[Option]:  # noqa: ARG002
        """Cost is the distance from the backend that had the last turn."""
        turns = max([self._last, *(seat.index for seat in seats)]) + 1
        return [Option(seat, (seat.index - self._last - 1) % turns, 0.0, 0) for seat in seats]

    def placed(self, ask: Ask, option: Option) -> None:  # noqa: ARG002
        """The turn passes on."""
        self._last = option.seat.index
