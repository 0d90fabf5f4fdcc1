"""A comparison of proxies as one HTML page: the best medians, what was tested, charts, and all tables. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from dataclasses import replace

from loadtest.compare.outage import report as outage
from loadtest.compare.peers import OURS
from loadtest.compare.report import notes, ttft_chart
from loadtest.compare.schema import Comparison
from loadtest.compare.tables import QUALITY, can_separate, cell, measured_arms, tables, winners
from loadtest.report.chart import STYLES, X_END, X_START, Y_END, Y_START, Chart, ChartSeries, linear, nice_top
from loadtest.report.document import render
from loadtest.report.schema import Interval
from loadtest.report.series_charts import whisker

_MOMENTS = ("it goes", "it is let back", "it serves")
_TRADED = [next(one for one in QUALITY if one.title == title) for title in ("TTFT p50", "output tokens/s")]
_OUTAGE_STYLES = {"answered": "s3", "lost": "bad"}


def comparison_page(comparison: Comparison, there: Collection[str]) -> str:
    """The whole page. `there`: the folders of runs whose own pages can be linked."""
    setup, where = comparison.setup, comparison.environment
    return render(
        "compare.html",
        f"Proxies before {setup.engines}",
        f"{setup.model} · {setup.load}{f' · SLO {setup.slo}' if setup.slo else ''} · {where.started_at}",
        _charts(comparison),
        comparison=comparison,
        winners=winners(comparison),
        tables=tables(comparison),
        best="best" if can_separate(comparison) else "ahead",
        tested=_tested(comparison),
        notes=notes(comparison),
        there=there,
        command=shlex.join(where.command),
    )


def _tested(comparison: Comparison) -> list[tuple[str, str]]:
    setup, where = comparison.setup, comparison.environment
    known = [arm for arm in comparison.arms if not arm.missing]
    return [
        ("engines", setup.engines),
        ("model", setup.model),
        ("load", setup.load + (f", SLO {setup.slo}" if setup.slo else "")),
        ("proxies", "; ".join(f"{arm.name} {arm.version}".strip() + f" ({arm.policy})" for arm in known)),
        ("repetitions", str(len({turn.repetition for turn in comparison.turns}))),
        ("client", ", ".join(f"{name} {value}" for name, value in where.versions.items())),
        ("machine", f"{where.host['cpu']}, {where.host['cpus']} cores, {where.host['system']}"),
    ]


def _charts(comparison: Comparison) -> list[Chart]:
    arms = measured_arms(comparison)
    drawn = ttft_chart(comparison)
    charts = [] if drawn is None else [_restyled(drawn, arms)]
    charts += _trade_off(comparison, arms)
    if comparison.killed is not None:
        charts += [
            _with_moments(chart) for chart in outage.charts(comparison.killed, [a.name for a in comparison.arms])
        ]
    return charts


def _restyled(chart: Chart, arms: Sequence[str]) -> Chart:
    """With the styles of pages in the place of those of SVG files."""
    series = [replace(one, style=_style(arms, one.name)) for one in chart.series]
    return replace(chart, series=series, x_title="share of the requests", y_title="TTFT")


def _style(arms: Sequence[str], name: str) -> str:
    """Ours is the first colour, wherever it stands."""
    order = sorted(arms, key=lambda arm: arm != OURS)
    return STYLES[order.index(name) % len(STYLES)]


def _trade_off(comparison: Comparison, arms: Sequence[str]) -> list[Chart]:
    """A point for each proxy: medians of throughput and of TTFT."""
    places = dict[str, tuple[float, float]]()
    ends = dict[str, Interval]()
    for arm in arms:
        ttft, tokens = (cell(comparison.turns_of(arm), column) for column in _TRADED)
        if ttft is not None and tokens is not None and tokens.median:
            places[arm] = (ttft.median, tokens.median)
            ends[arm] = whisker(tokens)
    if not places:
        return []
    right = max(x for x, _ in places.values())
    top = max(max(y, min(ends[arm][1], 2 * y)) for arm, (_, y) in places.items())
    return [
        Chart(
            title="Throughput against TTFT",
            note="medians, 95 % confidence of throughput; up and left is better",
            x=linear(0, nice_top(right), start_px=X_START, end_px=X_END, wanted=6, unit=" ms"),
            y=linear(0, nice_top(top), start_px=Y_START, end_px=Y_END, wanted=4),
            series=[ChartSeries(arm, _style(arms, arm), [place], spread=[ends[arm]]) for arm, place in places.items()],
            x_title="TTFT p50",
            y_title="output tokens/s",
            labels=[(*place, arm) for arm, place in places.items()],
        )
    ]


def _with_moments(chart: Chart) -> Chart:
    """Moments are upright lines on pages, which need no legend."""
    moments = [one.points[0][0] for one in chart.series if one.name == "moment"]
    named = (
        list(zip(moments, _MOMENTS, strict=False)) if len(moments) == len(_MOMENTS) else [(at, "") for at in moments]
    )
    lines = [replace(one, style=_OUTAGE_STYLES[one.name]) for one in chart.series if one.name in _OUTAGE_STYLES]
    return replace(chart, series=lines, uprights=named, y_title="requests/s", note="")
