"""Routing policies: what one request would cost on each eligible engine, hints by clients, and explanations."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.request import Ask
from gateway.routing.cache_view import Hits
from gateway.routing.cost import Option, Parts, Seat, cost_parts, mean_stall_of, placement_seconds, prefill_seconds
from gateway.routing.cost_matrix import CostMatrix, Hit, OneByOne, Ranking, SeatTable
from gateway.routing.estimates import Calibrations, Estimates

_MAX_HINTS = 65536
WORTH = 0.2  # of the request's own prefill there: less than another prefill ahead


class Affinity:
    """Remembers where each hint was last sent."""

    def __init__(self) -> None:
        self._last: OrderedDict[int, int] = OrderedDict()

    def favour(self, hint: int, options: Sequence[Option]) -> None:
        """Make the engine that had the hint last a little cheaper, if none is known to hold more of the prompt."""
        at = self.favoured(hint, [option.seat for option in options], [option.hit_tokens for option in options])
        if at is not None:
            options[at].cost -= WORTH * options[at].prefill_seconds

    def favoured(self, hint: int, seats: Sequence[Seat], hit_tokens: Sequence[float]) -> int | None:
        """The place of that engine among these."""
        index = self._last.get(hint)
        at = next((at for at, seat in enumerate(seats) if seat.index == index), None)
        return at if at is not None and hit_tokens[at] == max(hit_tokens) else None

    def placed(self, hint: int, seat: Seat) -> None:
        """A request with this hint was sent there."""
        self._last[hint] = seat.index
        self._last.move_to_end(hint)
        if len(self._last) > _MAX_HINTS:
            self._last.popitem(last=False)


class Policy(Protocol):
    """A policy ranks; placement decides what is open and who waits.

    `waits_for_best`: a request may wait for its best engine though another is open.
    """

    waits_for_best: bool

    def options(self, ask: Ask, seats: Sequence[Seat], now: float) -> list[Option]:
        """One option for each seat, in the same order."""

    def hits(self, ask: Ask, seats: Sequence[Seat]) -> list[int]:
        """Predicted hit tokens, for each seat, as far as the policy cares."""

    def parts(self, ask: Ask, options: Sequence[Option], now: float) -> Sequence[Parts | None]:
        """The costs of `options`, taken apart; None where they are not in seconds."""

    def ranking(self, asks: Sequence[Ask], hits: Sequence[Hit], seats: Sequence[Seat], now: float) -> Ranking:
        """All waiting requests at once; `hits` has a row for each."""

    def placed(self, ask: Ask, option: Option) -> None:
        """The request is sent to the option's engine."""


class PrefixPolicy:
    """Marginal cost, with the part of the prompt that each engine already holds taken off."""

    waits_for_best = True

    def __init__(self, calibrations: Calibrations, hits: Hits, estimates: Estimates, affinity: Affinity) -> None:
        self._calibrations = calibrations
        self._hits = hits
        self._estimates = estimates
        self._affinity = affinity
        self._table = SeatTable()

    def options(self, ask: Ask, seats: Sequence[Seat], now: float) -> list[Option]:
        hits, output = self._hits.of(ask, seats), self.output_tokens(ask)
        tokens, model, options = ask.prompt_tokens, self._calibrations.of(ask.model).model, []
        stall = mean_stall_of(model, sum([seat.load.in_flight for seat in seats]), len(seats))
        prefills: dict[tuple[int, float], tuple[float, int]] = {}  # by hit and slowness: most engines hold the same
        for seat, hit in zip(seats, hits, strict=True):
            ahead, terms = seat.ahead_and_terms(model, now)
            if (prefill := prefills.get((hit, seat.slowness))) is None:
                chunks = -(-(tokens - hit) // model.max_batched_tokens)
                prefill = prefills[hit, seat.slowness] = prefill_seconds(model, seat.slowness, tokens, hit), chunks
            own, chunks = prefill
            cost = placement_seconds(terms, tokens, own, chunks, output, stall, ahead)
            options.append(Option(seat, cost, own, hit))
        if ask.hint:
            self._affinity.favour(ask.hint, options)
        return options

    def parts(self, ask: Ask, options: Sequence[Option], now: float) -> list[Parts]:
        """Seven parts; what a hint takes off is not among them."""
        model, output = self._calibrations.of(ask.model).model, self.output_tokens(ask)
        stall = mean_stall_of(model, sum([option.seat.load.in_flight for option in options]), len(options))
        return [
            cost_parts(
                option.seat.terms(model), ask.prompt_tokens, option.prefill_seconds,
                -(-(ask.prompt_tokens - option.hit_tokens) // model.max_batched_tokens),
                output, stall, option.seat.ahead_seconds(model, now),
            )
            for option in options
        ]  # fmt: skip

    def hits(self, ask: Ask, seats: Sequence[Seat]) -> list[int]:
        """Predicted hit tokens, for each seat."""
        return self._hits.of(ask, seats)

    def ranking(self, asks: Sequence[Ask], hits: Sequence[Hit], seats: Sequence[Seat], now: float) -> CostMatrix:
        """The costs of many requests for one model at once."""
        name, expected = asks[0].model, self._estimates.expected_output_tokens
        model, outputs = self._calibrations.of(name).model, [expected(name, ask.output_tokens) for ask in asks]
        matrix = CostMatrix(model, [ask.prompt_tokens for ask in asks], outputs, hits, seats, now, self._table)
        for row, ask in enumerate(asks):
            if ask.hint and (column := self._affinity.favoured(ask.hint, seats, hits[row].tolist())) is not None:
                matrix.favour(row, column, WORTH)
        return matrix

    def output_tokens(self, ask: Ask) -> float:
        return self._estimates.expected_output_tokens(ask.model, ask.output_tokens)

    def placed(self, ask: Ask, option: Option) -> None:
        """The engine will hold this prompt."""
        if ask.keys:
            self._hits.placed(ask, option.seat)
        if ask.hint:
            self._affinity.placed(ask.hint, option.seat)


class OneAtATime(ABC):
    """Looks at no prompt and at one request at a time; nobody waits for an engine while another is open."""

    waits_for_best = False

    @abstractmethod
    def options(self, ask: Ask, seats: Sequence[Seat], now: float) -> list[Option]:
        """One option for each seat, in the same order."""

    def hits(self, ask: Ask, seats: Sequence[Seat]) -> list[int]:  # noqa: ARG002
        """None: prompts are not looked at."""
        return [0] * len(seats)

    def parts(self, ask: Ask, options: Sequence[Option], now: float) -> list[None]:  # noqa: ARG002
        return [None] * len(options)

    def ranking(self, asks: Sequence[Ask], hits: Sequence[Hit], seats: Sequence[Seat], now: float) -> OneByOne:  # noqa: ARG002
        return OneByOne(asks, seats, lambda ask, seats: self.options(ask, seats, now))


class LeastLoadedPolicy(OneAtATime):
    """The engine with the smallest share of its slots taken."""

    def options(self, ask: Ask, seats: Sequence[Seat], now: float) -> list[Option]:  # noqa: ARG002
        """Cost is the share of slots taken."""
        return [Option(seat, seat.load.in_flight / seat.slots, 0.0, 0) for seat in seats]

    def placed(self, ask: Ask, option: Option) -> None: ...


class RoundRobinPolicy(OneAtATime):
    """Each engine in turn."""

    def __init__(self) -> None:
        self._last = -1

    def options(self, ask: Ask, seats: Sequence[Seat], now: float) -> list[Option]:  # noqa: ARG002
        """Cost is the distance from the engine that had the last turn."""
        turns = max([self._last, *(seat.index for seat in seats)]) + 1
        return [Option(seat, (seat.index - self._last - 1) % turns, 0.0, 0) for seat in seats]

    def placed(self, ask: Ask, option: Option) -> None:  # noqa: ARG002
        self._last = option.seat.index


@dataclass(frozen=True, slots=True)
class EngineVerdict:
    """What one engine would mean for a request. `parts` is None under policies that have no costs in seconds."""

    seat: Seat
    cost: float
    hit_tokens: int
    is_open: bool
    parts: Parts | None

    @property
    def name(self) -> str:
        """The backend, and which of its engines, if it has several."""
        return self.seat.name if self.seat.rank is None else f"{self.seat.name}#{self.seat.rank}"


def as_header(verdicts: Sequence[EngineVerdict]) -> bytes:
    """One line, best first: name;cost=ms;hit=tokens;open=0|1 and the cost's parts in milliseconds, where not zero."""
    told = []
    for verdict in verdicts:
        scale = 1.0 if verdict.parts is None else 1000.0
        fields = [verdict.name, f"cost={verdict.cost * scale:.4g}", f"hit={verdict.hit_tokens}"]
        fields.append(f"open={int(verdict.is_open)}")
        if verdict.parts is not None:
            fields += [f"{name}={seconds * 1000:.4g}" for name, seconds in verdict.parts._asdict().items() if seconds]
        told.append(";".join(fields))
    return ", ".join(told).encode("ascii", "replace")


def as_document(verdicts: Sequence[EngineVerdict]) -> list[dict[str, Any]]:
    """The same for a JSON answer; times in milliseconds."""
    return [
        {
            "backend": verdict.seat.name,
            "rank": verdict.seat.rank,
            "open": verdict.is_open,
            "in_flight": verdict.seat.load.in_flight,
            "hit_tokens": verdict.hit_tokens,
            "cost": round(verdict.cost * 1000, 4) if verdict.parts is not None else verdict.cost,
            "cost_parts_ms": {
                name: round(seconds * 1000, 4)
                for name, seconds in (verdict.parts._asdict() if verdict.parts is not None else {}).items()
            },
        }
        for verdict in verdicts
    ]
