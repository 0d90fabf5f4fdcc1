"""How processes share the engines while one takes over from another. Pure.

A process that ends states its needs: what it has in flight on each engine, and what waits there. The one that took over
uses what is left, and lends up to the need once its own requests have made room. So the sum never exceeds an engine's
cap, whatever is sent again, and each slot that is given up is used at once. A process that was handed over itself while
it lends states both needs, its own and those of the process before it.

Needs are numbered, and an answer to former needs is void: meanwhile some of these slots have been given up.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from gateway.core.backends.backend import Backend
from gateway.core.backends.fleet import Fleet
from gateway.core.routing.engine import Engine, EngineUse
from gateway.core.routing.estimates import OutputLengths
from gateway.core.scheduling.wait_queue import Queue, Ticket

Uses = Mapping[str, EngineUse]  # by engine: URL of the backend, and rank
_NONE = EngineUse(0, 0)
_ANY = 1 << 62
_LEAST_HEADROOM = 0.01  # a configured 0 needs all that there is
_UNGUARDED = 16 / 15  # the KV cache that is needed, over what guarded requests may use of it


def engines_by_key(backends: Iterable[Backend]) -> Iterator[tuple[str, Backend, Engine]]:
    """All engines, those included that have left with requests in flight."""
    for backend in backends:
        for engine in backend.all_engines:
            rank = "" if engine.rank is None else engine.rank
            yield f"{backend.config.url} {rank}", backend, engine


def used_of(engine: Engine) -> EngineUse:
    """What is in flight on an engine."""
    return EngineUse(engine.load.in_flight, math.ceil(engine.kv.taken_tokens + engine.kv.margin_tokens))


def use_of(ticket: Ticket, lengths: OutputLengths) -> EngineUse:
    """What a request that waits is expected to use."""
    demand = ticket.demand
    output_tokens, margin_tokens = lengths.expected(demand.model, demand.tenant, demand.output_tokens)
    return EngineUse(demand.sequences, demand.prompt_tokens + demand.sequences * (output_tokens + margin_tokens))


def tokens_to_admit(engine: Engine, used: EngineUse, new: EngineUse, kv_headroom: float) -> int:
    """The KV tokens with which an engine admits `new` beside `used`, where `Capacity.admits` is strictest."""
    tokens = used.kv_tokens + new.kv_tokens + (2 * new.slots + 1) * engine.block_tokens
    return int(_UNGUARDED * tokens / max(_LEAST_HEADROOM, kv_headroom)) + 1


def own_needs(
    fleet: Fleet, queue: Queue, lengths: OutputLengths, kv_headroom: Callable[[], float]
) -> dict[str, EngineUse]:
    """What is in flight on each engine, with what waits for its models, which may go there; at most the whole engine.

    What waits is counted as `Capacity.admits` does where it is strictest.
    """
    waiting: dict[str, EngineUse] = {}
    for ticket in queue:
        model = ticket.demand.model
        waiting[model] = _sum(waiting.get(model, _NONE), use_of(ticket, lengths))
    found: dict[str, EngineUse] = {}
    arriving: dict[Backend, EngineUse] = {}
    for backend in fleet.backends if waiting else ():
        use = _NONE
        for card in backend.facts.models:
            use = _sum(use, waiting.get(card.id, _NONE))
        if use != _NONE:
            arriving[backend] = use
    for key, backend, engine in engines_by_key((*fleet.backends, *fleet.leaving)):
        used = needed = used_of(engine)
        if backend in arriving and engine in backend.engines:
            new, whole = arriving[backend], engine.whole.kv_tokens
            tokens = tokens_to_admit(engine, used, new, kv_headroom())
            slots = max(used.slots, min(engine.cap, used.slots + new.slots))
            needed = EngineUse(slots, max(used.kv_tokens, min(whole, tokens) if whole else tokens))
        if needed != _NONE:  # a backend that leaves and another may have the same URL
            found[key] = _sum(found.get(key, _NONE), needed)
    return found


def uses_of(message: Mapping[str, Iterable[int]]) -> dict[str, EngineUse]:
    """Needs, or what is lent, as they come in a message."""
    return {key: EngineUse._make(use) for key, use in message.items()}


def _sum(one: EngineUse, other: EngineUse) -> EngineUse:
    return EngineUse(one.slots + other.slots, one.kv_tokens + other.kv_tokens)


def _least(one: EngineUse, other: EngineUse) -> EngineUse:
    return EngineUse(min(one.slots, other.slots), min(one.kv_tokens, other.kv_tokens))


def _most(one: EngineUse, other: EngineUse) -> EngineUse:
    return EngineUse(max(one.slots, other.slots), max(one.kv_tokens, other.kv_tokens))


class SlotSharing:
    """What this process uses of each engine, between the process before it and the one after it, as far as there are.

    `number`: of its last `needs`. `lent`: to the process before it.
    """

    def __init__(self, fleet: Fleet, queue: Queue, lengths: OutputLengths, *, kv_headroom: Callable[[], float]) -> None:
        self._fleet = fleet
        self._own_needs = partial(own_needs, fleet, queue, lengths, kv_headroom)
        self._before: Uses = {}  # needs of the process before
        self._borrowed: Uses | None = None  # from the process after; None = there is none
        self.lent: dict[str, EngineUse] = {}
        self.needs: dict[str, EngineUse] = {}
        self.number = 0

    def take_place(self, needed: Uses) -> None:
        """This process takes over. The process before it needs this, and may have it in flight already."""
        self.lent = dict(needed)
        self.need(needed)

    def need(self, needed: Uses) -> None:
        """The process before needs this, and nothing on other engines."""
        self._before = needed
        self.step()

    def hand_over(self) -> None:
        """Another process takes over. As long as it has nothing in flight, all that is needed is lent."""
        self._borrowed = {}
        self._state_needs()
        self._borrowed = dict(self.needs)
        self._divide()

    def borrow(self, number: int, lent: Uses) -> None:
        """The process after lends this, as an answer to the needs of this number."""
        if number == self.number and self._borrowed is not None:
            self._borrowed = {key: _least(use, self.needs.get(key, _NONE)) for key, use in lent.items()}
            self.step()

    def go_on_alone(self) -> None:
        """The process after has failed: use whole engines again."""
        self._borrowed = None
        self.step()

    def step(self) -> None:
        """Follow what has ended and what waits: give up, lend, and use what is left."""
        if self._borrowed is not None:
            self._state_needs()
        self._divide()

    def _divide(self) -> None:
        """Lend what is needed and free, and use the rest."""
        lent: dict[str, EngineUse] = {}
        parts: dict[int, EngineUse | None] = {}
        engines = list(engines_by_key((*self._fleet.backends, *self._fleet.leaving)))
        if self._borrowed is None:
            engines = [each for each in engines if self._before.get(each[0], _NONE) != _NONE]
        all_used: dict[str, EngineUse] = {}
        for key, _, engine in engines:
            all_used[key] = _sum(all_used.get(key, _NONE), used_of(engine))
        for key, _, engine in engines:
            needed, used = self._before.get(key, _NONE), all_used[key]
            if self._borrowed is not None:
                whole = limit = self._borrowed.get(key, _NONE)
            else:
                whole = EngineUse(engine.cap, engine.whole.kv_tokens or needed.kv_tokens + used.kv_tokens)
                limit = EngineUse(engine.whole.slots, whole.kv_tokens)
            lent[key] = self._lend(key, needed, whole, used)
            kept, own = _most(lent[key], needed), used_of(engine)
            parts[engine.index] = EngineUse(  # what another backend with this URL uses is not free here
                max(0, limit.slots - kept.slots - used.slots + own.slots),
                max(0, limit.kv_tokens - kept.kv_tokens - used.kv_tokens + own.kv_tokens),
            )
        for key, needed in self._before.items():
            lent.setdefault(key, needed)  # of an engine that is not this process's
        self.lent = {key: use for key, use in lent.items() if use != _NONE}
        self._fleet.share(parts)

    def _lend(self, key: str, needed: EngineUse, whole: EngineUse, used: EngineUse) -> EngineUse:
        """As much as is needed; more than before only of what is not in use."""
        before = self.lent.get(key, _NONE)
        return EngineUse(
            min(needed.slots, max(before.slots, whole.slots - used.slots)),
            min(needed.kv_tokens, max(before.kv_tokens, whole.kv_tokens - used.kv_tokens)),
        )

    def _state_needs(self) -> None:
        needs = self._own_needs()
        for key, use in self._before.items():
            needs[key] = _sum(needs.get(key, _NONE), use)
        for key, _, engine in engines_by_key((*self._fleet.backends, *self._fleet.leaving)):
            if key in needs:
                used = _sum(used_of(engine), self.lent.get(key, _NONE))
                slots = min(needs[key].slots, max(engine.cap, used.slots))
                needs[key] = EngineUse(
                    slots, min(needs[key].kv_tokens, max(engine.whole.kv_tokens or _ANY, used.kv_tokens))
                )
        if needs != self.needs:
            self.needs, self.number = needs, self.number + 1
            self._borrowed = {
                key: _least(use, needs[key]) for key, use in (self._borrowed or {}).items() if key in needs
            }
