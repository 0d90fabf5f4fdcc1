"""A replica's wishes of each engine: its requests in flight, the waiting ones, and the largest of these."""

from collections.abc import Callable

from gateway.core.backends.fleet import Fleet
from gateway.core.routing.engine import Engine, EngineUse
from gateway.core.routing.estimates import OutputLengths
from gateway.core.scheduling.wait_queue import Queue
from gateway.features.coordination.blocks import NONE, Wish, both
from gateway.features.handover.slots import engines_by_key, tokens_to_admit, use_of, used_of


class Demands:
    """Reads the wishes of this replica. A request that knows its best engine waits for that one, others for all."""

    def __init__(self, fleet: Fleet, queue: Queue, lengths: OutputLengths, *, kv_headroom: Callable[[], float]) -> None:
        self._fleet = fleet
        self._queue = queue
        self._lengths = lengths
        self._kv_headroom = kv_headroom

    def wishes(self, now: float) -> tuple[dict[str, Wish], float]:
        """By engine, and how long the first request has waited."""
        waiting: dict[Engine, tuple[EngineUse, EngineUse]] = {}
        by_model: dict[str, tuple[EngineUse, EngineUse]] = {}
        age_seconds = 0.0
        for ticket in self._queue:
            age_seconds = max(age_seconds, now - ticket.arrived_seconds)
            use = use_of(ticket, self._lengths)
            if ticket.waits_among and ticket.waits_for < len(ticket.waits_among):
                _add(waiting, ticket.waits_among[ticket.waits_for], use)
            else:
                _add(by_model, ticket.demand.model, use)
        found: dict[str, Wish] = {}
        for key, backend, engine in engines_by_key((*self._fleet.backends, *self._fleet.leaving)):
            all_waiting, need = waiting.get(engine, (NONE, NONE))
            if engine in backend.engines and not backend.draining:
                for model in by_model.keys() & backend.context_tokens.keys():
                    all_waiting = both(all_waiting, by_model[model][0], int.__add__)
                    need = both(need, by_model[model][1], max)
            wish = self._wish(engine, all_waiting, need)
            known = found.get(key)
            found[key] = wish if known is None else _joined(known, wish)
        return found, age_seconds

    def _wish(self, engine: Engine, waiting: EngineUse, need: EngineUse) -> Wish:
        used, whole = used_of(engine), engine.whole
        if waiting == NONE:
            return Wish(used, used, NONE, whole)
        headroom = self._kv_headroom()
        wanted, most = [
            EngineUse(
                min(whole.slots, used.slots + each.slots),
                min(whole.kv_tokens, tokens_to_admit(engine, used, each, headroom)),
            )
            for each in (waiting, need)
        ]
        if whole.kv_tokens and most.kv_tokens == whole.kv_tokens:  # it takes the engine alone
            most = whole
        return Wish(used, both(wanted, used, max), most, whole)


def _add(sums: dict[object, tuple[EngineUse, EngineUse]] | dict, key: object, use: EngineUse) -> None:  # type: ignore[type-arg]
    total, most = sums.get(key, (NONE, NONE))
    sums[key] = both(total, use, int.__add__), both(most, use, max)


def _joined(one: Wish, other: Wish) -> Wish:
    """Add up two backends with one URL, one of which leaves."""
    used, wanted = both(one.used, other.used, int.__add__), both(one.wanted, other.wanted, int.__add__)
    return Wish(used, wanted, both(one.need, other.need, max), both(one.whole, other.whole, max))
