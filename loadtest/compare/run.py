"""A whole comparison: engines, then every arm in every repetition, then what it comes to."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from loadtest.checkpoint.machine import environment
from loadtest.compare.fleet import Fleet, fleet
from loadtest.compare.options import CompareOptions, Killing
from loadtest.compare.outage.report import failures
from loadtest.compare.outage.schema import OutageResults
from loadtest.compare.outage.turns import OutageCourse, carry_out
from loadtest.compare.peers import OURS
from loadtest.compare.proxy import Peer
from loadtest.compare.report import reasons_of
from loadtest.compare.schema import DIRECT, ArmInfo, ArmRun, Comparison, Setup
from loadtest.compare.turn import Course, take_turn
from loadtest.drive.fleet import Stopped
from loadtest.drive.options import RunOptions
from loadtest.drive.run import title
from loadtest.drive.target import look_at
from loadtest.report.formatting import milliseconds, number, percent, seconds_text
from loadtest.report.schema import Environment
from loadtest.workloads.prompts import WITH_PREFIX, WorkloadSpec

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
    console.print(f"{'looking at' if options.backends else 'starting'} {many} engines", style="dim", highlight=False)
    with fleet(options, out / "engines") as engines:
        target = asyncio.run(look_at(engines.urls[0], None, _model(options)))
        course = Course(options, run, engines, target, _model(options) or target.models[0], out, console)
        setup = _setup(course, engines)
        here = [arm for arm in arms if not arm.missing]
        turns = [] if options.killed is Killing.ONLY else _all_turns(course, here, peers)
        killed = None
        if options.killed is not Killing.NO and not any(turn.ended_early for turn in turns):
            killed = _killed(course, engines, [peers[arm.name] for arm in here if arm.name != DIRECT])
    return compared(environment(sys.argv, began, target.server), setup, arms, turns, killed)


def compared(
    where: Environment, setup: Setup, arms: Sequence[ArmInfo], turns: list[ArmRun], killed: OutageResults | None = None
) -> Comparison:
    reasons = reasons_of(turns) + (failures(killed, OURS) if killed else [])
    if not turns and not (killed and killed.turns):
        reasons.append("nothing was measured")
    return Comparison(
        environment=where,
        setup=setup,
        arms=list(arms),
        turns=turns,
        killed=killed,
        passed=not reasons,
        reasons=reasons,
    )


def _killed(course: Course, engines: Fleet, peers: Sequence[Peer]) -> OutageResults:
    assert engines.owned is not None
    options, run = course.options, course.run
    away = OutageCourse(engines.owned, options.killed_load, run.endpoint, options.peers, course.out, course.console)
    return carry_out(away, peers, run.repeat, run.drawn_seed())


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
    orders = turn_order([arm.name for arm in arms], course.run.repeat, seed)
    turns: list[ArmRun] = []
    left = sum(map(len, orders))
    for repetition, order in enumerate(orders):
        for name in order:
            console.print(f"{name}, repetition {repetition + 1} of {len(orders)}", style="bold", highlight=False)
            began = time.monotonic()
            try:
                turn = take_turn(course, None if name == DIRECT else peers[name], repetition, seed)
            except (Stopped, KeyboardInterrupt):
                return turns
            turns.append(turn)
            left -= 1
            console.print(line(turn, left, time.monotonic() - began, turns), highlight=False, markup=False)
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
