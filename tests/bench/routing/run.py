"""A whole run: engines, calibration, every arm in every repetition."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtest.compare.peers import OURS, version
from loadtest.servers.engines import EngineOptions, Engines, Kind, running_engines
from loadtest.workloads.prompts import BodyMaker, Endpoint
from tests.bench.machine import describe
from tests.bench.peers import PEERS
from tests.bench.place import Place
from tests.bench.routing import trace
from tests.bench.routing.arms import Arm
from tests.bench.routing.measure import Course, Fault, measure_arm
from tests.bench.routing.replay import capacity, endless, plan_for
from tests.bench.routing.results import RoutingResults, Setup, Turn
from tests.bench.routing.trace import Row
from tests.bench.routing.wording import Wording, check, words_of

_CALIBRATION_SECONDS = 16.0
_CHECKED_ROWS = 8

Say = Callable[[str], None]


@dataclass(frozen=True)
class Order:
    """A run as it was ordered. `rate` multiplies the trace's own pace; None = `load` of what the engines can."""

    engines: EngineOptions
    arms: Sequence[Arm]
    rows: Sequence[Row]
    calibration_rows: Sequence[Row]
    trace: str
    repetitions: int
    load: float
    rate: float | None
    endpoint: Endpoint
    fault: Fault
    crowd: bool
    seed: int


def carry_out(order: Order, place: Place, say: Say) -> RoutingResults:
    """Run it. Engines and routers log below the place."""
    say(f"starting {order.engines.count} engines")
    with running_engines(order.engines, place.logs) as engines:
        return asyncio.run(_carry_out(order, engines, place, say))


async def _carry_out(order: Order, engines: Engines, place: Place, say: Say) -> RoutingResults:
    words = await words_of(engines.urls[0], order.engines.model)
    longest = sorted(order.rows, key=lambda row: row.input_tokens)[-_CHECKED_ROWS:]
    await check(engines.urls[0], order.engines.model, Wording(words, "check"), longest)
    can: float | None = None
    pace = order.rate * trace.own_rate(order.rows) if order.rate is not None else 0.0
    if order.rate is None:
        can = await _capacity(order, engines, words)
        pace = order.load * can
        say(f"the engines answer {can:.1f} requests/s when always busy; the trace is replayed at {pace:.1f}")
    rows = trace.at_rate(order.rows, pace)
    if order.crowd:
        rows = trace.with_crowd(rows)
    course = Course(engines, place, rows, words, order.endpoint, order.fault)
    turns = await _all_turns(order, course, say)
    names = [OURS, *(arm.name for arm in order.arms if not arm.is_ours)]
    return RoutingResults(
        machine=describe(),
        versions={name: version(place.peers, PEERS[name]) for name in names},
        labels={arm.name: arm.label for arm in order.arms},
        setup=_setup(order, rows, pace, can),
        turns=turns,
    )


async def _capacity(order: Order, engines: Engines, words: Sequence[str]) -> float:
    """What the engines can, without a router, each request placed by chance."""
    model = order.engines.model
    requests = endless(BodyMaker(order.endpoint, model, stream=True), words, order.calibration_rows)
    plans = [plan_for(url, model, order.endpoint) for url in engines.urls]
    users = order.engines.count * order.engines.max_num_seqs
    await engines.make_cold()
    return await capacity(plans, requests, users, _CALIBRATION_SECONDS)


async def _all_turns(order: Order, course: Course, say: Say) -> dict[str, list[Turn]]:
    rng = random.Random(order.seed)
    turns: dict[str, list[Turn]] = {arm.name: [] for arm in order.arms}
    say(f"each turn takes about {course.rows[-1].at:.0f} s")
    for repetition in range(1, order.repetitions + 1):
        for arm in rng.sample(order.arms, len(order.arms)):
            turn = await measure_arm(course, arm, repetition)
            turns[arm.name].append(turn)
            say(f"repetition {repetition} of {order.repetitions}: {arm.label}: {_told(turn)}")
    return turns


def _told(turn: Turn) -> str:
    if turn.figures is None:
        return turn.failure
    figures = turn.figures
    ttft = f"{figures.ttft.mean:.0f} ms" if figures.ttft else "-"
    failed, others = sum(figures.failed.values()), figures.others_share
    return f"hit rate {figures.hit_ratio:.1%}, mean TTFT {ttft}, {failed} failed; others used {others:.0%} of the CPU"


def _setup(order: Order, rows: Sequence[Row], pace: float, can: float | None) -> Setup:
    options = order.engines
    kind = "real vLLM on the CPU" if options.kind is Kind.VLLM else "simulated engines"
    engines = f"{options.count} x {kind}" + (f", the last {options.slow:g} times slower" if options.slow != 1 else "")
    faults = {Fault.NONE: "", Fault.RESTART: "half of the engines restart at 40 % of the run"}
    faults[Fault.WIPE] = "half of the engines lose their prefix cache, unannounced, at 40 % of the run"
    told = [faults[order.fault]] if faults[order.fault] else []
    told += ["from 40 to 60 % of the run a crowd doubles the load, all with one new prefix"] if order.crowd else []
    return Setup(
        engines=engines,
        model=options.model,
        kv_tokens=options.kv_tokens,
        block_tokens=options.block_tokens,
        max_num_seqs=options.max_num_seqs,
        kv_events=options.kv_events,
        trace=order.trace,
        rows=len(rows),
        prompt_tokens=sum(row.input_tokens for row in rows),
        output_tokens=sum(row.output_tokens for row in rows),
        ideal_hit_ratio=trace.ideal_hit_ratio(rows, options.block_tokens),
        requests_per_second=pace,
        capacity=can,
        endpoint=order.endpoint.value,
        fault="; ".join(told),
    )
