"""`gateway usage`: usage of each API key, as a table, JSON or CSV."""

import csv
import sys
from typing import Annotated
from urllib.parse import urlencode

import typer
from typer import Option

from gateway.cli.terminal import ADMIN_URL, FAILED, INVALID, AdminUrl, ask_gateway, fail, show


def usage(
    admin: AdminUrl = ADMIN_URL,
    since: Annotated[
        str | None, Option(help="First day (UTC), such as 2027-01-01.", show_default="first day of this month")
    ] = None,
    until: Annotated[str | None, Option(help="Last day (UTC), which is included.", show_default="today")] = None,
    by_day: Annotated[bool, Option("--by-day", help="A row for each day.")] = False,
    as_csv: Annotated[bool, Option("--csv", help="Print CSV instead of a table.")] = False,
    json: Annotated[bool, Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the requests and tokens of each API key, by model, as a running gateway has counted them."""
    if as_csv and json:
        fail("--csv and --json are mutually exclusive", INVALID)
    asked = {"since": since, "until": until, "by": "day" if by_day else None}
    query = urlencode({name: value for name, value in asked.items() if value is not None})
    from jinja2 import TemplateError

    document = ask_gateway(admin, f"/admin/usage?{query}")
    try:
        if not as_csv:
            show(document | {"by_day": by_day}, json, "usage.jinja")
            return
        fields = [*(["day"] if by_day else []), "key", "model", *document["total"]]
        writer = csv.DictWriter(sys.stdout, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(document["rows"])
    except (TemplateError, KeyError, TypeError, ValueError) as error:
        fail(f"{admin}: unsupported document; use the version of the gateway ({error!r})", FAILED)


def add_to(app: typer.Typer) -> None:
    """Make it a command of this application."""
    app.command("usage")(usage)
