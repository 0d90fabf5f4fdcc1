"""The picture of a day: load by the hour, and a point for each hour."""

from tests.bench.offline.day import HOUR_SECONDS, HOURS, Hour, arrivals, by_hour, picture
from tests.bench.offline.fleet import Request


def test_most_requests_come_by_day() -> None:
    hours = [0] * HOURS
    for request in arrivals(1.0):
        hours[int(request.arrived_seconds / HOUR_SECONDS)] += 1
    assert sum(hours[1:7]) < sum(hours[13:19]) / 3


def test_an_hour_has_the_tokens_and_waits_of_what_ended_in_it() -> None:
    done = [Request(0, 1.0, 10, 120, False), Request(1, 1.0, 10, 60, True)]
    for request in done:
        request.first_token_seconds, request.finished_seconds = 1.1, 2.0
    others = [Request(hour, 60.0 * hour, 10, 60, False) for hour in range(1, HOURS)]
    for request in others:
        request.first_token_seconds = request.finished_seconds = request.arrived_seconds + 1.0
    first = by_hour([*done, *others])[0]
    assert (first.tokens_per_second, first.line_tokens_per_second) == (2.0, 1.0)
    assert round(first.ttft_p95_ms) == 100


def test_the_picture_has_two_charts_with_two_lines_each() -> None:
    drawn = picture([Hour(1.0, 0.0, 5.0, 9.0)] * HOURS, [Hour(1.0, 8.0, 5.0, 9.0)] * HOURS)
    assert drawn.count('<path class="line') == 3 + 2 * 2  # the legend, and the charts
