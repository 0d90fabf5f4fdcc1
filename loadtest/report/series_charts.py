"""Charts of a series: the batch-size curve, targets against the first of them, goodput and latency by load. Pure."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Throughput against latency, and against what each user gets; a point a load. The note has the best load."""
    rate = next(
        (name for name in _TOTALS if any(_median(point, name) for point in series.points)), "requests_per_second"
    )
    latency = next((name for name in ("e2e_p95", "e2e_p50") if any(name in one.figures for one in series.points)), None)
    charts = []
    if latency is not None:
        limit = _limit_of(series, latency)
        drawn = _against(series.points, rate, latency, " ms", [value for value, _ in limit])
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
        lines.append(
            ChartSeries(
                target or "measured", f"{style} apart", sorted(route), spread=[(y, y) for _, y in sorted(route)]
            )
        )
        routes.append((style, route))
    right, best = max(x for x, _ in places), _best(known)
    near = [limit for limit in limits if limit < 2 * right]
    return Chart(
        title="",
        note=_note_of(best),
        x=linear(0, nice_top(max([right, *near])), X_START, X_END, 6, unit),
        y=linear(0, nice_top(max(y for _, y in places)), Y_START, Y_END, 4),
        series=lines,
        routes=routes,
        y_title=f"{_TOTALS.get(rate, 'requests').lower()}/s",
        labels=[(x, y, one.load) for one, (x, y) in zip(known, places, strict=True)],
        ringed=[(best.figures[figure].median, best.figures[rate].median)] if best else [],
    )


def _offered(point: Measured) -> float:
    return point.offered


def _best(points: Sequence[Measured]) -> Measured | None:
    """The load with the most goodput of those that passed, or else of all; None without an SLO."""
    measured = [one for one in points if _median(one, "goodput_per_second")]
    good = [one for one in measured if one.passed and one.passed == one.valid] or measured
    return max(good, key=lambda one: _median(one, "goodput_per_second"), default=None)


def _note_of(best: Measured | None) -> str:
    if best is None:
        return "a point for each load; --slo marks the best one"
    where = f"{best.target}, " if best.target else ""
    rate = f"{_median(best, 'goodput_per_second'):.3g} requests/s"
    return f"a point for each load; the ring is the best one: {where}{best.load}, {rate} within the SLO"


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
        note = "pair by pair: median and range"
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
    values = [end for _, line in lines for _, spread in line for end in (spread.low, spread.high)]
    values += [value for value, _ in bounds]
    if latency:
        y = logarithmic(min(values), max(values), Y_START, Y_END)
    elif around is not None:
        away = nice_top(max(max(abs(value - around) for value in values), 0.01), 2)
        y = linear(around - away, around + away, Y_START, Y_END, 4)
    else:
        y = linear(0, nice_top(max(values)), Y_START, Y_END, 4)
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
                spread=[(spread.low, spread.high) for _, spread in line],
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
        return doubling([round(load) for load in offered], offered[0] / 1.15, offered[-1] * 1.15, X_START, X_END)
    return linear(0, nice_top(offered[-1]), X_START, X_END, 8)


def _closed(series: Runs) -> bool:
    return series.plan["concurrency"] is not None


def _note(points: Sequence[Measured]) -> str:
    runs = max(point.runs for point in points)
    return f"median and range of {runs} runs" if runs > 1 else "one run each"


def _median(point: Measured, figure: str) -> float:
    return point.figures[figure].median if figure in point.figures else 0.0


def _divided(spread: Spread, users: float) -> Spread:
    return Spread(median=spread.median / users, low=spread.low / users, high=spread.high / users)
