"""Why a request goes where it goes: each engine's cost, taken apart, for people to read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.routing.cost import Parts
from gateway.routing.seat import Seat


@dataclass(frozen=True, slots=True)
class EngineVerdict:
    """What one engine would mean for a request. `parts` is None under policies that have no costs in seconds."""

    seat: Seat
    cost: float
    hit_tokens: int
    is_open: bool
    parts: Parts | None

    @property
    def name(self) -> str:
        """The backend, and which of its engines, if it has several."""
        return self.seat.name if self.seat.rank is None else f"{self.seat.name}#{self.seat.rank}"


def as_header(verdicts: Sequence[EngineVerdict]) -> bytes:
    """One line, best first: name;cost=ms;hit=tokens;open=0|1 and the cost's parts in milliseconds, where not zero."""
    told = []
    for verdict in verdicts:
        scale = 1.0 if verdict.parts is None else 1000.0
        fields = [verdict.name, f"cost={verdict.cost * scale:.4g}", f"hit={verdict.hit_tokens}"]
        fields.append(f"open={int(verdict.is_open)}")
        if verdict.parts is not None:
            fields += [f"{name}={seconds * 1000:.4g}" for name, seconds in verdict.parts._asdict().items() if seconds]
        told.append(";".join(fields))
    return ", ".join(told).encode("ascii", "replace")


def as_document(verdicts: Sequence[EngineVerdict]) -> list[dict[str, Any]]:
    """The same for a JSON answer; times in milliseconds."""
    return [
        {
            "backend": verdict.seat.name,
            "rank": verdict.seat.rank,
            "open": verdict.is_open,
            "in_flight": verdict.seat.load.in_flight,
            "hit_tokens": verdict.hit_tokens,
            "cost": round(verdict.cost * 1000, 4) if verdict.parts is not None else verdict.cost,
            "cost_parts_ms": {
                name: round(seconds * 1000, 4)
                for name, seconds in (verdict.parts._asdict() if verdict.parts is not None else {}).items()
            },
        }
        for verdict in verdicts
    ]
