"""One arm, once: a cold start, the trace, and what came of it."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from loadtest.drive.client import Client, open_session
from loadtest.drive.record import Record
from loadtest.report.statistics import distribution_ms, percentile
from loadtest.servers.engines import Counted, Engines
from loadtest.servers.server import Server, ServerFailed, last_line
from loadtest.workloads.prompts import NO_GROUP, BodyMaker, Endpoint, Prompt
from tests.bench.place import Place, choose_ports
from tests.bench.routing.arms import Arm
from tests.bench.routing.fidelity import fidelity, predictions, recovery
from tests.bench.routing.replay import bodies_of, plan_for, replay
from tests.bench.routing.results import Fidelity, Figures, Recovery, Turn
from tests.bench.routing.spent import Spent, between, snapshot
from tests.bench.routing.trace import Row
from tests.bench.routing.wording import Wording
from tests.integration.observed import eventually

_FAULT_AT = 0.4
_READY_SECONDS = 60.0
_LOG_SECONDS = 5.0
_WARM_UPS = 12
_WARM_UP_TOKENS = 200


class Fault(StrEnum):
    """What happens to half of the engines at 40 % of the run."""

    NONE = "none"
    RESTART = "restart"
    WIPE = "wipe"


class ArmFailed(Exception):
    """No figures; the message says why."""


@dataclass(frozen=True)
class Course:
    """What every arm is put through."""

    engines: Engines
    place: Place
    rows: Sequence[Row]
    words: Sequence[str]
    endpoint: Endpoint
    fault: Fault

    @property
    def body_maker(self) -> BodyMaker:
        """Makes the requests; greedy and of a fixed length, so that all arms decode the same tokens."""
        return BodyMaker(endpoint=self.endpoint, model=self.engines.options.model, stream=True)


@dataclass
class _Observed:
    records: list[Record]
    log: bytes
    counted: Counted
    started: float
    """Unix time, as the next."""
    fault_at: float | None
    spent: Spent


async def measure_arm(course: Course, arm: Arm, repetition: int) -> Turn:
    """Start the arm, replay the trace through it, stop it. What fails is told in the turn."""
    log = course.place.logs / f"{arm.name}.log"
    try:
        found = await _observe(course, arm, Wording(course.words, f"{arm.name}-{repetition}"), log)
    except (ArmFailed, ServerFailed, OSError, AssertionError) as error:
        why = error.why if isinstance(error, ServerFailed) else str(error)
        return Turn(repetition=repetition, failure=f"{why}; its last words: {last_line(log)}")
    good = [record for record in found.records if record.ok]
    first = [(record.first_token - record.due) * 1e3 for record in good if record.first_token is not None]
    return Turn(
        repetition=repetition,
        figures=_figures(course, arm, found),
        ttft_ms=tuple(round(value, 2) for value in first),
        e2e_ms=tuple(round((record.end - record.due) * 1e3, 2) for record in good),
    )


async def _observe(course: Course, arm: Arm, wording: Wording, log: Path) -> _Observed:
    engines = course.engines
    ports = choose_ports(engines.ports)
    plan = plan_for(f"http://127.0.0.1:{ports.proxy}", engines.options.model, course.endpoint)
    bodies = bodies_of(course.body_maker, wording, course.rows)
    fault_at: list[float] = []

    async def fault() -> None:
        if course.fault is not Fault.NONE:
            fault_at.append(_unix_seconds())
        if course.fault is Fault.RESTART:
            await asyncio.gather(*(_restart(engines, number) for number in engines.some()))
        elif course.fault is Fault.WIPE:
            await engines.wipe_some()

    router = arm.server(course.place, ports, engines.options)
    router.start()
    try:
        await _warm_up(router, course, wording)
        await engines.make_cold()
        await engines.start_counting()
        engine_pids = [engine.pid for engine in engines.processes]
        before, started = snapshot(router.pid, engine_pids), _unix_seconds()
        records = await replay(plan, course.rows, bodies, _FAULT_AT * course.rows[-1].at, fault)
        spent = between(before, snapshot(router.pid, engine_pids))
        counted = await engines.counted()
        printed = await _access_log(log.with_suffix(".out"), records) if arm.is_ours else b""
    finally:
        router.stop()
    return _Observed(records, printed, counted, started, fault_at[0] if fault_at else None, spent)


async def _restart(engines: Engines, number: int) -> None:
    await engines.note_before_restart(number)
    await asyncio.to_thread(engines.restart, number)


async def _warm_up(router: Server, course: Course, wording: Wording) -> None:
    """Until the router answers, then some requests more: connections are open, and what learns has a first idea."""
    row = Row(0.0, (), _WARM_UP_TOKENS, 4)
    plan = plan_for(router.url, course.engines.options.model, course.endpoint)
    deadline = time.monotonic() + _READY_SECONDS
    answered = tried = 0
    async with open_session(plan) as session:
        client = Client(plan, session, time.monotonic)
        while answered < _WARM_UPS:
            router.check()
            if time.monotonic() > deadline:
                raise ArmFailed(f"it gave no good answer in {_READY_SECONDS:g} s")
            record = Record.planned(tried, NO_GROUP, time.monotonic(), asked_tokens=row.output_tokens)
            text = wording.warm_up(tried, row.tail_tokens)
            await client.send(
                record, course.body_maker.body(Prompt(NO_GROUP, prefix="", tail=text, max_tokens=row.output_tokens))
            )
            tried += 1
            if record.ok:
                answered += 1
            else:
                await asyncio.sleep(0.2)


async def _access_log(path: Path, records: Sequence[Record]) -> bytes:
    """What the gateway printed, once it has a line for every request that was answered."""
    answered = sum(record.ok for record in records)

    async def whole() -> bool:
        return _printed(path).count(b'"outcome":"completed"') >= answered + _WARM_UPS

    await eventually(whole, f"a line for each of {answered} requests in {path}", _LOG_SECONDS)
    return _printed(path)


def _printed(path: Path) -> bytes:
    return path.read_bytes()


def _figures(course: Course, arm: Arm, found: _Observed) -> Figures:
    records, counted = found.records, found.counted
    good = [record for record in records if record.ok]
    failed = Counter(record.outcome for record in records if not record.ok)
    seconds = max(record.end for record in records) - min(record.due for record in records)
    late = sorted((record.sent - record.intended) * 1e3 for record in records)
    fidelity_found, recovery_found = _known(course, arm, found)
    return Figures(
        requests=len(records),
        failed=dict(failed),
        first_error=next((f"{record.outcome}: {record.detail}" for record in records if not record.ok), ""),
        seconds=seconds,
        hit_ratio=counted.hit_tokens / max(counted.prompt_tokens, 1.0),
        prompt_tokens=counted.prompt_tokens,
        preemptions=counted.preemptions,
        least_share=min(counted.requests) * len(counted.requests) / max(sum(counted.requests), 1.0),
        output_tokens_per_second=sum(record.completion_tokens or 0 for record in good) / seconds,
        ttft=distribution_ms([record.first_token - record.due for record in good if record.first_token is not None]),
        tpot=distribution_ms([told for record in good if (told := record.tpot_seconds) is not None]),
        e2e=distribution_ms([record.end - record.due for record in good]),
        wrong_lengths=sum(record.completion_tokens != record.asked_tokens for record in good),
        late_ms=percentile(late, 99),
        router_cpu_ms=found.spent.router_seconds * 1e3 / len(records),
        others_share=found.spent.others_share if course.fault is not Fault.RESTART else 0.0,
        fidelity=fidelity_found,
        recovery=recovery_found,
    )


def _known(course: Course, arm: Arm, found: _Observed) -> tuple[Fidelity | None, Recovery | None]:
    """How well the gateway predicted; nothing of others."""
    if not arm.predicts:
        return None, None
    made = predictions(found.log, found.started)
    engines = course.engines
    faulty = [urlsplit(engines.urls[number]).netloc for number in engines.some()]
    return fidelity(made), None if found.fault_at is None else recovery(made, faulty, found.fault_at)


def _unix_seconds() -> float:
    return time.time_ns() / 1e9
