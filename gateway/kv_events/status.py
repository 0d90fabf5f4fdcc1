"""How a stream of events does, for operators."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["connecting", "repairing", "live", "lost"]


@dataclass(slots=True)
class Status:
    """One engine's stream. Counts are since it was first followed."""

    backend: str
    rank: int
    state: State = "connecting"
    whole: bool = False  # all that the engine holds is known
    last_event_at: float | None = None  # on the clock that the stream was given
    events: int = 0
    messages: int = 0
    gaps: int = 0
    repairs: int = 0  # times that all missed messages were had again
    restarts: int = 0
    lost_views: int = 0  # times that what was known had to be dropped
    malformed: int = 0
    ignored_events: int = 0  # of other media, or of layers that prove no prefix
    resident_blocks: int = 0
    orphans: int = 0  # blocks whose prefix is not known
    block_tokens: int = 0

    def told(self, seat: int, now: float) -> dict[str, Any]:
        """As it is shown."""
        fields = asdict(self)
        at = fields.pop("last_event_at")
        return {"seat": seat, **fields, "last_event_seconds": None if at is None else now - at}
