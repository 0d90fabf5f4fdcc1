"""What every report page has: the frame with its style and script, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files


def document(heading: str, subtitle: str, body: str) -> str:
    """A page that needs no network; `body` is HTML, the rest is text."""
    assets = files("loadtest.report") / "assets"
    style = (assets / "report.css").read_text(encoding="utf-8")
    script = (assets / "report.js").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(heading)}</title><style>{style}</style></head><body>"
        f"<header><h1>{escape(heading)}</h1><p>{escape(subtitle)}</p></header>"
        f"{body}<script>{script}</script></body></html>\n"
    )


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
