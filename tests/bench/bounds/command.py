"""`python -m tests.bench bounds`: one row for each hostile input."""

import json
import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from gateway.config.file import parse
from loadtest.servers.processes import free_ports
from loadtest.servers.server import ServerFailed
from tests.bench.bounds.cases import CASES, MEBIBYTE, Answered, Case, Target
from tests.bench.bounds.livez import asking
from tests.bench.gateway_process import engine_process, serving, wait_until_ready

_OPEN_FILES = 16384


@dataclass(frozen=True)
class Row:
    """What one input did. `died`: the gateway ended, or did not even start."""

    name: str
    title: str
    size_bytes: int
    answered: str
    gap_seconds: float
    cpu_seconds: float
    grown_bytes: int
    held_seconds: float | None
    beyond: bool
    died: bool


def bounds(
    only: Annotated[list[str] | None, typer.Option(help="Only the input of this name; may be repeated.")] = None,
    limit_seconds: Annotated[float, typer.Option("--limit", min=1, help="Longest time that one input gets.")] = 30.0,
    as_json: Annotated[Path | None, typer.Option("--json", help="Where the rows are kept, too.")] = None,
) -> None:
    """Send every hostile input to a gateway of its own: the longest gap of others, its memory, what was held."""
    names = [case.name for case in CASES]
    if unknown := sorted(set(only or ()) - set(names)):
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(names)}", param_hint="--only")
    _allow_open_files()
    rows = []
    for case in CASES:
        if not only or case.name in only:
            rows.append(measured(case, limit_seconds))
            typer.echo(line(rows[-1]), err=True)
    if as_json is not None:
        as_json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    typer.echo(table(rows))


def measured(case: Case, limit_seconds: float) -> Row:
    """Run one input against a new gateway."""
    (events_port,) = free_ports(1)
    empty = Row(case.name, case.title, 0, "", 0.0, 0.0, 0, None, False, False)
    try:
        flags = [*(["--flaps"] if case.flaps else []), *(["--everywhere"] if case.fleet else [])]
        with engine_process(*flags) as engine:
            events = {"kv_events": {"endpoint": f"tcp://127.0.0.1:{events_port}"}}
            entry = {"url": f"http://127.0.0.1:{engine}", **events, **case.backend}
            sections = case.fleet(engine) if case.fleet else {**case.sections, "backends": [entry]}
            with serving(sections, reads_log=case.reads_log) as gateway:
                if not case.flaps and case.backends_up:
                    wait_until_ready(gateway)
                limits = parse(sections).server
                if case.fleet and case.backends_up:
                    gateway.wait_until_up(len(sections["backends"]))
                deadline = time.monotonic() + limit_seconds
                return _attacked(case, empty, Target(gateway, limits, deadline, engine, events_port))
    except (ServerFailed, OSError, ValueError) as error:
        return replace(empty, answered=f"{type(error).__name__}: {error}"[:80], died=True)


def _attacked(case: Case, empty: Row, target: Target) -> Row:
    gateway = target.gateway
    gateway.reset_peak()
    before = gateway.rss_bytes
    with asking(gateway.port, gateway.pid) as livez:
        try:
            answered = case.attack(target)
        except OSError as error:
            answered = Answered(f"{type(error).__name__}")
        gap = livez.gap()
    died = gateway.has_ended
    row = replace(
        empty,
        size_bytes=answered.size_bytes,
        answered=answered.how,
        gap_seconds=gap.seconds,
        cpu_seconds=gap.cpu_seconds,
        grown_bytes=max(0, gateway.peak_rss_bytes - before),
        held_seconds=answered.held_seconds,
        beyond=answered.beyond,
        died=died,
    )
    for peer in target.peers:
        with suppress(OSError):
            peer.close()
    return row


def table(rows: Iterable[Row]) -> str:
    return "\n".join(_lines(rows))


def _lines(rows: Iterable[Row]) -> Iterator[str]:
    yield "| input | size (MiB) | answered | longest gap of `/livez` (ms) | CPU in it (ms) | RSS (MiB) | held (s) |"
    yield "|---|--:|---|--:|--:|--:|--:|"
    yield from map(line, rows)


def line(row: Row) -> str:
    held = "" if row.held_seconds is None else f"{'> ' if row.beyond else ''}{row.held_seconds:.1f}"
    answered = f"**died** {row.answered}" if row.died else row.answered
    size = f"{row.size_bytes / MEBIBYTE:.1f}" if row.size_bytes else ""
    figures = f"{row.gap_seconds * 1000:,.0f} | {row.cpu_seconds * 1000:,.0f} | {row.grown_bytes / MEBIBYTE:+,.0f}"
    return f"| {row.title} | {size} | {answered} | {figures} | {held} |"


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
