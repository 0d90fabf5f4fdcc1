"""Which of a request's options is taken at once, if any."""

from collections.abc import Sequence

from gateway.admission.room import Room
from gateway.request import Ask
from gateway.routing.seat import Option


def choose(
    options: Sequence[Option], ask: Ask, room: Room, now: float, waits_for_best: bool, guarded: bool
) -> Option | None:
    """The cheapest option, if that admits the request; where nobody waits for the best, the cheapest that does."""
    best: Option | None = None
    for option in options:
        if not waits_for_best and not room.admits(option.seat, ask, now, guarded=guarded):
            continue
        if best is None or option.cost < best.cost or (option.cost == best.cost and _is_quieter(option, best)):
            best = option
    if best is None or not waits_for_best or room.admits(best.seat, ask, now, guarded=guarded):
        return best
    return None


def _is_quieter(option: Option, other: Option) -> bool:
    """Of two engines at the same cost, the one with less in flight, then the one that was chosen less often."""
    one, two = option.seat, other.seat
    return (one.load.in_flight, one.placed) < (two.load.in_flight, two.placed)
