"""Every static limit against the adaptive one, started too high and too low."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean

from gateway.core.backends.concurrency_limit import Limiter
from loadtest.console import markdown_table
from loadtest.report.statistics import percentile
from tests.bench.limits.closed_loop import ClosedLoop, Course, Crowd, static

STATIC = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
STARTS = (256, 8)
_FINER = (0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4)  # of the best of these
_WARM_UP_SECONDS = 200.0


@dataclass(frozen=True, slots=True)
class Row:
    """What one limit did, the mean over seeds."""

    name: str
    tokens_per_second: float
    preemptions_per_minute: float
    waiting: float  # inside the engine, the mean
    waiting_p95: float
    tpot_seconds: tuple[float, float]  # the median and the 95th percentile
    limit: tuple[int, int]  # the lowest and the highest

    @property
    def told(self) -> str:
        low, high = self.limit
        return f"{low}" if low == high else f"{low} to {high}"


def best_static(crowd: Crowd, seconds: float, seeds: int) -> Row:
    """The static limit with the highest throughput that keeps to the objective, to about a twentieth."""

    def tried(limits: Iterable[int]) -> list[Row]:
        return [_row(str(limit), crowd, lambda limit=limit: static(limit), seconds, seeds) for limit in limits]

    def best(rows: list[Row]) -> Row:
        objective = crowd.itl_objective_seconds or math.inf
        return max((row for row in rows if row.tpot_seconds[0] <= objective), key=_throughput)

    rows = tried(STATIC)
    middle = best(rows).limit[0]
    return best(rows + tried(sorted({max(1, round(middle * factor)) for factor in _FINER} - set(STATIC))))


_HEAD = (
    *("crowd", "limit", "range of the limit", "tokens/s", "of the best", "preemptions/min"),
    *("waiting inside: mean", "p95", "TPOT ms: median", "p95"),
)


def compared(crowd: Crowd, seconds: float, seeds: int) -> list[Row]:
    """The best static limit, vLLM's default as a limit, and the adaptive ones."""
    best = best_static(crowd, seconds, seeds)
    rows = [best, _row("256", crowd, lambda: static(256), seconds, seeds)]
    return rows + [
        _row(f"adaptive, from {start}", crowd, lambda start=start: _adaptive(crowd, start), seconds, seeds)
        for start in STARTS
    ]


def table(crowds: Iterable[tuple[Crowd, list[Row]]]) -> str:
    """Markdown; throughput also against the best static limit's."""
    cells = [
        [
            crowd.name,
            "best static" if row is rows[0] else row.name,
            row.told,
            f"{row.tokens_per_second:,.0f}",
            f"{row.tokens_per_second / rows[0].tokens_per_second:.1%}",
            f"{row.preemptions_per_minute:.1f}",
            f"{row.waiting:.1f}",
            f"{row.waiting_p95:.0f}",
            *(f"{seconds * 1000:.1f}" for seconds in row.tpot_seconds),
        ]
        for crowd, rows in crowds
        for row in rows
    ]
    return markdown_table(_HEAD, cells, texts=3)


def _row(name: str, crowd: Crowd, limiter: Callable[[], Limiter], seconds: float, seeds: int) -> Row:
    courses: list[Course] = [
        ClosedLoop(crowd, limiter(), seed).run(_WARM_UP_SECONDS, seconds) for seed in range(1, seeds + 1)
    ]
    waiting = sorted(count for course in courses for count in course.waiting)
    limits = [limit for course in courses for limit in course.limit]
    tpots = sorted(tpot for course in courses for tpot in course.tpot_seconds)
    return Row(
        name,
        fmean(course.tokens_per_second for course in courses),
        fmean(course.preemptions for course in courses) * 60 / seconds,
        fmean(waiting),
        percentile(waiting, 95),
        (percentile(tpots, 50), percentile(tpots, 95)),
        (min(limits), max(limits)),
    )


def _adaptive(crowd: Crowd, start: int) -> Limiter:
    limiter = Limiter(itl_objective_seconds=crowd.itl_objective_seconds)
    limiter.limit = start
    return limiter


def _throughput(row: Row) -> float:
    return row.tokens_per_second
