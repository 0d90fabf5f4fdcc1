"""Four ways to run a batch beside the same interactive requests: figures of each, and of the requests alone."""

import math
from dataclasses import dataclass, field
from random import Random

from gateway.scheduling.offline import OBJECTIVE_SHARE
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
        number = len(requests)
        requests.append(Request(number, now, *lengths(random.randrange(99)), False))


def capacity_per_second(seconds: float) -> float:
    """Requests that the fleet answers in a second at most."""
    fleet = Fleet([], Fixed(4 * 256), None)
    return sum(request.finished_seconds > seconds / 2 for request in fleet.run(seconds)) / (seconds / 2)


def row(name: str, requests: list[Request], rule: Rule | None, objective: float | None, seconds: float) -> Row:
    """One way, with the same interactive requests."""
    again = [Request(r.number, r.arrived_seconds, r.prompt_tokens, r.output_tokens, False) for r in requests]
    fleet = Fleet(again, rule, objective)
    done = fleet.run(seconds)
    others = [request for request in done if not request.is_line]
    tokens = sum(request.earlier_tokens + request.output_tokens for request in done if request.is_line)
    ttft = percentile(sorted(request.ttft_seconds for request in others), 99) if others else 0.0
    tpot = percentile(sorted(request.tpot_seconds for request in others), 99) if others else 0.0
    return Row(name, ttft, tpot, tokens / seconds, fleet.revoked)


def compared(seconds: float, seed: int = 1) -> tuple[list[Row], float]:
    """All ways, and the tokens per second that are idle: those of a batch alone at the objective, less the others'.

    The objective is what the interactive requests have alone, at the 99th percentile.
    """
    requests = arrivals(capacity_per_second(60.0), seconds, seed)
    alone = row("none", requests, None, None, seconds)
    own, objective = Offline(), alone.tpot_p99
    whole = row("batch only", [], own, objective / OBJECTIVE_SHARE, seconds).line_tokens_per_second
    idle = whole - sum(request.output_tokens for request in requests) / seconds
    rows = [alone, row("offline class", requests, own, objective, seconds)]
    rows += [row(f"fixed, {lines}", requests, Fixed(lines), None, seconds) for lines in (64, 128, 256)]
    rows.append(row("AIMD on TTFT", requests, Aimd(2 * alone.ttft_p99), None, seconds))
    return rows, idle


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
