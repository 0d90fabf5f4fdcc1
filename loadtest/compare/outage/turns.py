"""How proxies behave while one engine is away: every proxy under every fault, in turns, and the figures."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rich.console import Console

from gateway.cli.demo import free_ports
from loadtest.compare.outage.run import OutageLoad, Reached, back_in_share_seconds, observe
from loadtest.compare.outage.schema import (
    Fault,
    Moments,
    OutageFigures,
    OutageResults,
    OutageTurn,
    Span,
    fates,
    steered_away_seconds,
)
from loadtest.compare.proxy import Peer, ProxyFailed, Setting, started
from loadtest.drive.record import Record
from loadtest.report.statistics import percentile
from loadtest.report.timeline import bucket_width
from loadtest.servers.engines import Engines
from loadtest.servers.processes import NotServing
from loadtest.vllm_cpu.process import VllmFailed
from loadtest.workloads.prompts import Endpoint

_LINE_CHARS = 160


def figures(records: Sequence[Record], moments: Moments, seen: Reached, engine: int) -> OutageFigures:
    """`engine` is the number of the one that went."""
    lost = [record for record in records if not record.ok]
    return OutageFigures(
        requests=len(records),
        fates=fates(records, moments),
        shown_as=dict(Counter(record.shown_as or record.outcome for record in lost)),
        first_error=next((_in_a_line(f"{record.outcome}: {record.detail}") for record in lost), ""),
        gone=moments.gone,
        let_back=moments.let_back,
        serving=moments.serving,
        long_wait=moments.long_wait,
        steered_away_seconds=steered_away_seconds(records, moments),
        share_seconds=back_in_share_seconds(seen, engine, moments.gone, moments.serving),
        reached_engines=seen.total(),
        ttft_p99_before=_ttft_p99_ms(records, -math.inf, moments.gone),
        ttft_p99_away=_ttft_p99_ms(records, moments.gone, moments.serving),
        ttft_p99_after=_ttft_p99_ms(records, moments.serving, math.inf),
        spans=spans(records),
    )


def _in_a_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LINE_CHARS else f"{line[:_LINE_CHARS]} …"


def _ttft_p99_ms(records: Sequence[Record], start: float, end: float) -> float | None:
    """Of the streams that were due then and answered."""
    known = sorted(
        (record.first_token - record.due) * 1e3
        for record in records
        if record.ok and record.first_token is not None and start <= record.due < end
    )
    return percentile(known, 99) if known else None


def spans(records: Sequence[Record]) -> list[Span]:
    """From the start of the load on, in equal stretches of at least a second."""
    if not records:
        return []
    last = max(record.sent for record in records)
    width = max(1.0, bucket_width(last))
    answered: Counter[int] = Counter()
    lost: Counter[int] = Counter()
    for record in records:
        (answered if record.ok else lost)[int(max(0.0, record.sent) / width)] += 1
    return [
        Span(start=number * width, answered=answered[number], lost=lost[number])
        for number in range(int(last / width) + 1)
    ]


@dataclass(frozen=True)
class OutageCourse:
    """What every proxy is put through."""

    engines: Engines
    load: OutageLoad
    endpoint: Endpoint
    peers_dir: Path
    out: Path
    console: Console


def carry_out(course: OutageCourse, peers: Sequence[Peer], repetitions: int, seed: int) -> OutageResults:
    """All turns, in another order in each repetition. Whatever is finished when the user stops it is reported."""
    rng = random.Random(f"killed-{seed}")
    turns: list[OutageTurn] = []
    for repetition in range(repetitions):
        every = list(product(peers, Fault))
        for peer, fault in rng.sample(every, len(every)):
            try:
                turn = _turn(course, peer, fault, repetition, seed)
            except KeyboardInterrupt:
                return _of(course, turns)
            turns.append(turn)
            _tell(course.console, turn, repetitions)
    return _of(course, turns)


def _of(course: OutageCourse, turns: list[OutageTurn]) -> OutageResults:
    return OutageResults(load=course.load.description(), patience_seconds=course.load.patience_seconds, turns=turns)


def _turn(course: OutageCourse, peer: Peer, fault: Fault, repetition: int, seed: int) -> OutageTurn:
    engines, load = course.engines, course.load
    turn = OutageTurn(arm=peer.name, fault=fault, repetition=repetition)
    folder = course.out / "proxies" / f"{peer.name}-{fault}"
    folder.mkdir(parents=True, exist_ok=True)
    port, metrics_port = free_ports(2)
    options = engines.options
    setting = Setting(tuple(engines.urls), port, metrics_port, folder, options.model, options.max_num_seqs)
    engine = repetition % len(engines.processes)
    plan = load.plan(setting.url, course.endpoint, options.model, seed + repetition)
    try:
        with started(peer, course.peers_dir, setting, folder / "log.err", course.endpoint) as proxy:
            found = observe(engines, load.outage(engine, fault), plan)
            proxy.check()
    except ProxyFailed as error:
        return turn.model_copy(update={"failure": str(error), "log": error.log})
    except (NotServing, VllmFailed, TimeoutError, OSError) as error:
        return turn.model_copy(update={"failure": str(error)})
    return turn.model_copy(update={"figures": figures(found.records, found.moments, found.seen, engine)})


def _tell(console: Console, turn: OutageTurn, repetitions: int) -> None:
    problem = turn.failure
    if turn.figures is not None:
        problem = f"{turn.figures.lost} of {turn.figures.requests} requests lost"
    text = f"{turn.arm}, {turn.fault}, repetition {turn.repetition + 1} of {repetitions}: {problem}"
    console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)
