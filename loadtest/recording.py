"""`loadtest record`: makes a trace in Mooncake's format of the gateway's access log, or runs the recording proxy.

The log has prefix hashes of answered requests. Its blocks end where messages do, in bytes; those of the trace every so
many tokens: where that is in bytes follows from the model's mean. Two prompts get the same number for a block if they
are the same up to the log's first block end at or after the end of that block, so the shared prefix is understated by
less than a block of the log.
"""

import asyncio
import os
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NoReturn

import orjson
import typer

from loadtest.access import Access
from loadtest.checkpoint import redaction
from loadtest.drive.target import base_url
from loadtest.recorder import record_requests


@dataclass(frozen=True, slots=True)
class Logged:
    """One request that was answered."""

    at_seconds: float  # Unix time of its arrival
    _: KW_ONLY
    model: str
    prompt_tokens: int
    output_tokens: int
    size_bytes: int  # of the prompt
    ends: tuple[int, ...]  # bytes of the prompt up to the end of each block
    hashes: tuple[str, ...]  # of all that is before each end
    duration_seconds: float = 0.0  # from its arrival, as the next
    first_seconds: float | None = None  # None where the answer was not streamed
    queue_seconds: float = 0.0  # in the gateway's line
    backend: str = ""
    cached_tokens: int | None = None


@dataclass(slots=True)
class Log:
    """What a log holds, oldest arrival first, and how many lines were left out, by reason."""

    requests: list[Logged] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def read_log(lines: Iterable[bytes], model: str | None = None) -> Log:
    """Read lines; others than the access log's may be among them. `model`: only that one's."""
    log = Log()
    for line in lines:
        found = _request(line)
        if isinstance(found, str):
            log.left_out[found] += 1
        elif model is not None and found.model != model:
            log.left_out["of another model"] += 1
        else:
            log.requests.append(found)
    log.requests.sort(key=lambda request: request.at_seconds)
    return log


def _request(line: bytes) -> Logged | str:
    """The request, or why it is left out."""
    try:
        document = orjson.loads(line)
        ended, took_ms, model = document["time"], document["duration_ms"], document["model"]
        prompt, output = document["prompt_tokens"], document["completion_tokens"]
    except (ValueError, KeyError, TypeError):
        return "not of the access log"
    if not prompt or not output:
        return "without an answer, or without its usage"
    prefix = document.get("prefix")
    if not isinstance(prefix, dict):
        return "without prefix hashes"
    try:
        arrived_seconds = _unix_seconds(ended) - float(took_ms) / 1000
        return _logged(
            document, arrived_seconds, model=str(model), prompt=int(prompt), output=int(output), prefix=prefix
        )
    except (KeyError, TypeError, ValueError):
        return "not of the access log"


def _unix_seconds(time: str | float) -> float:
    """A time in ISO 8601, or in seconds as logs of version 0.1 have it. Raises ValueError."""
    return datetime.fromisoformat(time).timestamp() if isinstance(time, str) else float(time)


def _logged(
    document: dict[str, Any], at_seconds: float, model: str, prompt: int, output: int, prefix: dict[str, Any]
) -> Logged:
    ends, hashes = tuple(map(int, prefix["ends"])), tuple(map(str, prefix["hashes"]))
    if len(ends) != len(hashes) or list(ends) != sorted(ends):
        raise ValueError("each hash has an end, and they rise")
    first_ms, cached = document.get("first_byte_ms"), document.get("actual_hit_tokens")
    return Logged(
        at_seconds,
        model=model,
        prompt_tokens=prompt,
        output_tokens=output,
        size_bytes=int(prefix["bytes"]),
        ends=ends,
        hashes=hashes,
        duration_seconds=float(document["duration_ms"]) / 1000,
        first_seconds=float(first_ms) / 1000 if document.get("stream") and first_ms is not None else None,
        queue_seconds=float(document.get("queue_ms") or 0.0) / 1000,
        backend=str(document.get("backend") or ""),
        cached_tokens=None if cached is None else int(cached),
    )


_Place = tuple[str, int]


def trace_of(requests: Sequence[Logged], block_tokens: int) -> Iterator[dict[str, Any]]:
    """A line for each request, which are in the order of their arrival. Numbers count up: no hash is in the trace."""
    ratios = bytes_per_token(requests)
    numbers: dict[_Place, int] = {}
    fresh = count()
    for request in requests:
        step = ratios[request.model] * block_tokens
        places = _places(request, request.prompt_tokens // block_tokens, step)
        for place in places:
            if place is not None and place not in numbers:
                numbers[place] = next(fresh)
        yield {
            "timestamp": round((request.at_seconds - requests[0].at_seconds) * 1000),
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": [next(fresh) if place is None else numbers[place] for place in places],
        }


def bytes_per_token(requests: Sequence[Logged]) -> dict[str, float]:
    """By model: one figure for all prompts, so that those that begin alike are cut alike."""
    sizes: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for request in requests:
        sizes[request.model] += request.size_bytes
        tokens[request.model] += request.prompt_tokens
    return {model: sizes[model] / tokens[model] for model in tokens}


def _places(request: Logged, blocks: int, step: float) -> list[_Place | None]:
    """What stands for each block; None = it is like no other, as it is not in the log."""
    ends, hashes = request.ends, request.hashes
    whole = bool(ends) and ends[-1] >= request.size_bytes
    places: list[_Place | None] = []
    for block in range(blocks):
        at = bisect_left(ends, (block + 1) * step)
        if at < len(ends):
            places.append((hashes[at], block))
        else:
            places.append((hashes[-1], block) if whole else None)
    return places


BLOCK_TOKENS = 512  # of Mooncake's own traces, and what `loadtest replay` takes them for


def record(
    logs: Annotated[
        list[Path] | None, typer.Argument(help="Access logs of gateways with the same salt; - = standard input.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = ...,  # type: ignore[assignment]
    server: Annotated[
        str | None,
        typer.Option("--from", help="Instead of logs: forward to this URL until Ctrl-C, and keep the bodies."),
    ] = None,
    host: Annotated[str, typer.Option(help="--from: where clients connect.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="--from: where clients connect; 0 = a free one.", min=0, max=65535)] = 8088,
    insecure: Annotated[bool, typer.Option("--insecure", help="--from: accept any certificate of the server.")] = False,
    cacert: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="--from: PEM file of the certificates to trust.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Logs: only requests for this model.")] = None,
    block_size: Annotated[
        int, typer.Option(min=1, help="Logs: tokens of a block; give `loadtest replay` the same.")
    ] = BLOCK_TOKENS,
) -> None:
    """Keep requests to send them again with `loadtest run --trace`.

    From the gateway's access log (`server.access_log_prefixes: true`): their lengths and shared prefixes, also for
    `loadtest replay`. With --from URL: their bodies, as a proxy before that server.
    """
    if (server is None) == (not logs):
        raise typer.BadParameter("give access logs, or the URL of a server with --from")
    try:
        if server is not None:
            access = Access.of(None, insecure=insecure, ca_file=cacert)
            _record_bodies(base_url(server), access, host, port=port, out=out)
        else:
            _record_trace(logs or [], model, block_size, out)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except OSError as error:
        _fail(f"{error.filename or host}: {error.strerror}")


def _record_bodies(url: str, access: Access, host: str, port: int, out: Path) -> None:
    def on_start(own_url: str) -> None:
        typer.echo(f"{own_url} forwards to {redaction.text(url)}, and {out} gets the requests; Ctrl-C ends it")

    # What people asked is for nobody else's eyes.
    descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as sink:
        made = asyncio.run(record_requests(url, access, host=host, port=port, sink=sink, on_start=on_start))
    typer.echo(f"{out}: {made.recorded:,} requests{_left_out(made.left_out, 'requests')}")


def _record_trace(logs: list[Path], model: str | None, block_size: int, out: Path) -> None:
    log = read_log(_lines(logs), model)
    if not log.requests:
        _fail(f"no request to record{_left_out(log.left_out)}{_what_to_do(log)}")
    with out.open("wb") as sink:
        for line in trace_of(log.requests, block_size):
            sink.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
    seconds = log.requests[-1].at_seconds - log.requests[0].at_seconds
    typer.echo(f"{out}: {len(log.requests):,} requests in {seconds:,.0f} s{_left_out(log.left_out)}")


def _lines(logs: list[Path]) -> Iterator[bytes]:
    for path in logs:
        if str(path) == "-":
            yield from sys.stdin.buffer
            continue
        with path.open("rb") as file:
            yield from file


def _left_out(counts: Counter[str], what: str = "lines") -> str:
    text = ", ".join(f"{count:,} {reason}" for reason, count in counts.most_common())
    return f"; {what} left out: {text}" if text else ""


def _what_to_do(log: Log) -> str:
    return " (set server.access_log_prefixes: true)" if log.left_out["without prefix hashes"] else ""


def _fail(message: str) -> NoReturn:
    typer.echo(f"loadtest: {message}", err=True)
    raise typer.Exit(1)
