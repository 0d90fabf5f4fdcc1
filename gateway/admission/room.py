"""Whether an engine has room for a request now: slots, prefill ahead, and KV cache."""

from dataclasses import dataclass

from gateway.request import Ask
from gateway.routing.calibration import Calibration
from gateway.routing.estimate import Estimates
from gateway.routing.seat import Seat


@dataclass(frozen=True, slots=True)
class Room:
    """Judges seats. `kv_headroom`: share of the KV cache that is filled."""

    calibration: Calibration
    estimates: Estimates
    kv_headroom: float = 0.97

    def is_open(self, seat: Seat, now: float) -> bool:
        """It takes requests: a slot is free, and little prefill is ahead."""
        load = seat.load
        if load.in_flight >= seat.slots:
            return load.in_flight == 0
        return not load.pending or load.prefill_ahead_seconds(now) <= self.calibration.window_seconds

    def admits(self, seat: Seat, ask: Ask, now: float) -> bool:
        """It takes this request now."""
        wanted = self.slots_of(ask, seat)
        if seat.load.in_flight + wanted > seat.slots:
            # a request larger than a slow start allows may run alone
            return seat.load.in_flight == 0 and self.is_large_enough(seat, ask)
        if seat.load.prefill_ahead_seconds(now) > self.calibration.window_seconds:
            return False
        return self._fits(seat, ask)

    def _fits(self, seat: Seat, ask: Ask) -> bool:
        """Its prompt and answer fit into the KV cache beside what runs there. An engine that is idle takes anything."""
        if seat.kv_cache_tokens is None or seat.load.in_flight == 0:
            return True
        needed = ask.prompt_tokens + ask.sequences * self.output_tokens(ask)
        return seat.load.reserved_tokens + needed <= self.kv_headroom * seat.kv_cache_tokens

    def output_tokens(self, ask: Ask) -> int:
        """The answer's expected length."""
        return int(self.estimates.expected_output_tokens(ask.output_tokens))

    def is_large_enough(self, seat: Seat, ask: Ask) -> bool:
        """It could run this request, if nothing else ran there."""
        return self.slots_of(ask, seat) <= seat.cap

    def slots_of(self, ask: Ask, seat: Seat) -> int:
        """Slots that the request takes there; one that can be divided takes all there are, at most."""
        wanted = ask.sequences
        return seat.cap if ask.divisible and wanted > seat.cap else wanted

    def emptiest(self, ask: Ask, seats: list[Seat]) -> Seat:
        """The engine that will have room for the request first."""
        return min(
            seats,
            key=lambda seat: (not self.is_large_enough(seat, ask), seat.load.in_flight / seat.slots, seat.index),
        )
