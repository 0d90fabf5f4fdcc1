"""Whether an engine has room for a request now: slots, prefill ahead, and KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.request import Ask
from gateway.routing.engine import Engine
from gateway.routing.estimates import Calibrations
from gateway.routing.kv_reservations import Reservation
from gateway.scheduling.output_length import OutputLengths

_GUARDED_SHARE = 16  # one of so many slots, and as much of the KV cache
_GUARDED_WINDOW = 0.75  # of the prefill that may be ahead: what comes in beyond is as long as a usual prompt
_FEW_SLOTS = 4  # of fewer, one would be too much to keep


@dataclass(frozen=True, slots=True)
class Capacity:
    """Judges engines. `kv_headroom`: share of the KV cache that is filled."""

    calibrations: Calibrations
    lengths: OutputLengths
    kv_headroom: float = 0.95

    def is_open(self, engine: Engine, model: str, now: float, *, guarded: bool = False) -> bool:
        """It takes requests for this model: a slot is free, the KV cache is not full, and little prefill is ahead.

        `guarded`: the last slots, the last of the KV cache and of the prefill window do not count.
        """
        return self.are_open((engine,), model, now, guarded=guarded)[0]

    def are_open(self, engines: Sequence[Engine], model: str, now: float, *, guarded: bool = False) -> list[bool]:
        """`is_open` of each. Every look at the line asks this of all engines: what is usual costs little here."""
        window, headroom, is_open = self._window_seconds(model, guarded), self._headroom(guarded), []
        for engine in engines:
            load, slots, tokens = engine.load, engine.slots, engine.kv_cache_tokens
            running = load.in_flight
            if running >= (slots - guarded_slots(slots) if guarded else slots):
                is_open.append(running == 0)
                continue
            if running and tokens:
                ledger, limit = engine.kv, headroom * tokens
                free = limit - ledger.taken_tokens
                if free < engine.block_tokens and ledger.outlook(now).peak_tokens + engine.block_tokens > limit:
                    is_open.append(False)
                    continue
            is_open.append(not load.pending or load.prefill_ahead_seconds(now) <= window)
        return is_open

    def admits(self, engine: Engine, ask: Ask, now: float, *, guarded: bool = False) -> bool:
        """It takes this request now. `guarded`: as in `is_open`."""
        wanted = self.slots_of(ask, engine)
        if engine.load.in_flight + wanted > (engine.slots - guarded_slots(engine.slots) if guarded else engine.slots):
            # a request larger than a slow start allows may run alone
            return engine.load.in_flight == 0 and self.is_large_enough(engine, ask)
        if engine.load.prefill_ahead_seconds(now) > self._window_seconds(ask.model, guarded):
            return False
        return self._fits(engine, ask, now, guarded)

    def _fits(self, engine: Engine, ask: Ask, now: float, guarded: bool) -> bool:
        """Its prompt and answer fit into the KV cache beside what runs there. An engine that is idle takes anything.

        Where the sum of all that is reserved leaves no room, what will be in use at any one moment may do so.
        """
        if not engine.kv_cache_tokens or engine.load.in_flight == 0:
            return True
        ledger, answer = engine.kv, self.output_tokens(ask)
        limit = self._headroom(guarded) * engine.kv_cache_tokens
        free = limit - ledger.taken_tokens
        if ledger.most_needed(ask, answer) <= free:
            return True  # the usual case, and cheap to tell
        if ledger.needed(ask, answer) <= free:
            return True
        return ledger.peak_with(ask, answer, now) <= limit

    def _window_seconds(self, model: str, guarded: bool) -> float:
        window = self.calibrations.of(model).window_seconds
        return _GUARDED_WINDOW * window if guarded else window

    def _headroom(self, guarded: bool) -> float:
        return self.kv_headroom * (1 - 1 / _GUARDED_SHARE) if guarded else self.kv_headroom

    def reserve(self, engine: Engine, ask: Ask) -> Reservation:
        """Take what the request needs of the engine's KV cache."""
        return engine.kv.reserve(ask, self.output_tokens(ask))

    def output_tokens(self, ask: Ask) -> int:
        """The answer's length, as far as it is to be reckoned with, and what prompts usually have beyond estimates."""
        lengths = self.lengths
        return lengths.expected(ask.model, ask.tenant, ask.output_tokens) + lengths.prompt_excess_tokens(ask.model)

    def is_large_enough(self, engine: Engine, ask: Ask) -> bool:
        """It could run this request, if nothing else ran there."""
        return self.slots_of(ask, engine) <= engine.cap

    def slots_of(self, ask: Ask, engine: Engine) -> int:
        """Slots that the request takes there; one that can be divided takes all there are, at most."""
        wanted = ask.sequences
        return engine.cap if ask.divisible and wanted > engine.cap else wanted

    def emptiest(self, ask: Ask, engines: list[Engine]) -> Engine:
        """The engine that will have room for the request first."""
        return min(
            engines,
            key=lambda engine: (
                not self.is_large_enough(engine, ask),
                engine.load.in_flight / engine.slots,
                engine.index,
            ),
        )


def guarded_slots(slots: int) -> int:
    """Slots that are kept from those who have much, for those who have less and may come soon."""
    return max(1, slots // _GUARDED_SHARE) if slots >= _FEW_SLOTS else 0
