"""Charts of a series: the batch-size curve, targets against the first of them, goodput and latency by load. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from loadtest.report.chart import (
    STYLES,
    X_END,
    X_START,
    Y_END,
    Y_START,
    Axis,
    Chart,
    ChartSeries,
    doubling,
    linear,
    logarithmic,
    nice_top,
)
from loadtest.report.diagnosis import GPU_TARGET_PERCENT
from loadtest.report.formatting import milliseconds
from loadtest.report.schema import Interval
from loadtest.report.series import Point as Measured
from loadtest.report.series import Series as Runs
from loadtest.report.series import Spread
from loadtest.report.series_tables import title_of

_TOTALS = {"output_tokens_per_second": "Output tokens", "prompt_tokens_per_second": "Prompt tokens"}
_PER_USER = "output_tokens_per_second_per_user"
# Ratios that are drawn, and how they are called.
_RATIOS = {
    "output_tokens_per_second": "Output tokens/s",
    "requests_per_second": "Requests/s",
    "ttft_p50": "TTFT p50",
    "e2e_p50": "E2E p50",
}
_GOODPUT = "goodput_per_second"
_FARTHEST = 2.0  # times the median that an axis follows an interval
_Line = tuple[str, list[tuple[float, Spread]]]


def series_charts(series: Runs) -> list[Chart]:
    """All that there is data for; none where there is one load only."""
    if len({point.load for point in series.points}) < 2:
        return []
    users = series.plan["concurrency"] is not None
    charts = [*batch_size_curve(series)] if users else []
    charts += ratio_charts(series)
    offered = "users" if users else "requests/s offered"
    goodput = any("goodput_per_second" in point.figures for point in series.points)
    rate = "goodput_per_second" if goodput else "requests_per_second"
    charts += _by_load(series, rate, f"{'Goodput' if goodput else 'Requests/s'} by {offered}")
    shown = [name for name in ("ttft_p95", "tpot_p95", "e2e_p95") if any(name in p.figures for p in series.points)]
    for name in shown:
        charts += _by_load(series, name, f"{name[:-4].upper()} p95 by {offered}", latency=True)
    charts += _by_load(series, "gpu_percent", f"GPU utilisation by {offered}")
    charts += _by_load(series, "tokens_per_joule", f"Tokens per joule by {offered}")
    return [replace(chart, x_title=offered) for chart in charts] + trade_off(series)


def trade_off(series: Runs) -> list[Chart]:
    """Throughput against latency, and against each user's throughput; a point a load. The note has the best load."""
    rate = next(
        (name for name in _TOTALS if any(_median(point, name) for point in series.points)), "requests_per_second"
    )
    latency = next((name for name in ("e2e_p95", "e2e_p50") if any(name in one.figures for one in series.points)), None)
    charts = []
    if latency is not None:
        limit = _limit_of(series, latency)
        drawn = _against(series.points, rate, latency, unit=" ms", limits=[value for value, _ in limit])
        title, name = "Throughput against latency", f"E2E {latency[-3:]}"
        charts.append(replace(drawn, title=title, x_title=name, uprights=limit))
    if any(_PER_USER in one.figures for one in series.points) and rate == "output_tokens_per_second":
        drawn = _against(series.points, rate, _PER_USER)
        charts.append(
            replace(drawn, title="Throughput against the speed for each user", x_title="output tokens/s and user")
        )
    return charts


def _against(points: Sequence[Measured], rate: str, figure: str, unit: str = "", limits: Sequence[float] = ()) -> Chart:
    """The rate over another figure. Points are joined by their loads; a limit far away is not shown."""
    known = [one for one in points if rate in one.figures and figure in one.figures]
    by_target = {one.target: [each for each in known if each.target == one.target] for one in known}
    places = [(one.figures[figure].median, one.figures[rate].median) for one in known]
    lines, routes = [], []
    for number, (target, its) in enumerate(by_target.items()):
        style = STYLES[number % len(STYLES)]
        route = [(one.figures[figure].median, one.figures[rate].median) for one in sorted(its, key=_offered)]
        known_ends = {(one.figures[figure].median, one.figures[rate].median): whisker(one.figures[rate]) for one in its}
        lines.append(
            ChartSeries(
                target or "measured",
                f"{style} apart",
                sorted(known_ends),
                spread=[known_ends[place] for place in sorted(known_ends)],
            )
        )
        routes.append((style, route))
    right, best = max(x for x, _ in places), _best(known)
    near = [limit for limit in limits if limit < 2 * right]
    return Chart(
        title="",
        note=_note_of(best, known),
        x=linear(0, nice_top(max([right, *near])), start_px=X_START, end_px=X_END, wanted=6, unit=unit),
        y=linear(0, nice_top(_top(one.figures[rate] for one in known)), start_px=Y_START, end_px=Y_END, wanted=4),
        series=lines,
        routes=routes,
        y_title=f"{_TOTALS.get(rate, 'requests').lower()}/s",
        labels=[(x, y, one.load) for one, (x, y) in zip(known, places, strict=True)],
        ringed=[(best.figures[figure].median, best.figures[rate].median)] if best else [],
    )


def _offered(point: Measured) -> float:
    return point.offered


def _best(points: Sequence[Measured]) -> Measured | None:
    """The load with the most goodput of passed ones, or else of all valid ones; None without an SLO."""
    measured = [one for one in points if one.valid and _median(one, _GOODPUT)]
    good = [one for one in measured if one.passed and one.passed == one.valid] or measured
    return max(good, key=lambda one: _median(one, _GOODPUT), default=None)


def _note_of(best: Measured | None, points: Sequence[Measured]) -> str:
    if best is None:
        has_slo = any(_GOODPUT in one.figures for one in points)
        return f"a point for each load; {'no valid run keeps the SLO' if has_slo else '--slo marks the best one'}"
    rate = f"{_median(best, _GOODPUT):.3g} requests/s within the SLO"
    tied = [_named(one) for one in points if one is not best and one.valid and _overlap(one, best)]
    tie = f"; it ties with {', '.join(tied)}" if tied else ""
    return f"a point for each load; the ring is the best one: {_named(best)}, {rate}{tie}"


def _overlap(one: Measured, other: Measured) -> bool:
    """Whether the goodput of both may be the same, by their known intervals."""
    first, second = (each.figures[_GOODPUT].interval if _GOODPUT in each.figures else None for each in (one, other))
    return first is not None and second is not None and first[0] <= second[1] and second[0] <= first[1]


def _named(point: Measured) -> str:
    return f"{point.target}, {point.load}" if point.target else point.load


def batch_size_curve(series: Runs) -> list[Chart]:
    """Tokens a second against users: in all, and for each user."""
    total = next((name for name in _TOTALS if any(_median(point, name) for point in series.points)), None)
    if total is None:
        return []
    lines = _lines(series.points, total)
    per_user = [(name, [(users, _divided(spread, users)) for users, spread in line]) for name, line in lines]
    rate = f"{_TOTALS[total]} per second"
    return [
        _chart(f"{rate} by users", _note(series.points), lines, on=_loads(series), y_title="tokens/s"),
        _chart(f"{rate} and user", _note(series.points), per_user, on=_loads(series), y_title="tokens/s"),
    ]


def ratio_charts(series: Runs) -> list[Chart]:
    """Targets to the first one, with the spread over pairs; 1 is the same."""
    known = [name for name in _RATIOS if any(name in one.ratios for one in series.differences)]
    offered = {(point.target, point.load): point.offered for point in series.points}
    charts = []
    for figure in known:
        lines: list[_Line] = []
        for target in dict.fromkeys(one.target for one in series.differences):
            its = [one for one in series.differences if one.target == target and figure in one.ratios]
            lines.append((target, [(offered[one.target, one.load], one.ratios[figure]) for one in its]))
        note = "pair by pair: median and 95 % confidence"
        against = series.differences[0].against
        # The first style is the first target's: it has no ratio.
        title = f"{_RATIOS[figure]}, as a ratio to {against}"
        charts.append(_chart(title, note, lines, STYLES[1:], on=_loads(series), around=1.0, y_title="ratio"))
    return charts


def _by_load(series: Runs, figure: str, title: str, *, latency: bool = False) -> list[Chart]:
    lines = _lines(series.points, figure)
    if not lines:
        return []
    bounds, unit = _limit_of(series, figure), title_of(figure)
    return [_chart(title, _note(series.points), lines, on=_loads(series), latency=latency, bounds=bounds, y_title=unit)]


def _limit_of(series: Runs, figure: str) -> list[tuple[float, str]]:
    """The limit that the SLO has for a latency, or for GPUs, which have a target without an SLO as well."""
    if figure == "gpu_percent":
        limit = series.limits.get(figure)
        return (
            [(GPU_TARGET_PERCENT, f"target: {GPU_TARGET_PERCENT:g} %")]
            if limit is None
            else [(limit, f"SLO: {limit:g} %")]
        )
    limit = series.limits.get(f"{figure.partition('_')[0]}_ms")
    return [] if limit is None else [(limit, f"SLO: {milliseconds(limit)}")]


def _chart(
    title: str,
    note: str,
    lines: Sequence[_Line],
    styles: Sequence[str] = STYLES,
    *,
    on: Axis,
    latency: bool = False,
    around: float | None = None,
    bounds: Sequence[tuple[float, str]] = (),
    y_title: str = "",
) -> Chart:
    spreads = [spread for _, line in lines for _, spread in line]
    limits = [value for value, _ in bounds]
    if latency:
        lowest = min(max(whisker(spread)[0], spread.median / _FARTHEST) for spread in spreads)
        y = logarithmic(min([lowest, *limits]), max([_top(spreads), *limits]), Y_START, Y_END)
    elif around is not None:
        far = max(abs(end - around) for spread in spreads for end in whisker(spread))
        away = nice_top(min(max(far, 0.01), around), 2)
        y = linear(around - away, around + away, start_px=Y_START, end_px=Y_END, wanted=4)
    else:
        y = linear(0, nice_top(max([_top(spreads), *limits])), start_px=Y_START, end_px=Y_END, wanted=4)
    return Chart(
        title=title,
        note=note,
        x=on,
        y=y,
        series=[
            ChartSeries(
                name,
                styles[place % len(styles)],
                [(at, spread.median) for at, spread in line],
                spread=[whisker(spread) for _, spread in line],
            )
            for place, (name, line) in enumerate(lines)
        ],
        x_shown=[f"{at:g}" for at, _ in lines[0][1]],
        y_title=y_title,
        bounds=bounds,
    )


def _lines(points: Sequence[Measured], figure: str) -> list[_Line]:
    lines: list[_Line] = []
    for target in dict.fromkeys(point.target for point in points):
        found = [
            (point.offered, point.figures[figure])
            for point in points
            if point.target == target and figure in point.figures
        ]
        if found:
            lines.append((target or "measured", sorted(found, key=lambda one: one[0])))
    return lines


def _loads(series: Runs) -> Axis:
    """Users double from tick to tick; rates are even."""
    offered = sorted({point.offered for point in series.points})
    if _closed(series):
        return doubling(
            [round(load) for load in offered], offered[0] / 1.15, offered[-1] * 1.15, start_px=X_START, end_px=X_END
        )
    return linear(0, nice_top(offered[-1]), start_px=X_START, end_px=X_END, wanted=8)


def _closed(series: Runs) -> bool:
    return series.plan["concurrency"] is not None


def _note(points: Sequence[Measured]) -> str:
    runs = max(point.runs for point in points)
    if runs > 1:
        return f"median and 95 % confidence of {runs} runs"
    known = any(spread.within_run for point in points for spread in point.figures.values())
    return f"one run each{', 95 % confidence within it' if known else ''}"


def whisker(spread: Spread) -> Interval:
    """The interval drawn at a point: its 95 % confidence interval, or the point alone if none is known."""
    return spread.interval or (spread.median, spread.median)


def _top(spreads: Iterable[Spread]) -> float:
    """The end of an axis. Of two runs an interval can be so long that its end is left outside."""
    return max(max(spread.median, min(whisker(spread)[1], spread.median * _FARTHEST)) for spread in spreads)


def _median(point: Measured, figure: str) -> float:
    return point.figures[figure].median if figure in point.figures else 0.0


def _divided(spread: Spread, users: float) -> Spread:
    within = spread.within_run and (spread.within_run[0] / users, spread.within_run[1] / users)
    values = [value / users for value in spread.values]
    return Spread(
        median=spread.median / users,
        low=spread.low / users,
        high=spread.high / users,
        values=values,
        within_run=within,
    )
