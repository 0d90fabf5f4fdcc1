"""The frame of every report page: style, scripts, a strict content security policy, tables and charts."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

import orjson

from loadtest.report.chart import Axis, Chart, ChartSeries, Point

_SECONDS = " s"
_DIGITS = 4


class Plots:
    """The charts of one page."""

    def __init__(self) -> None:
        self._charts: list[Chart] = []

    def figure(self, chart: Chart) -> str:
        """The place of the chart on the page."""
        self._charts.append(chart)
        return (
            f"<figure><figcaption><b>{escape(chart.title)}</b>"
            f' <span class="note">{escape(chart.note)}</span></figcaption>'
            f'<div class="plot" data-plot="{len(self._charts) - 1}"></div></figure>'
        )

    def figures(self, charts: Sequence[Chart]) -> str:
        """Charts side by side, as many as there is room for; nothing where there are none."""
        return f'<div class="charts">{"".join(map(self.figure, charts))}</div>' if charts else ""

    def data(self) -> str:
        """JSON that may stand inside a script element, whatever names are in it."""
        text = orjson.dumps([plot_data(chart) for chart in self._charts]).decode()
        for character in "<>&\u2028\u2029":
            text = text.replace(character, f"\\u{ord(character):04x}")
        return text


def plot_data(chart: Chart) -> dict[str, Any]:
    """What the script draws. Along an uneven horizontal axis the data are positions, not values."""
    xs = sorted({x for series in chart.series for x, _ in series.points})
    at = (lambda value: value) if chart.x.even else chart.x.place
    named = dict(zip((x for x, _ in chart.series[0].points), chart.x_shown, strict=False)) if chart.series else {}
    return {
        "title": chart.title,
        "x": {**_axis(chart.x), "labels": [named.get(x, "") for x in xs] if named else None},
        "y": _axis(chart.y, as_it_is=True),
        "data": [[round(at(x), 3) for x in xs], *(_column(series.points, xs) for series in chart.series)],
        "lines": [_line(series, xs) for series in chart.series],
        "dots": [[round(x, 3) for x, _ in chart.dots], [_short(y) for _, y in chart.dots]] if chart.dots else None,
        "marks": [round(x, 3) for x in chart.marks],
    }


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


_NO_SCRIPT = "<noscript><p>JavaScript is off: the charts are not drawn. All tables are here.</p></noscript>"


def document(heading: str, subtitle: str, body: str, plots: Plots | None = None, style: str = "") -> str:
    """A page that needs no network; `body` is HTML with the figures of `plots` in it, heading and subtitle are text."""
    sheet, scripts, data, note = _asset("report.css") + style, [], "", ""
    if plots is not None:
        sheet = _asset("uplot", "uPlot.min.css") + sheet
        scripts = [_asset("uplot", "uPlot.iife.min.js"), _asset("report.js")]
        note, data = _NO_SCRIPT, f'<script type="application/json" id="plots">{plots.data()}</script>'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="content-security-policy" content="{_policy(scripts)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(heading)}</title><style>{sheet}</style></head><body>"
        f"<header><h1>{escape(heading)}</h1><p>{escape(subtitle)}</p></header>"
        f"{note}{body}{data}{''.join(f'<script>{script}</script>' for script in scripts)}</body></html>\n"
    )


def _asset(*path: str) -> str:
    return files("loadtest.report").joinpath("assets", *path).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str]) -> str:
    """No request of any kind, no script but those given. Styles stand in elements and attributes of the page."""
    digests = (b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; base-uri 'none'; form-action 'none'"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are text; the first column is on the left, an `example` one as well."""
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="text">{escape(cell)}</td>' if name == "example" else f"<td>{escape(cell)}</td>"
            for name, cell in zip(head, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="card"><table>{table_head(head)}{body}</table></div>'


def table_head(names: Sequence[str]) -> str:
    """The row of titles; none where no column has one."""
    return "<tr>" + "".join(f"<th>{escape(name)}</th>" for name in names) + "</tr>" if any(names) else ""
