"""`loadtest record`: reads an access log, writes a trace."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import orjson
import typer

from loadtest.recording.access_log import Log, read_log
from loadtest.recording.mooncake import trace_of

BLOCK_TOKENS = 512  # of Mooncake's own traces, and what `loadtest replay` takes them for


def record(
    logs: Annotated[list[Path], typer.Argument(help="Access logs of gateways with the same salt; - = standard input.")],
    out: Annotated[Path, typer.Option(help="The trace to write.")],
    model: Annotated[str | None, typer.Option(help="Only requests for this model.")] = None,
    block_size: Annotated[
        int, typer.Option(min=1, help="Tokens of a block; give `loadtest replay` the same.")
    ] = BLOCK_TOKENS,
) -> None:
    """Make a trace for `loadtest replay` out of the gateway's access log (`server.access_log_prefixes: true`)."""
    try:
        log = read_log(_lines(logs), model)
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}")
    if not log.requests:
        _fail(f"no request to record{_left_out(log)}{_what_to_do(log)}")
    try:
        with out.open("wb") as sink:
            for line in trace_of(log.requests, block_size):
                sink.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}")
    seconds = log.requests[-1].at_seconds - log.requests[0].at_seconds
    typer.echo(f"{out}: {len(log.requests):,} requests in {seconds:,.0f} s{_left_out(log)}")


def _lines(logs: list[Path]) -> Iterator[bytes]:
    for path in logs:
        if str(path) == "-":
            yield from sys.stdin.buffer
            continue
        with path.open("rb") as file:
            yield from file


def _left_out(log: Log) -> str:
    told = ", ".join(f"{count:,} {reason}" for reason, count in log.left_out.most_common())
    return f"; lines left out: {told}" if told else ""


def _what_to_do(log: Log) -> str:
    return " (set server.access_log_prefixes: true)" if log.left_out["without prefix hashes"] else ""


def _fail(message: str) -> NoReturn:
    typer.echo(f"loadtest: {message}", err=True)
    raise typer.Exit(1)
