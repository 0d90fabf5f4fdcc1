"""A whole comparison: engines, then every arm in every repetition, its outages too, then what it comes to."""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

from rich.console import Console

from loadtest.access import Access
from loadtest.checkpoint.machine import environment
from loadtest.compare.fleet import Fleet, fleet
from loadtest.compare.options import CompareOptions, Killing
from loadtest.compare.outage.report import failures
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
from loadtest.compare.peers import OURS
from loadtest.compare.proxy import Peer, Setting, started
from loadtest.compare.report import reasons_of
from loadtest.compare.schema import DIRECT, ArmInfo, ArmRun, Comparison, Setup
from loadtest.compare.turn import Course, take_turn
from loadtest.console import say
from loadtest.drive.fleet import Stopped
from loadtest.drive.options import RunOptions
from loadtest.drive.record import Record
from loadtest.drive.run import title
from loadtest.drive.target import look_at
from loadtest.report.formatting import milliseconds, number, percent, seconds_text
from loadtest.report.schema import Environment
from loadtest.report.statistics import percentile
from loadtest.report.timeline import bucket_width
from loadtest.servers.engines import Engines
from loadtest.servers.processes import free_ports
from loadtest.servers.server import ServerFailed
from loadtest.workloads.prompts import WITH_PREFIX, Endpoint, WorkloadSpec

_LINE_CHARS = 160
_LOG_LINES = 8


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
    _: KW_ONLY
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
                turn = _turn(course, peer, fault, repetition=repetition, seed=seed)
            except KeyboardInterrupt:
                return _of(course, turns)
            turns.append(turn)
            _show(course.console, turn, repetitions)
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
    setting = Setting(
        tuple(engines.urls),
        port,
        metrics_port=metrics_port,
        folder=folder,
        model=options.model,
        max_num_seqs=options.max_num_seqs,
    )
    engine = repetition % len(engines.processes)
    plan = load.plan(setting.url, course.endpoint, options.model, seed + repetition)
    try:
        with started(
            peer, course.peers_dir, setting=setting, log=folder / "log.err", endpoint=course.endpoint
        ) as proxy:
            found = observe(engines, load.outage(engine, fault), plan)
            proxy.check()
    except ServerFailed as error:
        return turn.model_copy(update={"failure": error.why, "log": error.log[-_LOG_LINES:]})
    except (TimeoutError, OSError) as error:
        return turn.model_copy(update={"failure": str(error)})
    return turn.model_copy(update={"figures": figures(found.records, found.moments, found.seen, engine)})


def _show(console: Console, turn: OutageTurn, repetitions: int) -> None:
    problem = turn.failure
    if turn.figures is not None:
        problem = f"{turn.figures.lost} of {turn.figures.requests} requests lost"
    text = f"{turn.arm}, {turn.fault}, repetition {turn.repetition + 1} of {repetitions}: {problem}"
    say(console, text, "dim")


# Apart by more than the parts of a workload, whose seeds follow each other.
_SEED_STEP = 1000


def compare(
    options: CompareOptions,
    run: RunOptions,
    arms: Sequence[ArmInfo],
    peers: dict[str, Peer],
    out: Path,
    console: Console,
) -> Comparison:
    """Carries it out. Whatever of it is finished when the user stops it is reported."""
    began = datetime.now(UTC)
    out.mkdir(parents=True, exist_ok=True)
    many = len(options.backend_urls) or options.engines
    say(console, f"{'looking at' if options.backends else 'starting'} {many} engines", "dim")
    with fleet(options, out / "engines") as engines:
        target = asyncio.run(look_at(engines.urls[0], Access(), _model(options)))
        course = Course(
            options,
            run,
            fleet=engines,
            target=target,
            model=_model(options) or target.models[0],
            out=out,
            console=console,
        )
        setup = _setup(course, engines)
        here = [arm for arm in arms if not arm.missing]
        turns = [] if options.killed is Killing.ONLY else _all_turns(course, here, peers)
        killed = None
        if options.killed is not Killing.NO and not any(turn.ended_early for turn in turns):
            killed = _killed(course, engines, [peers[arm.name] for arm in here if arm.name != DIRECT])
    return compared(environment(sys.argv, began, target.server), setup, arms, turns=turns, killed=killed)


def compared(
    where: Environment, setup: Setup, arms: Sequence[ArmInfo], turns: list[ArmRun], killed: OutageResults | None = None
) -> Comparison:
    reasons = reasons_of(turns) + (failures(killed, OURS) if killed else [])
    if not turns and not (killed and killed.turns):
        reasons.append("nothing was measured")
    return Comparison(
        environment=where, setup=setup, arms=list(arms), turns=turns, killed=killed, passed=not reasons, reasons=reasons
    )


def _killed(course: Course, engines: Fleet, peers: Sequence[Peer]) -> OutageResults:
    assert engines.owned is not None
    options, run = course.options, course.run
    away = OutageCourse(
        engines.owned,
        options.killed_load,
        endpoint=run.endpoint,
        peers_dir=options.peers,
        out=course.out,
        console=course.console,
    )
    return carry_out(away, peers, run.repetitions, run.drawn_seed())


def _model(options: CompareOptions) -> str | None:
    """The name that requests ask for; None is the first that the engines serve."""
    return options.model if options.backends is not None else options.engine_options.model


def _setup(course: Course, engines: Fleet) -> Setup:
    options, plan = course.options, course.plan(engines.urls[0], 0)
    only = options.killed is Killing.ONLY
    return Setup(
        engines=engines.description,
        engine_count=len(engines.urls),
        model=course.model,
        load=options.killed_load.description() if only else title(plan) + _sizes(plan.workload),
        owned=engines.owned is not None,
        slo=course.run.slo or "",
        plan={} if only else plan.model_dump(mode="json"),
    )


def _sizes(workload: WorkloadSpec) -> str:
    """Of its prompts, where they have a size."""
    if workload.kind not in WITH_PREFIX:
        return ""
    prefixes = f"{workload.groups} prefixes of {workload.prefix_tokens:,} tokens"
    return f" · {prefixes}, {workload.tail_tokens:,} tokens of their own, {workload.max_tokens:,} of answer"


def _all_turns(course: Course, arms: Sequence[ArmInfo], peers: dict[str, Peer]) -> list[ArmRun]:
    seed, console = course.run.drawn_seed(), course.console
    orders = turn_order([arm.name for arm in arms], course.run.repetitions, seed)
    turns: list[ArmRun] = []
    left = sum(map(len, orders))
    for repetition, order in enumerate(orders):
        for name in order:
            say(console, f"{name}, repetition {repetition + 1} of {len(orders)}", "bold")
            began = time.monotonic()
            try:
                turn = take_turn(course, None if name == DIRECT else peers[name], repetition, seed)
            except (Stopped, KeyboardInterrupt):
                return turns
            turns.append(turn)
            left -= 1
            say(console, line(turn, left, time.monotonic() - began, turns))
            if turn.ended_early:
                return turns
        seed += _SEED_STEP
    return turns


def turn_order(arms: Sequence[str], repetitions: int, seed: int) -> list[list[str]]:
    """The arms of each repetition: another one begins it, and every second goes round the other way."""
    drawn = random.Random(f"order-{seed}").sample(list(arms), len(arms))
    many, step = len(drawn), max(1, len(drawn) // max(repetitions, 1))
    return [
        [drawn[(repetition * step + (-place if repetition % 2 else place)) % many] for place in range(many)]
        for repetition in range(repetitions)
    ]


def line(turn: ArmRun, left: int, seconds: float, turns: Sequence[ArmRun]) -> str:
    """A turn in a line, with the time that the rest will take."""
    mean = sum(one.seconds for one in turns) / len(turns)
    rest = f"{left} turns, {seconds_text(mean * left)} left" if left else "the last turn"
    if turn.figures is None:
        end = "".join(f"\n    {one}" for one in turn.log)
        return f"  {turn.failure}{end}\n  after {seconds_text(seconds)}; {rest}"
    found = turn.figures
    failed = sum(found.failed.values())
    parts = [
        f"hit rate {percent(found.hit_ratio)}",
        f"TTFT p50 {milliseconds(found.ttft_p50)}",
        f"{number(found.output_tokens_per_second)} tokens/s",
        f"{failed} failed",
    ]
    return f"  {', '.join(parts)}; {rest}"
