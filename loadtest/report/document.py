"""What every report page has: the frame with its style, scripts and a policy that lets nothing else in; tables."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from loadtest.report.plots import Plots

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
