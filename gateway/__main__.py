"""The command `gateway`. Heavy modules are imported by the commands that need them, so that --help is quick."""

import sys
from typing import Annotated

import typer
from typer import Option

from gateway import BUILD, __version__
from gateway.cli import configured, operate, plan_command, usage_command
from gateway.cli.backend_commands import backend_commands
from gateway.cli.batch import commands as batch_commands
from gateway.cli.key_commands import key_commands

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="An OpenAI-compatible gateway in front of vLLM servers.",
    epilog="Exit codes: 0 = success, 1 = failure, 2 = invalid usage or configuration.",
)
app.add_typer(backend_commands, name="backends")
app.add_typer(key_commands, name="keys")
app.add_typer(batch_commands, name="batch")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vllm-batching-gateway {__version__} ({BUILD}, Python {sys.version.split()[0]})")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Show the versions and the build.")
    ] = False,
) -> None: ...


for commands in (configured, operate, usage_command, plan_command):
    commands.add_to(app)


def main() -> None:
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
