"""Routing policies: what one request would cost on each eligible engine, hints by clients, and explanations."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.request import Demand
from gateway.routing.cache_view import HitPredictor
from gateway.routing.cost_matrix import CostMatrix, EngineColumns, Hit, OneByOne, Ranking
from gateway.routing.engine import Engine, Option, Parts, cost_parts, mean_stall_of, placement_seconds, prefill_seconds
from gateway.routing.estimates import Calibrations, Estimates

_MAX_HINTS = 65536
WORTH = 0.2  # discount, as a share of the request's own prefill: less than another prefill ahead


class Affinity:
    """Remembers the engine to which each hint was last sent."""

    def __init__(self) -> None:
        self._last: OrderedDict[int, int] = OrderedDict()

    def favour(self, hint: int, options: Sequence[Option]) -> None:
        """Discount the engine that had the hint last, if no other is predicted to hold more of the prompt."""
        at = self.favoured(hint, [option.engine for option in options], [option.hit_tokens for option in options])
        if at is not None:
            options[at].discount(WORTH)

    def favoured(self, hint: int, engines: Sequence[Engine], hit_tokens: Sequence[float]) -> int | None:
        """The position of that engine among these."""
        index = self._last.get(hint)
        at = next((at for at, engine in enumerate(engines) if engine.index == index), None)
        return at if at is not None and hit_tokens[at] == max(hit_tokens) else None

    def placed(self, hint: int, engine: Engine) -> None:
        """A request with this hint was sent there."""
        self._last[hint] = engine.index
        self._last.move_to_end(hint)
        if len(self._last) > _MAX_HINTS:
            self._last.popitem(last=False)


class Policy(ABC):
    """Ranks engines; the scheduler decides which are open and which requests wait.

    `waits_for_best`: a request may wait for its best engine though another is open. The defaults are for policies that
    ignore prompts and look at one request at a time.
    """

    waits_for_best = False

    @abstractmethod
    def options(self, demand: Demand, engines: Sequence[Engine], now: float) -> list[Option]:
        """One option for each engine, in the same order."""

    def hits(self, demand: Demand, engines: Sequence[Engine]) -> list[int]:  # noqa: ARG002
        """Predicted hit tokens, for each engine; 0 if the policy ignores prompts."""
        return [0] * len(engines)

    def parts(self, demand: Demand, options: Sequence[Option], now: float) -> Sequence[Parts | None]:  # noqa: ARG002
        """The costs of `options`, taken apart; None if they are not in seconds."""
        return [None] * len(options)

    def ranking(self, demands: Sequence[Demand], hits: Sequence[Hit], engines: Sequence[Engine], now: float) -> Ranking:  # noqa: ARG002
        """All waiting requests at once; `hits` has a row for each."""
        return OneByOne(demands, engines, lambda demand, engines: self.options(demand, engines, now))

    def placed(self, demand: Demand, option: Option) -> None:  # noqa: B027
        """The request is sent to the option's engine."""


class PrefixPolicy(Policy):
    """Marginal cost, where the part of the prompt that an engine has cached costs nothing."""

    waits_for_best = True

    def __init__(
        self, calibrations: Calibrations, hit_predictor: HitPredictor, estimates: Estimates, affinity: Affinity
    ) -> None:
        self._calibrations = calibrations
        self._hit_predictor = hit_predictor
        self._estimates = estimates
        self._affinity = affinity
        self._table = EngineColumns()

    def options(self, demand: Demand, engines: Sequence[Engine], now: float) -> list[Option]:
        hits, output = self._hit_predictor.predict(demand, engines), self.output_tokens(demand)
        tokens, model, options = demand.prompt_tokens, self._calibrations.of(demand.model).model, []
        stall = mean_stall_of(model, sum([engine.load.in_flight for engine in engines]), len(engines))
        prefills: dict[tuple[int, float], tuple[float, int]] = {}  # by hit and slowness: most engines hold the same
        for engine, hit in zip(engines, hits, strict=True):
            ahead, terms = engine.ahead_and_terms(model, now)
            if (prefill := prefills.get((hit, engine.slowness))) is None:
                chunks = -(-(tokens - hit) // model.max_batched_tokens)
                prefill = prefills[hit, engine.slowness] = prefill_seconds(model, engine.slowness, tokens, hit), chunks
            own, chunks = prefill
            cost = placement_seconds(terms, tokens, own, chunks, output, stall, ahead)
            options.append(Option(engine, cost, own, hit))
        if demand.hint:
            self._affinity.favour(demand.hint, options)
        return options

    def parts(self, demand: Demand, options: Sequence[Option], now: float) -> list[Parts]:
        """The cost's parts, without the discount for a hint."""
        model, output = self._calibrations.of(demand.model).model, self.output_tokens(demand)
        stall = mean_stall_of(model, sum([option.engine.load.in_flight for option in options]), len(options))
        return [
            cost_parts(
                option.engine.terms(model), demand.prompt_tokens, option.prefill_seconds,
                -(-(demand.prompt_tokens - option.hit_tokens) // model.max_batched_tokens),
                output, stall, option.engine.ahead_seconds(model, now),
            )
            for option in options
        ]  # fmt: skip

    def hits(self, demand: Demand, engines: Sequence[Engine]) -> list[int]:
        return self._hit_predictor.predict(demand, engines)

    def ranking(
        self, demands: Sequence[Demand], hits: Sequence[Hit], engines: Sequence[Engine], now: float
    ) -> CostMatrix:
        name, expected = demands[0].model, self._estimates.expected_output_tokens
        model, outputs = self._calibrations.of(name).model, [expected(name, demand.output_tokens) for demand in demands]
        matrix = CostMatrix(
            model, [demand.prompt_tokens for demand in demands], outputs, hits, engines, now, self._table
        )
        for row, demand in enumerate(demands):
            if (
                demand.hint
                and (column := self._affinity.favoured(demand.hint, engines, hits[row].tolist())) is not None
            ):
                matrix.favour(row, column, WORTH)
        return matrix

    def output_tokens(self, demand: Demand) -> float:
        return self._estimates.expected_output_tokens(demand.model, demand.output_tokens)

    def placed(self, demand: Demand, option: Option) -> None:
        if demand.keys:
            self._hit_predictor.placed(demand, option.engine)
        if demand.hint:
            self._affinity.placed(demand.hint, option.engine)


class LeastLoadedPolicy(Policy):
    """The engine with the smallest share of its slots taken."""

    def options(self, demand: Demand, engines: Sequence[Engine], now: float) -> list[Option]:  # noqa: ARG002
        """Cost is the share of slots taken."""
        return [Option(engine, engine.load.in_flight / engine.slots, 0.0, 0) for engine in engines]


class RoundRobinPolicy(Policy):
    """Each engine in turn."""

    def __init__(self) -> None:
        self._last = -1

    def options(self, demand: Demand, engines: Sequence[Engine], now: float) -> list[Option]:  # noqa: ARG002
        """Cost is the distance from the engine that had the last turn."""
        turns = max([self._last, *(engine.index for engine in engines)]) + 1
        return [Option(engine, (engine.index - self._last - 1) % turns, 0.0, 0) for engine in engines]

    def placed(self, demand: Demand, option: Option) -> None:  # noqa: ARG002
        self._last = option.engine.index


@dataclass(frozen=True, slots=True)
class EngineVerdict:
    """What one engine would mean for a request. `parts` is None under policies that have no costs in seconds."""

    engine: Engine
    cost: float
    hit_tokens: int
    is_open: bool
    parts: Parts | None

    @property
    def name(self) -> str:
        """The backend, and which of its engines, if it has several."""
        return self.engine.name if self.engine.rank is None else f"{self.engine.name}#{self.engine.rank}"


def as_header(verdicts: Sequence[EngineVerdict]) -> bytes:
    """One line, best first: name;cost=ms;hit=tokens;open=0|1 and the cost's parts in milliseconds, where not zero."""
    entries = []
    for verdict in verdicts:
        scale = 1.0 if verdict.parts is None else 1000.0
        fields = [verdict.name, f"cost={verdict.cost * scale:.4g}", f"hit={verdict.hit_tokens}"]
        fields.append(f"open={int(verdict.is_open)}")
        if verdict.parts is not None:
            fields += [f"{name}={seconds * 1000:.4g}" for name, seconds in verdict.parts._asdict().items() if seconds]
        entries.append(";".join(fields))
    return ", ".join(entries).encode("ascii", "replace")


def as_document(verdicts: Sequence[EngineVerdict]) -> list[dict[str, Any]]:
    """The same for a JSON answer; times in milliseconds."""
    return [
        {
            "backend": verdict.engine.name,
            "rank": verdict.engine.rank,
            "open": verdict.is_open,
            "in_flight": verdict.engine.load.in_flight,
            "hit_tokens": verdict.hit_tokens,
            "cost": round(verdict.cost * 1000, 4) if verdict.parts is not None else verdict.cost,
            "cost_parts_ms": {
                name: round(seconds * 1000, 4)
                for name, seconds in (verdict.parts._asdict() if verdict.parts is not None else {}).items()
            },
        }
        for verdict in verdicts
    ]
