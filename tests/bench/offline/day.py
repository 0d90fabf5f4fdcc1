"""A day in the life of a fleet: interactive load by the hour, a batch that fills what is idle, and what clients feel.

An hour lasts a minute of virtual time.
"""

import math
from dataclasses import dataclass
from random import Random

from loadtest.report.chart import X_END, X_START, Y_END, Y_START, Axis, Chart, ChartSeries, linear, nice_top
from loadtest.report.sheet import sheet
from loadtest.report.statistics import percentile
from tests.bench.offline.compare import Offline, capacity_per_second
from tests.bench.offline.fleet import Fleet, Request, Rule, lengths

HOURS, HOUR_SECONDS = 24, 60.0
_LEAST_SHARE, _MOST_SHARE = 0.08, 0.75  # of the capacity: at 4 in the morning, and 12 hours later
_LOWEST_HOUR = 4.0
_STYLES = ("s0 strong", "s1 strong", "s2")


@dataclass(frozen=True, slots=True)
class Hour:
    """What was done in one hour: tokens per second, and the TTFT of clients in milliseconds."""

    tokens_per_second: float
    line_tokens_per_second: float
    ttft_p50_ms: float
    ttft_p95_ms: float


def arrivals(capacity: float, seed: int = 1) -> list[Request]:
    """Interactive requests of a day at random times, many by day and few at night. `capacity`: requests per second."""
    random, requests, now = Random(seed), list[Request](), 0.0
    while True:
        angle = 2 * math.pi * (now / HOUR_SECONDS - _LOWEST_HOUR) / HOURS
        share = _LEAST_SHARE + (_MOST_SHARE - _LEAST_SHARE) * (1 - math.cos(angle)) / 2
        now += random.expovariate(capacity * share)
        if now >= HOURS * HOUR_SECONDS:
            return requests
        prompt_tokens, output_tokens = lengths(random.randrange(99))
        requests.append(Request(len(requests), now, prompt_tokens, output_tokens, False))


def tpot_p99(requests: list[Request]) -> float:
    return percentile(sorted(request.tpot_seconds for request in requests if not request.is_line), 99)


def day_of(requests: list[Request], rule: Rule | None, objective: float | None) -> list[Request]:
    """Everything that was answered on this day."""
    again = [Request(r.number, r.arrived_seconds, r.prompt_tokens, r.output_tokens, False) for r in requests]
    return Fleet(again, rule, objective).run(HOURS * HOUR_SECONDS)


def by_hour(done: list[Request]) -> list[Hour]:
    hours: list[list[Request]] = [[] for _ in range(HOURS)]
    for request in done:
        hours[int(request.finished_seconds / HOUR_SECONDS)].append(request)
    return [_hour(hour) for hour in hours]


def _hour(done: list[Request]) -> Hour:
    asked, lines = (
        sum(each.output_tokens for each in done if each.is_line is is_line) / HOUR_SECONDS for is_line in (False, True)
    )
    ttfts = sorted(1000 * each.ttft_seconds for each in done if not each.is_line)
    return Hour(asked, lines, percentile(ttfts, 50), percentile(ttfts, 95))


def picture(alone: list[Hour], beside: list[Hour]) -> str:
    """The day with and without a batch, as an SVG file."""
    x = Axis(_place_of, [(float(hour), f"{hour}:00") for hour in range(0, HOURS + 1, 4)], low=0.0, high=float(HOURS))
    most = nice_top(max(hour.tokens_per_second + hour.line_tokens_per_second for hour in beside))
    slowest = nice_top(max(hour.ttft_p95_ms for hour in (*alone, *beside)))
    load = [
        _series("clients", _STYLES[0], [hour.tokens_per_second for hour in beside]),
        _series("batch", _STYLES[1], [hour.line_tokens_per_second for hour in beside]),
    ]
    felt = [
        _series("p95 without a batch", _STYLES[2], [hour.ttft_p95_ms for hour in alone]),
        _series("p95 with the batch", _STYLES[0], [hour.ttft_p95_ms for hour in beside]),
    ]
    charts = [
        Chart(
            "output tokens per second", note="of four engines", x=x, y=linear(0, most, Y_START, Y_END, 4), series=load
        ),
        Chart(
            "time to first token of clients, p95", note="ms", x=x, y=linear(0, slowest, Y_START, Y_END, 4), series=felt
        ),
    ]
    legend = [(_STYLES[0], "clients"), (_STYLES[1], "batch"), (_STYLES[2], "clients, without a batch")]
    return sheet(charts, legend)


def _place_of(hour: float) -> float:
    return X_START + hour / HOURS * (X_END - X_START)


def _series(name: str, style: str, values: list[float]) -> ChartSeries:
    return ChartSeries(name, style, [(at + 0.5, value) for at, value in enumerate(values)])


def drawn() -> str:
    """Run the day twice, and draw it."""
    requests = arrivals(capacity_per_second(60.0))
    alone = day_of(requests, None, None)
    beside = day_of(requests, Offline(), tpot_p99(alone))
    return picture(by_hour(alone), by_hour(beside))
