"""Placement decisions while the page has watchers: each engine's cost for a request, when it arrived and when it was
bound to one of them.

The decisive costs are kept as the scheduler computed them. The costs at arrival, with their parts, are computed for the
page alone, and so only for a limited number of engines a second: in a large fleet, some requests have none.
"""

from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from math import inf, isfinite
from typing import Any, Final

from gateway.core.errors import GatewayError
from gateway.core.front.reply import ClientResponse, RequestDispatcher
from gateway.core.observe.record import Record
from gateway.core.request import Demand, InferenceRequest, UpstreamResult
from gateway.core.routing.engine import Engine
from gateway.core.routing.policy import EngineVerdict, Options

MOST_DECISIONS: Final = 1000
ENGINES_PER_SECOND: Final = 512
_MOST_BOUND_SHOWN: Final = 256
Explain = Callable[[Demand], list[EngineVerdict]]


class Decision:
    """About one request. `arrival`: each engine then, if that was computed. `in_seconds`: so are the policy's costs."""

    __slots__ = ("_bound", "arrival", "demand", "in_seconds", "request_id", "since_seconds")

    def __init__(self, request_id: str, demand: Demand, since_seconds: float) -> None:
        self.request_id = request_id
        self.demand = demand
        self.since_seconds = since_seconds
        self.in_seconds = True
        self.arrival: list[dict[str, Any]] | None = None
        self._bound: tuple[float, Options, Engine] | None = None

    def bind(self, options: Options, engine: Engine, now: float) -> None:
        """The scheduler chose this engine; a retry replaces the first choice."""
        self._bound = now - self.since_seconds, options, engine

    def bound_document(self) -> dict[str, Any] | None:
        if self._bound is None:
            return None
        seconds, options, chosen = self._bound
        scale = 1000.0 if self.in_seconds else 1.0
        rows = zip(options.engines, options.costs, options.hit_tokens, options.prefill_seconds, strict=True)
        engines = [
            {
                "backend": engine.name,
                "rank": engine.rank,
                "cost": round(cost * scale, 4) if isfinite(cost) else None,  # reserved for a starving request
                "hit_tokens": hit_tokens,
                "prefill_ms": round(prefill_seconds * 1000, 4),
                "chosen": engine is chosen,
            }
            for engine, cost, hit_tokens, prefill_seconds in rows
        ]
        engines.sort(key=lambda each: inf if each["cost"] is None else each["cost"])
        return {"after_ms": round(seconds * 1000, 3), "engines": engines[:_MOST_BOUND_SHOWN]}


class Decisions:
    """Keeps the last decisions, by request id. While the dashboard is open, requests pass through `dispatch` to
    `inner`, and the scheduler reports its choices to `bound`."""

    def __init__(self, inner: RequestDispatcher, explain: Explain, clock: Callable[[], float]) -> None:
        self._inner = inner
        self._explain = explain
        self._clock = clock
        self._by_id: OrderedDict[str, Decision] = OrderedDict()
        self._by_demand: dict[int, Decision] = {}  # by identity: a decision keeps its demand alive
        self._second = -inf
        self._left = 0  # engines, in this second

    def __len__(self) -> int:
        return len(self._by_id)

    def of(self, request_id: str) -> dict[str, Any] | None:
        """The document of a decision, if there is one."""
        decision = self._by_id.get(request_id)
        if decision is None:
            return None
        demand = decision.demand
        return {
            "request_id": request_id,
            "model": demand.model,
            "prompt_tokens": demand.prompt_tokens,
            "prefix_blocks": len(demand.keys),
            "sequences": demand.sequences,
            "in_seconds": decision.in_seconds,
            "engines": decision.arrival,
            "bound": decision.bound_document(),
        }

    def forget(self) -> None:
        self._by_id.clear()
        self._by_demand.clear()

    def dispatch(
        self, request: InferenceRequest, reply: ClientResponse, record: Record
    ) -> Coroutine[Any, Any, UpstreamResult]:
        """Note the engines' current costs, if there is time for that, and send the request on."""
        now, demand = self._clock(), request.demand
        if demand.sequences:
            decision = Decision(record.request_id, demand, now)
            if now - self._second >= 1.0:
                self._second, self._left = now, ENGINES_PER_SECOND
            if self._left > 0:
                with suppress(GatewayError):
                    verdicts = self._explain(demand)
                    decision.in_seconds = not verdicts or verdicts[0].parts is not None
                    decision.arrival = as_document(verdicts)
                    self._left -= max(1, len(verdicts))
            self._keep(decision)
        return self._inner.dispatch(request, reply, record)

    def bound(self, demand: Demand, options: Options, engine: Engine) -> None:
        """The scheduler has bound a request."""
        decision = self._by_demand.get(id(demand))
        if decision is not None:
            decision.bind(options, engine, self._clock())

    def _keep(self, decision: Decision) -> None:
        self._drop(self._by_id.pop(decision.request_id, None))  # clients choose ids, and may repeat them
        self._by_id[decision.request_id] = self._by_demand[id(decision.demand)] = decision
        while len(self._by_id) > MOST_DECISIONS:
            self._drop(self._by_id.popitem(last=False)[1])

    def _drop(self, decision: Decision | None) -> None:
        if decision is not None:
            self._by_demand.pop(id(decision.demand), None)


def as_document(verdicts: Sequence[EngineVerdict]) -> list[dict[str, Any]]:
    """The engines' prices for a request, for a JSON answer; times in milliseconds."""
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
