"""Division of the engines between a process and its successor during a handover. Pure.

The ending process states its needs: its load in flight on each engine, and its waiting requests. The successor uses the
rest, and lends up to the need as its own requests end. So the sum never exceeds an engine's cap, and each freed slot is
used immediately. A process that is itself replaced while it lends states the sum of its own needs and its
predecessor's.

Needs are numbered, and an answer to former needs is void: some of those slots have been given up meanwhile.
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
_LEAST_HEADROOM = 0.01  # a configured 0 needs the whole cache
_UNGUARDED = 16 / 15  # KV cache needed, relative to the part that guarded requests may use


def engines_by_key(backends: Iterable[Backend]) -> Iterator[tuple[str, Backend, Engine]]:
    """All engines, including engines that have left with requests in flight."""
    for backend in backends:
        for engine in backend.all_engines:
            rank = "" if engine.rank is None else engine.rank
            yield f"{backend.config.url} {rank}", backend, engine


def used_of(engine: Engine) -> EngineUse:
    """The slots and KV tokens in flight on an engine."""
    return EngineUse(engine.load.in_flight, math.ceil(engine.kv.taken_tokens + engine.kv.margin_tokens))


def use_of(ticket: Ticket, lengths: OutputLengths) -> EngineUse:
    """The expected slots and KV tokens of a waiting request."""
    demand = ticket.demand
    output_tokens, margin_tokens = lengths.expected(demand.model, demand.tenant, demand.output_tokens)
    return EngineUse(demand.sequences, demand.prompt_tokens + demand.sequences * (output_tokens + margin_tokens))


def tokens_to_admit(engine: Engine, used: EngineUse, new: EngineUse, kv_headroom: float) -> int:
    """The KV tokens an engine needs to admit `new` in addition to `used`, where `Capacity.admits` is strictest."""
    tokens = used.kv_tokens + new.kv_tokens + (2 * new.slots + 1) * engine.block_tokens
    return int(_UNGUARDED * tokens / max(_LEAST_HEADROOM, kv_headroom)) + 1


def own_needs(
    fleet: Fleet, queue: Queue, lengths: OutputLengths, kv_headroom: Callable[[], float]
) -> dict[str, EngineUse]:
    """The load in flight on each engine plus the waiting requests for its models; at most the whole engine.

    Waiting requests are counted as where `Capacity.admits` is strictest.
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
    """Parses needs or loans of a message."""
    return {key: EngineUse._make(use) for key, use in message.items()}


def _sum(one: EngineUse, other: EngineUse) -> EngineUse:
    return EngineUse(one.slots + other.slots, one.kv_tokens + other.kv_tokens)


def _least(one: EngineUse, other: EngineUse) -> EngineUse:
    return EngineUse(min(one.slots, other.slots), min(one.kv_tokens, other.kv_tokens))


def _most(one: EngineUse, other: EngineUse) -> EngineUse:
    return EngineUse(max(one.slots, other.slots), max(one.kv_tokens, other.kv_tokens))


class SlotSharing:
    """Divides each engine between this process, its predecessor and its successor.

    `number`: of its last `needs`. `lent`: to the predecessor.
    """

    def __init__(self, fleet: Fleet, queue: Queue, lengths: OutputLengths, *, kv_headroom: Callable[[], float]) -> None:
        self._fleet = fleet
        self._own_needs = partial(own_needs, fleet, queue, lengths, kv_headroom)
        self._before: Uses = {}  # needs of the predecessor
        self._borrowed: Uses | None = None  # from the successor; None = there is none
        self.lent: dict[str, EngineUse] = {}
        self.needs: dict[str, EngineUse] = {}
        self.number = 0

    def take_place(self, needed: Uses) -> None:
        """This process takes over. Its predecessor needs these parts, and may have them in flight already."""
        self.lent = dict(needed)
        self.need(needed)

    def need(self, needed: Uses) -> None:
        """The predecessor needs these parts, and no other engines."""
        self._before = needed
        self.step()

    def hand_over(self) -> None:
        """A successor takes over. Until it has requests in flight, it lends everything that is needed."""
        self._borrowed = {}
        self._state_needs()
        self._borrowed = dict(self.needs)
        self._divide()

    def borrow(self, number: int, lent: Uses) -> None:
        """The successor lends these parts, in answer to the needs with this number."""
        if number == self.number and self._borrowed is not None:
            self._borrowed = {key: _least(use, self.needs.get(key, _NONE)) for key, use in lent.items()}
            self.step()

    def go_on_alone(self) -> None:
        """The successor has failed: use whole engines again."""
        self._borrowed = None
        self.step()

    def step(self) -> None:
        """Follow ended and waiting requests: give up, lend, and use the rest."""
        if self._borrowed is not None:
            self._state_needs()
        self._divide()

    def _divide(self) -> None:
        """Lend free capacity up to the needs, and use the rest."""
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
            parts[engine.index] = EngineUse(  # the use of another backend with this URL is not free here
                max(0, limit.slots - kept.slots - used.slots + own.slots),
                max(0, limit.kv_tokens - kept.kv_tokens - used.kv_tokens + own.kv_tokens),
            )
        for key, needed in self._before.items():
            lent.setdefault(key, needed)  # of an engine that this process does not have
        self.lent = {key: use for key, use in lent.items() if use != _NONE}
        self._fleet.share(parts)

    def _lend(self, key: str, needed: EngineUse, whole: EngineUse, used: EngineUse) -> EngineUse:
        """The loan for this need; it grows only by free capacity."""
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
