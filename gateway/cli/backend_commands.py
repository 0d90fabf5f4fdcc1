"""`gateway backends`: show, add, drain and remove the backends of a running gateway."""

from typing import Annotated
from urllib.parse import quote

import typer
from typer import Argument, Option

from gateway.cli.terminal import ADMIN_URL, AdminUrl, ask_gateway, show

BackendName = Annotated[str, Argument(help="Name of the backend, as `gateway backends` shows it.")]
Wait = Annotated[bool, Option("--wait", help="Return when its last request has ended.")]

backend_commands = typer.Typer(help="Show and change the backends of a running gateway.")


@backend_commands.callback(invoke_without_command=True)
def backends(
    context: typer.Context,
    admin: AdminUrl = ADMIN_URL,
    json: Annotated[bool, Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the backends of a running gateway: where they come from, their state and why, and their load."""
    context.obj = admin
    if context.invoked_subcommand is None:
        show(ask_gateway(admin, "/admin/backends"), json, "backends.jinja")


@backend_commands.command("list")
def backends_list(
    context: typer.Context, json: Annotated[bool, Option("--json", help="Print JSON instead of a table.")] = False
) -> None:
    """The same as `gateway backends` alone."""
    show(ask_gateway(context.obj, "/admin/backends"), json, "backends.jinja")


@backend_commands.command("add")
def backends_add(
    context: typer.Context,
    url: Annotated[str, Argument(help="URL of a vLLM server, such as http://10.0.0.11:8000.")],
    name: Annotated[str, Option(help="Name in metrics and logs; empty = host:port of the URL.")] = "",
    api_key: Annotated[str, Option(help="Key sent to the backend.", envvar="VLLM_API_KEY")] = "",
    max_in_flight: Annotated[
        int | None, Option(min=1, help="Maximum sequences in flight.", show_default="auto")
    ] = None,
    relative_cost: Annotated[float, Option(min=0.001, help="Relative time for the same work.")] = 1.0,
) -> None:
    """Add a backend. It gets requests once its health probe succeeds, and stays until it is removed."""
    settings = {"url": url, "name": name, "api_key": api_key, "relative_cost": relative_cost}
    if max_in_flight is not None:
        settings["max_in_flight"] = max_in_flight
    added = ask_gateway(context.obj, "/admin/backends", "POST", settings)["backend"]
    typer.echo(f"added {added['name']} ({added['url']})")


@backend_commands.command("drain")
def backends_drain(context: typer.Context, name: BackendName, wait: Wait = False) -> None:
    """Send a backend no new requests; those in flight end normally."""
    _drain(context.obj, name, wait)


@backend_commands.command("undrain")
def backends_undrain(context: typer.Context, name: BackendName) -> None:
    """Send a drained backend new requests again."""
    backend = ask_gateway(context.obj, f"/admin/backends/{quote(name, safe='')}/undrain", "POST")["backend"]
    typer.echo(f"{name} is {'draining: ' + backend['draining'] if backend['draining'] else backend['state']}")


@backend_commands.command("remove")
def backends_remove(context: typer.Context, name: BackendName, wait: Wait = False) -> None:
    """Remove a backend: it gets no new requests, and leaves when the last one has ended."""
    if wait:
        _drain(context.obj, name, wait)
    ask_gateway(context.obj, f"/admin/backends/{quote(name, safe='')}", "DELETE")
    typer.echo(f"removed {name}")


def _drain(admin: str, name: str, wait: bool) -> None:
    """Drain a backend, and with `wait` show how much is left there until nothing is."""
    path, shown = f"/admin/backends/{quote(name, safe='')}/drain", None
    while True:
        answer = ask_gateway(admin, f"{path}?wait_seconds={1 if wait and shown is not None else 0}", "POST")
        left = answer["backend"]["in_flight"]
        if left != shown:
            shown = left
            typer.echo(f"{name}: {left} sequences in flight" if left else f"{name}: drained")
        if answer["drained"] or not wait:
            return
