"""Four ways to run a batch beside the same interactive requests: figures of each, and of the requests alone.

Each way runs with the arrivals of several seeds, and all their requests count together: a percentile of one run is
chance by some percent, because a request more or less changes where all later ones go.
"""

import math
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from copy import copy
from dataclasses import dataclass, field
from random import Random

from gateway.features.batches.idle_capacity import OBJECTIVE_SHARE
from loadtest.console import markdown_table
from loadtest.report.statistics import percentile
from tests.bench.offline.fleet import Fleet, Request, Rule, lengths

BURST_SECONDS, QUIET_SECONDS = 20.0, 40.0
BURST_SHARE, QUIET_SHARE = 0.8, 0.1  # of the capacity


@dataclass
class Offline:
    """The gateway's offline class: lines wait for idle capacity."""

    lines: int = 1024
    is_offline: bool = True

    def answered(self, request: Request) -> None:
        """It has no effect."""


@dataclass
class Fixed:
    """So many lines at once, as batch requests."""

    lines: int
    is_offline: bool = False

    def answered(self, request: Request) -> None:
        """It has no effect."""


@dataclass
class Aimd:
    """Four lines more for as many answers as lines are in flight; half as many after a TTFT above the bound."""

    most_ttft_seconds: float
    is_offline: bool = False
    _limit: float = 8.0
    _halved_seconds: float = field(default=-math.inf)

    @property
    def lines(self) -> int:
        return int(self._limit)

    def answered(self, request: Request) -> None:
        if request.is_line:
            self._limit = min(1024.0, self._limit + 1 / self._limit * 4)
        elif request.ttft_seconds > self.most_ttft_seconds and request.first_token_seconds > self._halved_seconds:
            self._limit, self._halved_seconds = max(4.0, self._limit / 2), request.finished_seconds


@dataclass(frozen=True, slots=True)
class Row:
    """What one way did."""

    name: str
    ttft_p99: float
    tpot_p99: float
    line_tokens_per_second: float
    revoked: int = 0


def arrivals(capacity: float, seconds: float, seed: int) -> list[Request]:
    """Interactive requests at random times: bursts and quiet times in turn. `capacity`: requests per second."""
    random, requests, now = Random(seed), list[Request](), 0.0
    while True:
        in_burst = now % (BURST_SECONDS + QUIET_SECONDS) >= QUIET_SECONDS
        now += random.expovariate(capacity * (BURST_SHARE if in_burst else QUIET_SHARE))
        if now >= seconds:
            return requests
        prompt_tokens, output_tokens = lengths(random.randrange(99))
        requests.append(Request(len(requests), now, prompt_tokens, output_tokens, False))


def capacity_per_second(seconds: float) -> float:
    """Requests that the fleet answers in a second at most."""
    fleet = Fleet([], Fixed(4 * 256), None)
    return sum(request.finished_seconds > seconds / 2 for request in fleet.run(seconds)) / (seconds / 2)


@dataclass(frozen=True, slots=True)
class Run:
    """What one way did with the arrivals of one seed; `ttfts` and `tpots` in seconds."""

    ttfts: list[float]
    tpots: list[float]
    line_tokens: int
    revoked: int


def ran(requests: list[Request], rule: Rule | None, objective: float | None, seconds: float) -> Run:
    """One way, with the same interactive requests."""
    again = [Request(r.number, r.arrived_seconds, r.prompt_tokens, r.output_tokens, False) for r in requests]
    fleet = Fleet(again, rule, objective)
    done = fleet.run(seconds)
    others = [request for request in done if not request.is_line]
    tokens = sum(request.earlier_tokens + request.output_tokens for request in done if request.is_line)
    ttfts, tpots = [each.ttft_seconds for each in others], [each.tpot_seconds for each in others]
    return Run(ttfts, tpots, tokens, fleet.revoked)


def row(name: str, runs: Sequence[Run], seconds: float) -> Row:
    """All runs of one way together."""
    ttfts = [each for run in runs for each in run.ttfts]
    tpots = [each for run in runs for each in run.tpots]
    tokens = sum(run.line_tokens for run in runs) / (seconds * len(runs))
    return Row(name, _p99(ttfts), _p99(tpots), tokens, sum(run.revoked for run in runs))


def _p99(values: list[float]) -> float:
    return percentile(sorted(values), 99) if values else 0.0


def compared(seconds: float, seeds: Sequence[int] = (1,)) -> tuple[list[Row], float]:
    """All ways, and the tokens per second that are idle: those of a batch alone at the objective, less the others'.

    The objective is what the interactive requests have alone, at the 99th percentile.
    """
    capacity = capacity_per_second(60.0)
    with ProcessPoolExecutor() as processes:
        requests = [arrivals(capacity, seconds, seed) for seed in seeds]

        def start(rule: Rule | None, objective: float | None) -> list[Future[Run]]:
            return [processes.submit(ran, each, copy(rule), objective, seconds) for each in requests]

        alone = row("none", [each.result() for each in start(None, None)], seconds)
        objective = alone.tpot_p99
        whole = processes.submit(ran, [], Offline(), objective / OBJECTIVE_SHARE, seconds)
        ways = {"offline class": start(Offline(), objective)}
        ways |= {f"fixed, {lines}": start(Fixed(lines), None) for lines in (64, 128, 256)}
        ways["AIMD on TTFT"] = start(Aimd(2 * alone.ttft_p99), None)
        rows = [alone, *[row(name, [each.result() for each in way], seconds) for name, way in ways.items()]]
        asked_tokens = sum(request.output_tokens for each in requests for request in each) / len(seeds)
        return rows, (whole.result().line_tokens - asked_tokens) / seconds


def table(rows: list[Row], idle: float) -> str:
    """As Markdown. `idle`: tokens per second that could be generated besides."""
    alone = rows[0]
    head = ("batch", "TTFT p99, ms", "of alone", "TPOT p99, ms", "of alone", "batch tokens/s", "of idle", "revoked")
    return markdown_table(
        head,
        [
            (
                each.name,
                f"{1000 * each.ttft_p99:.0f}",
                f"{each.ttft_p99 / alone.ttft_p99:.2f}",
                f"{1000 * each.tpot_p99:.1f}",
                f"{each.tpot_p99 / alone.tpot_p99:.2f}",
                f"{each.line_tokens_per_second:.0f}",
                f"{each.line_tokens_per_second / idle:.0%}",
                f"{each.revoked}",
            )
            for each in rows
        ],
    )
