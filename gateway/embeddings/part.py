"""What waits to be sent: a request's inputs, or a piece of a long list."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Part:
    """Inputs `start` to `start + items` of one request. `owner` is told what came of it.

    `alone`: it shares its batch with nobody.
    """

    owner: Any
    start: int
    items: int
    tokens: int
    size_bytes: int
    tenant: str = ""
    weight: float = 1.0
    alone: bool = False
    joined_seconds: float = field(default=0.0)
