"""`gateway batch`: run a file of requests, and list and cancel batches. Heavy modules are imported by the commands."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from gateway.cli.terminal import FAILED, INVALID, fail, print_json

_URL = "http://127.0.0.1:8080"
Url = Annotated[str, Option("--url", help="URL of a running gateway.", metavar="URL")]
ApiKey = Annotated[str, Option("--api-key", help="API key for it.", envvar="OPENAI_API_KEY", metavar="KEY")]
Json = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]

commands = typer.Typer(no_args_is_help=True, help="Run files of requests, and list and cancel batches.")


@commands.command()
def run(
    file: Annotated[Path, Argument(help="Requests, one JSON object per line.", metavar="INPUT.jsonl", exists=True)],
    output: Annotated[Path, Option("-o", "--output", help="File for the answers.", metavar="OUT.jsonl")],
    errors: Annotated[
        Path | None,
        Option(help="File for requests that failed.", metavar="FILE", show_default="OUT.errors.jsonl"),
    ] = None,
    url: Annotated[str | None, Option(help="URL of a running gateway.", metavar="URL", show_default=_URL)] = None,
    api_key: ApiKey = "",
    backend: Annotated[
        list[str] | None,
        Option("--backend", help="URL of a vLLM server, repeatable: no running gateway is needed.", metavar="URL"),
    ] = None,
    config: Annotated[
        Path | None,
        Option("-c", "--config", help="Configuration file: no running gateway is needed.", metavar="FILE"),
    ] = None,
    endpoint: Annotated[
        str, Option(help="Endpoint of all requests.", show_default="that of the first line", metavar="PATH")
    ] = "",
    window: Annotated[str, Option(help="Time after which unfinished requests expire, such as 24h or 30m.")] = "24h",
) -> None:
    """Run all requests of a file, and write the answers. With --backend or -c, the gateway runs in this process.

    Exits with 0 if every request was answered, else with 1. Ctrl-C leaves a batch on a running gateway as it is; one
    in this process is cancelled, and what is done is written.
    """
    if url is not None and (backend or config is not None):
        raise typer.BadParameter("--url is for a running gateway; --backend and -c run one in this process")
    import asyncio
    from functools import partial

    from gateway.cli.batch_client import BatchFailed, BatchTask, run_at
    from gateway.config import ConfigError

    try:
        task = BatchTask.of(file, output, errors, endpoint=endpoint, window=window)
        if backend or config is not None:
            from gateway.cli.offline import run_offline

            work = partial(run_offline, task, config, backend or ())
        else:
            work = partial(run_at, task, url or _URL, api_key)
        done = asyncio.run(work())
    except ConfigError as error:
        fail(str(error), INVALID)
    except BatchFailed as error:
        fail(str(error), FAILED)
    except KeyboardInterrupt:
        sys.exit(130)
    if not done:
        raise typer.Exit(FAILED)


@commands.command("list")
def list_batches(url: Url = _URL, api_key: ApiKey = "", json: Json = False) -> None:
    """Show the latest batches of a running gateway: their ids, states and progress."""
    found = _ask(url, "/v1/batches?limit=100", api_key)
    if json:
        print_json(found)
        return
    from datetime import datetime

    for each in found["data"]:
        counts, created = each["request_counts"], datetime.fromtimestamp(each["created_at"])
        state = f"paused ({each['paused']})" if each.get("paused") else each["status"]
        done = f"{counts['completed'] + counts['failed']}/{counts['total']} done, {counts['failed']} failed"
        typer.echo(f"{each['id']}  {created:%Y-%m-%d %H:%M}  {state}  {done}  {each['model'] or ''}")
    if not found["data"]:
        typer.echo("no batches")


@commands.command()
def cancel(batch: Annotated[str, Argument(help="Id of the batch.")], url: Url = _URL, api_key: ApiKey = "") -> None:
    """Cancel a batch of a running gateway. What is done stays available."""
    from urllib.parse import quote

    cancelled = _ask(url, f"/v1/batches/{quote(batch, safe='')}/cancel", api_key, "POST")
    typer.echo(f"{batch}: {cancelled['status']}")


def _ask(url: str, path: str, api_key: str, method: str = "GET") -> dict[str, Any]:
    from gateway.cli.client import AskError, ask_admin

    try:
        return ask_admin(url, path, api_key, method, asked="a")
    except AskError as error:
        fail(str(error), FAILED)
