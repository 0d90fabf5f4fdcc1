"""Every report page: its template, style, scripts, a strict content security policy, and what its charts draw."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import orjson
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from loadtest.report.chart import Axis, Chart, ChartSeries, Point
from loadtest.report.formatting import milliseconds, number, percent

_SECONDS = " s"
_DIGITS = 4
_INTERVAL = re.compile(r"(.*?)( ±[^,]+)?(, tie)?")


def plot_data(chart: Chart) -> dict[str, Any]:
    """What the script draws. Along an uneven horizontal axis the data are positions, not values."""
    xs = sorted({x for series in chart.series for x, _ in series.points})
    at = (lambda value: value) if chart.x.even else chart.x.place
    named = dict(zip((x for x, _ in chart.series[0].points), chart.x_shown, strict=False)) if chart.series else {}
    return {
        "title": chart.title,
        "x": {
            **_axis(chart.x),
            "title": chart.x_title or _time(chart.x),
            "labels": [named.get(x, "") for x in xs] if named else None,
        },
        "y": {**_axis(chart.y, as_it_is=True), "title": chart.y_title},
        "data": [[round(at(x), 3) for x in xs], *(_column(series.points, xs) for series in chart.series)],
        "lines": [_line(series, xs) for series in chart.series],
        "dots": [[round(x, 3) for x, _ in chart.dots], [_short(y) for _, y in chart.dots]] if chart.dots else None,
        "dotRows": list(chart.dot_rows),
        "marks": [round(x, 3) for x in chart.marks],
        "bounds": [[value, text] for value, text in chart.bounds],
        "uprights": [[at(value), text] for value, text in chart.uprights],
        "labels": [[at(x), y, text] for x, y, text in chart.labels],
        "routes": [[style, [[at(x), y] for x, y in points]] for style, points in chart.routes],
        "ringed": [[at(x), y] for x, y in chart.ringed],
    }


def _time(axis: Axis) -> str:
    """What an axis of seconds is called; others have names of their own."""
    return "time since the start" if axis.unit == _SECONDS else ""


def _axis(axis: Axis, *, as_it_is: bool = False) -> dict[str, Any]:
    at = (lambda value: value) if axis.even or as_it_is else axis.place
    return {
        "time": axis.unit == _SECONDS,
        "unit": axis.unit.strip(),
        "log": as_it_is and not axis.even,
        "range": [at(axis.low), at(axis.high)],
        "ticks": [[at(value), label] for value, label in axis.ticks],
    }


def _column(points: Sequence[Point], xs: Sequence[float]) -> list[float | None]:
    known = dict(points)
    return [None if (value := known.get(x)) is None else _short(value) for x in xs]


def _line(series: ChartSeries, xs: Sequence[float]) -> dict[str, Any]:
    ends = {x: pair for (x, _), pair in zip(series.points, series.spread, strict=False)}
    return {
        "name": series.name,
        "style": series.style,
        "steps": series.steps,
        "area": series.area,
        # A line with moments of its own goes on over those of the others.
        "joined": len(series.points) < len(xs),
        "spread": [[_short(end) for end in pair] if (pair := ends.get(x)) else None for x in xs] if ends else None,
    }


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def render(
    template: str,
    heading: str,
    subtitle: str,
    charts: Sequence[Chart],
    style: str = "",
    *,
    more_scripts: Sequence[str] = (),
    **values: Any,
) -> str:
    """A page that needs no network, of one of the `templates`, which draws the charts and has the values.

    `more_scripts`: of the assets, those that run after the charts are drawn.
    """
    sheet, scripts = _asset("report.css") + style, []
    if charts:
        sheet = _uplot("uPlot.min.css") + sheet
        scripts = [_uplot("uPlot.iife.min.js"), _asset("report.js")]
    scripts += map(_asset, more_scripts)
    return (
        _environment()
        .get_template(template)
        .render(
            values,
            heading=heading,
            subtitle=subtitle,
            charts=charts,
            plots=[plot_data(chart) for chart in charts],
            sheet=sheet,
            scripts=scripts,
            policy=_policy(scripts),
        )
    )


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("loadtest.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"number": number, "milliseconds": milliseconds, "percent": percent, "quiet": quiet}
    made.policies["json.dumps_function"] = lambda value, **_: orjson.dumps(value).decode()
    return made


def quiet(value: object) -> Markup:
    """Sets an interval, and that it is a tie, apart from the figure before it."""
    text = str(value)
    found = _INTERVAL.fullmatch(text)
    if found is None:
        return Markup("{}").format(text)
    parts = (Markup(' <span class="near">{}</span>').format(part.lstrip(", ")) for part in found.groups()[1:] if part)
    return Markup("{}{}").format(found[1], Markup("").join(parts))


def _asset(name: str) -> str:
    return files("loadtest.report").joinpath("assets", name).read_text(encoding="utf-8")


def _uplot(name: str) -> str:
    """A file of uPlot, which the gateway's dashboard has, too."""
    return files("gateway.features.page").joinpath("static", "uplot", name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str]) -> str:
    """No request of any kind, no script but those given. Styles stand in elements and attributes of the page."""
    digests = (b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; base-uri 'none'; form-action 'none'"
