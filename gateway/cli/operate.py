"""Commands about a running gateway: the cache report, reload and restart."""

from typing import Annotated

import typer
from typer import Argument, Option

from gateway.cli.terminal import ADMIN, ADMIN_URL, FAILED, AdminUrl, ask_gateway, fail, print_json, show

_RESTART_SECONDS = 150.0


def add_to(app: typer.Typer) -> None:
    for command in (prefixes, reload, restart):
        app.command()(command)


def prefixes(
    url: Annotated[str, Argument(help=ADMIN)] = ADMIN_URL,
    minutes: Annotated[float, Option(min=0, help="Length of the time window in minutes; 0 = all recorded data.")] = 0.0,
    json: Annotated[bool, Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show the KV cache hit rate of prompts and the causes of cache misses."""
    report = ask_gateway(url, f"/admin/prefixes?minutes={minutes:g}")
    from jinja2 import TemplateError

    try:
        show(report, json, "prefixes.jinja")
    except (TemplateError, TypeError, ValueError) as error:
        fail(f"{url}: unsupported report format; use the version of the gateway ({error!r})", FAILED)


def reload(
    admin: AdminUrl = ADMIN_URL, json: Annotated[bool, Option("--json", help="Print JSON instead of lines.")] = False
) -> None:
    """Make a running gateway read its configuration file again, and show what has changed."""
    done = ask_gateway(admin, "/admin/reload", "POST")
    if json:
        print_json(done)
        return
    for what, title in (("changed", "changed"), ("needs_restart", "needs a restart")):
        for each in done[what]:
            before, after = each["before"], each["after"]
            values = after or before if None in each.values() else f"{before} -> {after}"
            typer.echo(f"{title}: {each['path']}: {values}")
    if not done["changed"] and not done["needs_restart"]:
        typer.echo("nothing has changed")


def restart(admin: AdminUrl = ADMIN_URL) -> None:
    """Replace the processes of a running gateway by new ones, which take over ports, clients and what was learned."""
    done = ask_gateway(admin, "/admin/restart", "POST", timeout_seconds=_RESTART_SECONDS)
    for each in done.get("workers", [done]):
        typer.echo(f"process {each['pid']} serves; process {each['former_pid']} ends when its last response has ended")
