"""The report of a series as one HTML page that needs no network, with a link to each run's own."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from html import escape

from loadtest.report.curves import series_charts
from loadtest.report.document import document, table
from loadtest.report.load import asked_told
from loadtest.report.plots import Plots
from loadtest.report.series import Series
from loadtest.report.series_tables import tables


def series_page(series: Series, there: Collection[str]) -> str:
    """The whole page. `there`: the runs whose own pages can be linked."""
    heading = f"Load tests of {series.plan['model']}"
    plots = Plots()
    charts = plots.figures(series_charts(series))
    tabled = "".join(f"<h2>{escape(title)}</h2>{table(head, rows)}" for title, head, rows in tables(series))
    links = "".join(
        f'<li><a href="{escape(folder)}/report.html">{escape(folder)}</a></li>'
        if folder in there
        else f"<li>{escape(folder)}</li>"
        for folder in series.folders
    )
    return document(
        heading,
        f"{asked_told(series.plan)} · {series.environment.started_at}",
        f"{_verdict(series)}"
        + (f"<h2>By load</h2>{charts}" if charts else "")
        + f"{tabled}<h2>Runs, in order</h2><ul>{links}</ul>"
        f"<h2>Command</h2><code>{escape(shlex.join(series.environment.command))}</code>",
        plots if charts else None,
    )


def _verdict(series: Series) -> str:
    items = "".join(f"<li>{escape(reason)}</li>" for reason in series.reasons)
    head = "Passed." if series.passed else "Failed."
    listed = f"<ul>{items}</ul>" if items else ""
    return f'<div class="verdict{" passed" if series.passed else ""}"><b>{head}</b>{listed}</div>'
