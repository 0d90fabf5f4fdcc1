# ruff: noqa: ARG002 - each policy reads a part of its arguments
"""Routing policies: how each ranks the eligible engines, and explanations. `PrefixPolicy` is the default."""

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.core.request import Demand
from gateway.core.routing.cache_view import EngineBlocks, HitAccuracy, PrefixIndex
from gateway.core.routing.engine import (
    FEW_ENGINES,
    Engine,
    Parts,
    Shortlist,
    adapter_seconds,
    cost_parts,
    placement_costs,
)
from gateway.core.routing.estimates import CostModel, Estimates


class Options:
    """The engines' prices for one request: its cost, the seconds of its own prefill there, and its predicted hit."""

    __slots__ = ("costs", "engines", "hit_tokens", "prefill_seconds")

    def __init__(
        self,
        engines: list[Engine],
        costs: list[float],
        prefills: list[float] | None = None,
        hits: list[int] | None = None,
    ) -> None:
        self.engines = engines
        self.costs = costs
        self.prefill_seconds = prefills or [0.0] * len(engines)
        self.hit_tokens = hits or [0] * len(engines)

    def cheapest(self, positions: Sequence[int]) -> int:
        """The position with the lowest cost. Between equal costs, the engine with less in flight wins, then the one
        chosen less often."""
        costs, best, least = self.costs, -1, 0.0
        for at in positions:
            cost = costs[at]
            if best < 0 or cost < least or (cost == least and self._is_preferred(at, best)):
                best, least = at, cost
        return best

    def add(self, seconds: list[float]) -> None:
        """Add to the cost of each engine."""
        costs = self.costs
        for at in range(len(costs)):
            costs[at] = costs[at] + seconds[at]  # not `+=`, which is slower when compiled

    def lead(self, best: int, positions: Sequence[int]) -> float:
        """The difference in cost between the best of these positions and the next."""
        costs, least = self.costs, math.inf
        for at in positions:
            if at != best and costs[at] < least:
                least = costs[at]
        return least - costs[best]

    def _is_preferred(self, at: int, other: int) -> bool:
        one, two = self.engines[at], self.engines[other]
        return (one.load.in_flight, one.placed, at) < (two.load.in_flight, two.placed, other)


class Policy(ABC):
    """Ranks engines; the scheduler decides which are open and which requests wait.

    `waits_for_best`: a request may wait for its best engine though another is open. `model` is the cost model of the
    request's model. The defaults are for policies that ignore prompts and look at one request at a time.
    """

    waits_for_best = False

    @abstractmethod
    def options(self, demand: Demand, engines: list[Engine], model: CostModel, now: float) -> Options:
        """The costs of the request on each engine."""

    def likely_options(self, demand: Demand, shortlist: Shortlist, model: CostModel, now: float) -> Options:
        """The same for those engines of many that can be the best one."""
        return self.options(demand, shortlist.engines, model, now)

    def parts(self, demand: Demand, options: Options, model: CostModel, now: float) -> Sequence[Parts | None]:
        """The costs of `options`, taken apart; None if they are not in seconds."""
        return [None] * len(options.costs)

    def placed(self, demand: Demand, engine: Engine) -> None:  # noqa: B027
        """The request is sent to the engine."""


class LeastLoadedPolicy(Policy):
    """The engine with the smallest share of its slots taken."""

    def options(self, demand: Demand, engines: list[Engine], model: CostModel, now: float) -> Options:
        """Cost is the share of slots taken."""
        return Options(engines, [engine.load.in_flight / max(1, engine.slots) for engine in engines])


class RoundRobinPolicy(Policy):
    """Each engine in turn."""

    def __init__(self) -> None:
        self._last = -1

    def options(self, demand: Demand, engines: list[Engine], model: CostModel, now: float) -> Options:
        """Cost is the distance from the engine that had the last turn."""
        turns = max([self._last, *(engine.index for engine in engines)]) + 1
        return Options(engines, [(engine.index - self._last - 1) % turns for engine in engines])

    def placed(self, demand: Demand, engine: Engine) -> None:
        self._last = engine.index


@dataclass(frozen=True, slots=True)
class EngineVerdict:
    """The price of one engine for a request. `parts` is None under policies without costs in seconds."""

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


_MAX_HINTS: Final = 65536
_WORTH: Final = 0.2  # discount, as a share of the request's own prefill: less than another prefill ahead


class Affinity:
    """Remembers the engine to which each hint was last sent."""

    def __init__(self) -> None:
        self._last: OrderedDict[int, int] = OrderedDict()

    def favoured(self, hint: int, engines: list[Engine], hit_tokens: Sequence[float]) -> int | None:
        """The position of that engine among these, if no other is predicted to hold more of the prompt."""
        index = self._last.get(hint)
        at = next((at for at, engine in enumerate(engines) if engine.index == index), None)
        return at if at is not None and hit_tokens[at] == max(hit_tokens) else None

    def placed(self, hint: int, engine: Engine) -> None:
        self._last[hint] = engine.index
        self._last.move_to_end(hint)
        if len(self._last) > _MAX_HINTS:
            self._last.popitem(last=False)


class HitPredictor:
    """Predicts from exactly known blocks where there are any, otherwise from the own record times its accuracy."""

    def __init__(self, index: PrefixIndex, hit_accuracy: HitAccuracy, exact: EngineBlocks | None = None) -> None:
        self.index = index
        self._hit_accuracy = hit_accuracy
        self._exact = exact

    def use(self, exact: EngineBlocks) -> None:
        """Predict from these blocks where they are known."""
        self._exact = exact

    def depths(self, demand: Demand) -> list[int]:
        """How much of the prompt each engine holds, by index: more is better, but not to scale."""
        depths = self.index.depths(demand.keys)
        if demand.token_keys and self._exact is not None:
            for engine, depth in self._exact.depths(demand.token_keys).items():
                if engine < len(depths):
                    depths[engine] = depth
        return depths

    def predict(self, demand: Demand, engines: list[Engine]) -> list[int]:
        """Hit tokens, for each engine. An engine finds whole blocks only, and always computes the last token."""
        if not demand.reads_cache:
            return [0] * len(engines)
        depths = self.index.depths(demand.keys)
        exact = self._exact.depths(demand.token_keys) if demand.token_keys and self._exact is not None else {}
        if not exact and not any(depths):
            return [0] * len(engines)
        turn, turn_end, most = demand.turn, demand.turn_end, demand.prompt_tokens - 1
        answered = self.index.answered(demand.keys[turn - 1]) if turn_end else 0
        lowered, hits = self._hit_accuracy.lowered, [0] * len(engines)
        last_depth = shared = 0
        for place in range(len(engines)):
            engine = engines[place]
            index = engine.index
            if index in exact:
                held = exact[index] * engine.block_tokens
            elif depth := depths[index]:
                has_answer = turn <= depth < turn_end and answered >> index & 1
                if has_answer:
                    depth = turn_end
                if depth != last_depth:  # most engines hold the same
                    last_depth, shared = depth, demand.tokens_shared(depth)
                held = shared - 1 if has_answer else shared  # an answer's last token is never computed
                if index in lowered:
                    held = int(held * lowered[index])
            else:
                continue
            if engine.caches_prefixes:
                block = engine.block_tokens
                hits[place] = (held if held < most else most) // block * block
        return hits

    def placed(self, demand: Demand, engine: Engine) -> None:
        if demand.turn_end:
            self.index.supersede_answer(engine.index, demand.keys[demand.turn - 1])
        self.index.record(engine.index, demand.keys, demand.edges)
        if demand.token_keys and self._exact is not None:
            self._exact.placed(engine.index, demand.token_keys)


class PrefixPolicy(Policy):
    """Marginal cost, where the part of the prompt that an engine has cached costs nothing."""

    waits_for_best = True

    def __init__(self, hit_predictor: HitPredictor, estimates: Estimates, affinity: Affinity) -> None:
        self._hit_predictor = hit_predictor
        self._estimates = estimates
        self._affinity = affinity

    def options(self, demand: Demand, engines: list[Engine], model: CostModel, now: float) -> Options:
        hits = self._hit_predictor.predict(demand, engines)
        output = self._estimates.expected_output_tokens(demand.model, demand.output_tokens)
        costs, prefills = placement_costs(model, engines, hits, demand.prompt_tokens, output, now)
        if demand.hint and (at := self._affinity.favoured(demand.hint, engines, hits)) is not None:
            costs[at] -= _WORTH * prefills[at]
        options = Options(engines, costs, prefills, hits)
        if engines[0].adapters is not None:  # an adapter's engines all have some
            options.add(adapter_seconds(engines, demand.model))
        return options

    def likely_options(self, demand: Demand, shortlist: Shortlist, model: CostModel, now: float) -> Options:
        adapters = shortlist.engines[0].adapters
        is_adapter = adapters is not None and demand.model in adapters.names
        if len(shortlist.engines) <= FEW_ENGINES or demand.hint or is_adapter:
            return self.options(demand, shortlist.engines, model, now)
        shortlist.refresh(model, now)
        engines = shortlist.of(self._hit_predictor.depths(demand))
        return self.options(demand, engines, model, now)

    def parts(self, demand: Demand, options: Options, model: CostModel, now: float) -> list[Parts]:
        """The cost's parts, without the discount for a hint."""
        output = self._estimates.expected_output_tokens(demand.model, demand.output_tokens)
        parts, prompt = [], demand.prompt_tokens
        for engine, own, hit in zip(options.engines, options.prefill_seconds, options.hit_tokens, strict=True):
            chunks, ahead = -((hit - prompt) // model.max_batched_tokens), engine.ahead_seconds(model, now)
            part = cost_parts(engine.terms(model), prompt, own, chunks, output, ahead)
            if engine.adapters is not None:
                part = part._replace(adapter=engine.adapters.seconds(demand.model))
            parts.append(part)
        return parts

    def placed(self, demand: Demand, engine: Engine) -> None:
        if demand.keys:
            self._hit_predictor.placed(demand, engine)
        if engine.adapters is not None:
            engine.adapters.use(demand.model)
        if demand.hint:
            self._affinity.placed(demand.hint, engine)
