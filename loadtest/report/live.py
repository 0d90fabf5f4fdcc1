"""What is happening right now: a table that repaints on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from loadtest.drive.fleet import Tick
from loadtest.drive.record import Record
from loadtest.report.figure import milliseconds, number
from loadtest.report.statistics import percentile

_WINDOW_SECONDS = 10.0
_PLAIN_INTERVAL_SECONDS = 5.0


class Recent:
    """Rates and latencies over the last ten seconds, and counts since the start."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque()
        self._elapsed = 0.0
        self.done = 0
        self.failed = 0
        self.in_flight = 0

    @property
    def elapsed(self) -> float:
        return self._elapsed

    def take(self, tick: Tick) -> None:
        """Adds news and forgets what is too old to be recent."""
        self._elapsed, self.in_flight = tick.elapsed_seconds, tick.in_flight
        self.done += len(tick.records)
        self.failed += sum(not record.ok for record in tick.records)
        self._records.extend(tick.records)
        while self._records and self._records[0].end < self._elapsed - _WINDOW_SECONDS:
            self._records.popleft()

    def figures(self) -> dict[str, str]:
        """What is shown, by its label."""
        length = max(min(self._elapsed, _WINDOW_SECONDS), 1e-9)
        good = [record for record in self._records if record.ok]
        ttft = sorted((r.first_token - r.due) * 1e3 for r in good if r.first_token is not None)
        e2e = sorted((record.end - record.due) * 1e3 for record in good)
        shown, values = ("TTFT", ttft) if ttft else ("E2E", e2e)
        return {
            "elapsed": f"{self._elapsed:.0f} s",
            "done": number(self.done),
            "in flight": number(self.in_flight),
            "req/s": number(len(good) / length),
            "tok/s": number(sum(record.completion_tokens or 0 for record in good) / length),
            f"{shown} p50": milliseconds(percentile(values, 50) if values else None),
            f"{shown} p99": milliseconds(percentile(values, 99) if values else None),
            "errors": number(self.failed),
        }


class Progress:
    """Shows `Recent` for the length of a `with` block."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._recent = Recent()
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._next_line_seconds = _PLAIN_INTERVAL_SECONDS

    def __enter__(self) -> Self:
        self._console.print(self._title, style="bold", highlight=False)
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def take(self, tick: Tick) -> None:
        self._recent.take(tick)
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        elif self._recent.elapsed >= self._next_line_seconds:
            self._next_line_seconds += _PLAIN_INTERVAL_SECONDS
            line = "  ".join(f"{label} {value}" for label, value in self._recent.figures().items())
            self._console.print(line, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        figures = self._recent.figures()
        table = Table(box=None, padding=(0, 2), header_style="dim")
        for label in figures:
            table.add_column(label, justify="right")
        failed = self._recent.failed
        table.add_row(*figures.values(), style="red" if failed and failed == self._recent.done else "")
        return table
