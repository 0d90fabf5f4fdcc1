"""One arm, once: started, held against the engines alone, put under the workload, stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
from rich.console import Console

from gateway.cli.demo import free_ports
from loadtest.compare.added import added_latency
from loadtest.compare.fleet import Fleet
from loadtest.compare.options import CompareOptions
from loadtest.compare.peer import Peer, Setting
from loadtest.compare.proxy import Proxy, ProxyFailed, log_end, started
from loadtest.compare.salt import passes_salt
from loadtest.compare.schema import DIRECT, Figures, Overhead, Turn
from loadtest.compare.spending import Spending
from loadtest.drive import counted
from loadtest.drive.fleet import WorkerDied
from loadtest.drive.options import RunOptions
from loadtest.drive.plan import Plan
from loadtest.drive.record import Record
from loadtest.drive.run import Order, measured
from loadtest.drive.target import Target, TargetError
from loadtest.report.files import write_results
from loadtest.report.schema import Results
from loadtest.report.statistics import value_of
from loadtest.workloads.spec import WorkloadKind, WorkloadSpec

_REQUESTS, _REQUEST_USERS = 600, 16
_STREAMS, _STREAM_USERS, _STREAM_TOKENS = 96, 32, 100
_SHORT_TOKENS = 64


@dataclass(frozen=True)
class Course:
    """What every arm is put through."""

    options: CompareOptions
    run: RunOptions
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
        return Order(plan, self.target, self.run.bounds, pages, None)


def take_turn(course: Course, peer: Peer | None, repetition: int, seed: int) -> Turn:
    """Runs an arm; None is an engine without a proxy. What fails is told in the turn."""
    name = DIRECT if peer is None else peer.name
    began = time.monotonic()
    turn = Turn(arm=name, repetition=repetition, folder=f"{name}-{repetition + 1}", seconds=0.0)
    try:
        with _running(course, peer) as proxy:
            turn = _measured(course, turn, proxy, seed)
    except ProxyFailed as error:
        turn = turn.model_copy(update={"failure": str(error), "log": error.log, "passed": False})
    except (TargetError, WorkerDied, aiohttp.ClientError, TimeoutError, OSError) as error:
        log = [] if peer is None else log_end(_log(course, peer))
        turn = turn.model_copy(update={"failure": str(error), "log": log, "passed": False})
    return turn.model_copy(update={"seconds": time.monotonic() - began})


@contextmanager
def _running(course: Course, peer: Peer | None) -> Iterator[Proxy | None]:
    if peer is None:
        yield None
        return
    log = _log(course, peer)
    folder = log.parent
    folder.mkdir(parents=True, exist_ok=True)
    port, metrics_port = free_ports(2)
    cap = course.options.max_num_seqs if course.fleet.owned is not None else None
    setting = Setting(course.fleet.urls, port, metrics_port, folder, course.model, cap)
    with started(peer, course.options.peers, setting, log, course.run.endpoint) as proxy:
        yield proxy


def _log(course: Course, peer: Peer) -> Path:
    return course.out / "proxies" / peer.name / "log.err"


def _measured(course: Course, turn: Turn, proxy: Proxy | None, seed: int) -> Turn:
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


def _overhead(course: Course, proxy: Proxy, seed: int) -> Overhead:
    fleet, endpoint = course.fleet, course.run.endpoint
    added = None
    if course.options.pairs:
        added = asyncio.run(added_latency(fleet.urls, proxy.url, endpoint, course.model, course.options.pairs))
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
        kind=kind, tail_tokens=_SHORT_TOKENS, bytes_per_token=plan.workload.bytes_per_token, max_tokens=tokens,
        seed=plan.seed,
    )  # fmt: skip
    return Plan(
        url=plan.url, endpoint=plan.endpoint, model=plan.model, stream=stream, concurrency=users, requests=requests,
        cache_salt=plan.cache_salt, timeout_seconds=plan.timeout_seconds, warmup_requests=users, workload=workload,
    )  # fmt: skip


def figures(results: Results, records: Sequence[Record], engines: list[str], spending: Spending) -> Figures:
    latency, requests = results.latency, results.requests
    by_engine = counted.of_each(results.metrics_delta, engines)
    ttft, e2e = latency.ttft_from_intended, latency.e2e_from_intended
    first = (record.first_token - record.due for record in records if record.ok and record.first_token is not None)
    pages = {page.name: page for page in results.samples.pages} if results.samples else {}
    running = [[value for value in pages[name].running if value is not None] for name in engines if name in pages]
    return Figures(
        requests=requests.offered,
        failed=requests.errors,
        first_error=next((f"{kind}: {told}" for kind, told in requests.error_examples.items()), ""),
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
