"""A trace as values: when requests came, how long they were, and which prefix blocks their prompts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


class TraceError(Exception):
    """A trace that cannot be read; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Row:
    """One recorded request. `keys` are those of its prompt's full blocks, chained: equal keys mean equal prefixes.

    In a trace of sessions `at_seconds` is the session's start, and `think_seconds` the pause after the answer before.
    """

    at_seconds: float
    prompt_tokens: int
    output_tokens: int
    keys: tuple[int, ...] = ()
    session: int | None = None
    think_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows in order of time; sessions' rows in order of their turns."""

    name: str
    rows: Sequence[Row]
    block_tokens: int
    tick_seconds: float = 0.0  # what its times are multiples of, if that is coarse
    sessions: bool = field(default=False)

    @property
    def span_seconds(self) -> float:
        """From time zero to the last arrival, and the mean gap after it."""
        last = max(row.at_seconds for row in self.rows) + self.tick_seconds
        arrivals = len({row.session for row in self.rows}) if self.sessions else len(self.rows)
        return max(last * (1 + 1 / arrivals), 1e-3)

    @property
    def rate_per_second(self) -> float:
        """Requests per second, as recorded; of sessions, what a steady stream of them makes."""
        return len(self.rows) / self.span_seconds
