"""The common parts of commands: exit codes, options, and output."""

import os
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer import Option

FAILED, INVALID = 1, 2  # exit codes

ConfigFile = Annotated[Path | None, Option("-c", "--config", help="Configuration file (YAML).", metavar="FILE")]
ADMIN = "URL of the admin port of a running gateway; its token is read from GATEWAY_ADMIN_TOKEN."
AdminUrl = Annotated[str, Option("--admin", help=ADMIN, metavar="URL")]
ADMIN_URL = "http://127.0.0.1:8081"


def ask_gateway(
    url: str, path: str, method: str = "GET", document: object = None, timeout_seconds: float = 30.0
) -> dict[str, Any]:
    """The document at a path of the admin port; the command ends if there is none."""
    from gateway.cli.client import AskError, ask_admin

    try:
        return ask_admin(
            url,
            path,
            token=os.environ.get("GATEWAY_ADMIN_TOKEN", ""),
            method=method,
            document=document,
            timeout_seconds=timeout_seconds,
        )
    except AskError as error:
        fail(str(error), FAILED)


def show(document: dict[str, Any], as_json: bool, template: str) -> None:
    """Print JSON, or a page. Raises TemplateError, TypeError or ValueError if the template needs another document."""
    if as_json:
        print_json(document)
        return
    from rich.console import Console

    from gateway.cli.pages import page

    Console().print(page(template, document))


def print_json(document: object) -> None:
    import orjson

    typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())


def fail(message: str, code: int) -> NoReturn:
    for line in message.splitlines():
        typer.echo(f"gateway: {line}", err=True)
    raise typer.Exit(code)
