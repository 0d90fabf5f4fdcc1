"""One arm, once: start it, compare it with the engines alone, run the workload, stop it.

Measures latency added to single requests, CPU time and memory of the proxy, the CPU that other processes used,
and whether `cache_salt` is passed on: without it, an arm would hit prefixes that another arm left in the caches.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Self

import aiohttp
from rich.console import Console

from loadtest.access import Access
from loadtest.compare.fleet import Fleet
from loadtest.compare.options import CompareOptions
from loadtest.compare.proxy import Peer, Setting, started
from loadtest.compare.schema import DIRECT, Added, ArmFigures, ArmRun, Overhead
from loadtest.drive import counted
from loadtest.drive.client import Client, open_session
from loadtest.drive.counted import hits
from loadtest.drive.fleet import WorkerDied
from loadtest.drive.options import RunOptions
from loadtest.drive.plan import Plan
from loadtest.drive.record import Record
from loadtest.drive.run import Order, measured
from loadtest.drive.target import Target, TargetError, read_counters
from loadtest.report.files import write_results
from loadtest.report.schema import Results
from loadtest.report.statistics import percentile, value_of
from loadtest.servers.processes import (
    CpuTimes,
    core_busy_seconds,
    cpu_seconds_between,
    cpu_times,
    free_ports,
    memory_mib,
)
from loadtest.servers.server import Server, ServerFailed, ask
from loadtest.workloads.prompts import NO_GROUP, BodyMaker, Endpoint, Prompt, WorkloadKind, WorkloadSpec

_WARM_UPS = 4
_LOG_LINES = 8
_TIMEOUT_SECONDS = 60.0


async def added_latency(engines: Sequence[str], proxy: str, endpoint: Endpoint, model: str, pairs: int) -> Added | None:
    """Short whole answers of one token, no two at once; None where too few came."""
    bodies = BodyMaker(endpoint, model, stream=False)
    plan = Plan(
        url=proxy,
        endpoint=endpoint,
        model=model,
        stream=False,
        concurrency=1,
        requests=1,
        timeout_seconds=_TIMEOUT_SECONDS,
    )
    found: list[tuple[float, float]] = []
    async with open_session(plan) as session:
        direct = [Client(plan.model_copy(update={"url": url}), session, time.monotonic) for url in engines]
        through = Client(plan, session, time.monotonic)
        for number in range(-_WARM_UPS, pairs):
            body = bodies.body(Prompt(NO_GROUP, prefix="", tail=f"{number} is a number, and so is", max_tokens=1))
            # Who goes first changes, too: the second may find something warm.
            both = [direct[number % len(direct)], through]
            took = [await _seconds(client, body) for client in (both if number % 2 else both[::-1])]
            without, with_proxy = took if number % 2 else took[::-1]
            if number >= 0 and without is not None and with_proxy is not None:
                found.append((without, with_proxy))
    return added_of(found)


def added_of(pairs: Sequence[tuple[float, float]]) -> Added | None:
    if not pairs:
        return None
    differences = sorted((with_proxy - without) * 1e3 for without, with_proxy in pairs)
    direct = sorted(without * 1e3 for without, _ in pairs)
    return Added(
        pairs=len(pairs),
        direct_p50=percentile(direct, 50),
        p50=percentile(differences, 50),
        p99=percentile(differences, 99),
    )


async def _seconds(client: Client, body: bytes) -> float | None:
    record = Record.planned(0, NO_GROUP, time.monotonic())
    await client.send(record, body)
    return record.end - record.sent if record.ok else None


class Spending:
    """Counts inside the block. With `all_are_ours`, every process of the comparison descends from this one."""

    def __init__(self, pid: int | None, *, all_are_ours: bool = False) -> None:
        self._pid = pid
        self._all_are_ours = all_are_ours
        self._before: CpuTimes = {}
        self._ours_before: CpuTimes = {}
        self._busy_before = self._began = 0.0
        self.cpu_seconds: float | None = None
        self.memory_mib: float | None = None
        """At the end; pages that are shared count once (Pss)."""
        self.others_share: float | None = None
        """Of all cores' time."""

    def __enter__(self) -> Self:
        if self._all_are_ours:
            self._began, self._busy_before = time.monotonic(), _busy_seconds()
            self._ours_before = cpu_times(os.getpid())
        if self._pid is not None:
            self._before = cpu_times(self._pid)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pid is not None:
            self.cpu_seconds = cpu_seconds_between(self._before, cpu_times(self._pid))
            self.memory_mib = memory_mib(self._pid)
        if self._all_are_ours:
            ours = cpu_seconds_between(self._ours_before, cpu_times(os.getpid()))
            seconds = (time.monotonic() - self._began) * len(os.sched_getaffinity(0))
            self.others_share = others_share(_busy_seconds() - self._busy_before, ours, seconds)


def others_share(busy_seconds: float, ours_seconds: float, core_seconds: float) -> float:
    """What is busy beside us, of all the time that cores had."""
    return max(0.0, busy_seconds - ours_seconds) / max(core_seconds, 1e-9)


def _busy_seconds() -> float:
    return sum(core_busy_seconds(core) for core in os.sched_getaffinity(0))


_WORDS = 120  # several blocks, and shorter than any engine's longest prompt


def passes_salt(engines: Sequence[str], proxy: str, endpoint: Endpoint, model: str) -> bool | None:
    """Every engine gets a prompt by itself, then one of them the same with another salt, through the proxy.

    A hit means that the salt was lost. None where the engines cache nothing, or a server does not answer.
    """
    prompt = Prompt(
        NO_GROUP,
        prefix="",
        tail=" ".join([secrets.token_hex(8)] + [f"word{number}" for number in range(_WORDS)]),
        max_tokens=1,
    )
    first, second = (
        BodyMaker(endpoint, model, stream=False, cache_salt=secrets.token_hex(8)).body(prompt) for _ in range(2)
    )
    try:
        for url in engines:
            ask(url + endpoint.path, first)
        before = _hits(engines)
        ask(engines[0] + endpoint.path, first)
        warm = _hits(engines)
        ask(proxy + endpoint.path, second)
        after = _hits(engines)
    except (OSError, ValueError):
        return None
    return judged(before, warm, after)


def judged(before: float, warm: float, after: float) -> bool | None:
    """Of the engines' hits before and after a repetition that must hit, and after the one with another salt."""
    return None if warm <= before else after <= warm


def _hits(engines: Sequence[str]) -> float:
    return sum(hits(_read(url)) for url in engines)


def _read(url: str) -> Mapping[str, float]:
    return asyncio.run(read_counters(f"{url}/metrics", Access(), url))


_REQUESTS, _REQUEST_USERS = 600, 16
_STREAMS, _STREAM_USERS, _STREAM_TOKENS = 96, 32, 100
_SHORT_TOKENS = 64


@dataclass(frozen=True)
class Course:
    """What every arm is put through."""

    options: CompareOptions
    run: RunOptions
    _: KW_ONLY
    fleet: Fleet
    target: Target
    model: str
    out: Path
    console: Console

    def plan(self, url: str, seed: int) -> Plan:
        """The workload, with a salt of its own."""
        (load,) = self.run.loads()
        return self.run.plan(url, replace(self.target, models=[self.model]), load, seed)

    def order(self, plan: Plan, pages: Mapping[str, str]) -> Order:
        """A run that is not written by itself."""
        return Order(plan, self.target, bounds=self.run.bounds, pages=pages, out=None)


def take_turn(course: Course, peer: Peer | None, repetition: int, seed: int) -> ArmRun:
    """Runs an arm; None is an engine without a proxy. A failure is recorded in the result."""
    name = DIRECT if peer is None else peer.name
    began = time.monotonic()
    turn = ArmRun(arm=name, repetition=repetition, folder=f"{name}-{repetition + 1}", seconds=0.0)
    proxy: Server | None = None
    try:
        with _running(course, peer) as proxy:
            turn = _measured(course, turn, proxy, seed)
    except (ServerFailed, TargetError, WorkerDied, aiohttp.ClientError, TimeoutError, OSError) as error:
        log = error.log if isinstance(error, ServerFailed) else [] if proxy is None else proxy.log_end()
        why = error.why if isinstance(error, ServerFailed) else str(error)
        turn = turn.model_copy(update={"failure": why, "log": log[-_LOG_LINES:], "passed": False})
    return turn.model_copy(update={"seconds": time.monotonic() - began})


@contextmanager
def _running(course: Course, peer: Peer | None) -> Iterator[Server | None]:
    if peer is None:
        yield None
        return
    folder = course.out / "proxies" / peer.name
    folder.mkdir(parents=True, exist_ok=True)
    port, metrics_port = free_ports(2)
    cap = course.options.max_num_seqs if course.fleet.owned is not None else None
    setting = Setting(
        course.fleet.urls, port, metrics_port=metrics_port, folder=folder, model=course.model, max_num_seqs=cap
    )
    with started(
        peer, course.options.peers, setting=setting, log=folder / "log.err", endpoint=course.run.endpoint
    ) as proxy:
        yield proxy


def _measured(course: Course, turn: ArmRun, proxy: Server | None, seed: int) -> ArmRun:
    fleet, endpoint = course.fleet, course.run.endpoint
    salted = passes_salt(fleet.urls, proxy.url, endpoint, course.model) if proxy else True
    fleet.settle()
    overhead = _overhead(course, proxy, seed) if proxy else Overhead()
    fleet.settle()
    spending = Spending(proxy.pid if proxy else None, all_are_ours=fleet.owned is not None)
    plan = course.plan(proxy.url if proxy else fleet.urls[0], seed)
    results, records = measured(course.order(plan, fleet.pages), course.console, spending)
    if proxy:
        proxy.check()
    write_results(results, records, course.out / turn.folder)
    verdict = results.verdict
    return turn.model_copy(
        update={
            "overhead": overhead,
            "figures": figures(results, records, list(fleet.pages), spending),
            "passes_salt": salted,
            "valid": verdict.valid and not verdict.ended_early,
            "ended_early": verdict.ended_early,
            "passed": verdict.passed,
            "reasons": verdict.reasons,
        }
    )


def _overhead(course: Course, proxy: Server, seed: int) -> Overhead:
    fleet, endpoint = course.fleet, course.run.endpoint
    added = None
    if course.options.pairs:
        added = asyncio.run(
            added_latency(fleet.urls, proxy.url, endpoint, model=course.model, pairs=course.options.pairs)
        )
    if not course.options.measures_overhead:
        return Overhead(added=added)
    base = course.plan(proxy.url, seed)
    whole = short(base, stream=False, users=_REQUEST_USERS, requests=_REQUESTS, tokens=1)
    streams = short(base, stream=True, users=_STREAM_USERS, requests=_STREAMS, tokens=_STREAM_TOKENS)
    spent = Spending(proxy.pid)
    _, records = measured(course.order(whole, {}), course.console, spent)
    per_request = _each(spent.cpu_seconds, sum(record.ok for record in records))
    fleet.settle()
    spent = Spending(proxy.pid)
    _, records = measured(course.order(streams, {}), course.console, spent)
    per_event = _each(spent.cpu_seconds, sum(record.events for record in records))
    return Overhead(added=added, cpu_us_per_request=per_request, cpu_us_per_event=per_event)


def short(plan: Plan, *, stream: bool, users: int, requests: int, tokens: int) -> Plan:
    """The same target under a closed loop of short prompts that share nothing."""
    kind = WorkloadKind.UNIQUE
    workload = WorkloadSpec(
        kind=kind,
        tail_tokens=_SHORT_TOKENS,
        bytes_per_token=plan.workload.bytes_per_token,
        max_tokens=tokens,
        seed=plan.seed,
    )
    return Plan(
        url=plan.url,
        endpoint=plan.endpoint,
        model=plan.model,
        stream=stream,
        concurrency=users,
        requests=requests,
        cache_salt=plan.cache_salt,
        timeout_seconds=plan.timeout_seconds,
        warmup_requests=users,
        workload=workload,
    )


def figures(results: Results, records: Sequence[Record], engines: list[str], spending: Spending) -> ArmFigures:
    latency, requests = results.latency, results.requests
    by_engine = counted.of_each(results.metrics_delta, engines)
    ttft, e2e = latency.ttft_from_intended, latency.e2e_from_intended
    first = (record.first_token - record.due for record in records if record.ok and record.first_token is not None)
    pages = {page.name: page for page in results.samples.pages} if results.samples else {}
    running = [[value for value in pages[name].running if value is not None] for name in engines if name in pages]
    return ArmFigures(
        requests=requests.offered,
        failed=requests.errors,
        first_error=next((f"{kind}: {example}" for kind, example in requests.error_examples.items()), ""),
        hit_ratio=counted.hit_ratio(results.metrics_delta),
        requests_per_second=results.overall.requests_per_second,
        output_tokens_per_second=results.overall.output_tokens_per_second,
        attainment=results.slo.attainment if results.slo else None,
        ttft_p50=value_of(ttft, "p50"),
        ttft_p99=value_of(ttft, "p99"),
        tpot_p50=value_of(latency.tpot, "p50"),
        e2e_p50=value_of(e2e, "p50"),
        e2e_p99=value_of(e2e, "p99"),
        least_share=counted.least_share([counted.served(delta) for delta in by_engine]),
        peak_running=[max(values, default=None) for values in running],
        preemptions=counted.preemptions(results.metrics_delta),
        cpu_us_per_request=_each(spending.cpu_seconds, requests.succeeded + requests.failed),
        cpu_us_per_event=_each(spending.cpu_seconds, sum(record.events for record in records)),
        memory_mib=spending.memory_mib,
        others_share=spending.others_share,
        ttft_ms=[round(value * 1e3, 2) for value in first],
    )


def _each(cpu_seconds: float | None, count: int) -> float | None:
    return cpu_seconds * 1e6 / count if cpu_seconds is not None and count else None
