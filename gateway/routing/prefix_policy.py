"""The default routing policy: marginal cost, less for what an engine has cached, and a discount for clients' hints."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from gateway.request import Demand
from gateway.routing.cache_view import HitPredictor
from gateway.routing.engine import (
    FEW_ENGINES,
    CostModel,
    Engine,
    Parts,
    Shortlist,
    adapter_seconds,
    cost_parts,
    placement_costs,
)
from gateway.routing.estimates import Estimates
from gateway.routing.policy import Options, Policy

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
        if engines[0].adapters is not None:  # those of an adapter all have some
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
