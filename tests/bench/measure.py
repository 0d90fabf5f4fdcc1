"""One proxy under load: what it spends, what it adds."""

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from pydantic import ValidationError

from loadtest.compare.proxy import Peer, started
from loadtest.servers.processes import (
    CpuTimes,
    core_busy_seconds,
    cpu_seconds_between,
    cpu_times,
    launch,
    memory_mib,
    stop,
)
from loadtest.servers.server import Launch, Server, ServerFailed, ask, get, last_line
from loadtest.workloads.prompts import Endpoint
from tests.bench.peers import setting
from tests.bench.place import Cores, Place, Ports, choose_ports
from tests.bench.results import Load, Sample, Turn
from tests.bench.scenarios import Scenario

_SCRAPE_SECONDS = 0.5


class MeasurementFailed(Exception):
    """No sample; the message says why."""


@dataclass(frozen=True)
class Bench:
    """What every measurement needs."""

    place: Place
    engines: tuple[int, ...]
    """The ports of the running mock engines."""
    cores: Cores


@contextmanager
def engines(place: Place, cores: Cores) -> Iterator[Bench]:
    ports = choose_ports()
    command = [str(place.engine), *(str(port) for port in ports.engines)]
    engine = Launch(command, ports.backends[-1], name="the mock engine", core=cores.load)
    try:
        with Server(engine, place.logs / "engine.log"):
            yield Bench(place, ports.engines, cores)
    except ServerFailed as failed:
        raise MeasurementFailed(str(failed)) from failed


def measure_turn(bench: Bench, peer: Peer, scenarios: list[Scenario]) -> Turn:
    """Start a proxy, put every load on it, stop it. What fails is in the turn, with the samples taken before."""
    log = bench.place.logs / f"{peer.name}.log"
    ports = choose_ports(bench.engines)
    samples: dict[str, Sample] = {}
    memory: float | None = None
    at = setting(bench.place, ports)
    try:
        with started(peer, bench.place.peers, at, log, Endpoint.CHAT, bench.cores.proxy) as proxy:
            for scenario in scenarios:
                samples[scenario.name] = measure(bench, ports, proxy.pid, scenario)
            memory = memory_mib(proxy.pid)
    except (MeasurementFailed, ServerFailed, OSError) as error:
        why = error.why if isinstance(error, ServerFailed) else str(error)
        return Turn(samples=samples, failure=f"{why}; its last words: {last_line(log)}")
    return Turn(samples=samples, memory_mib=memory)


def measure(bench: Bench, ports: Ports, proxy_pid: int, scenario: Scenario) -> Sample:
    """Put one load on a running proxy. Raises MeasurementFailed."""
    ask(f"{ports.backends[0]}/reset")
    with _scraping(ports.metrics) if scenario.scrapes else nullcontext():
        before, after, printed = _under_load(
            bench, scenario.arguments(bench.place, ports.proxy), proxy_pid, scenario.deadline_seconds
        )
    load = parse_load(printed)
    seconds = max(after.at - before.at, 1e-9)
    spent = cpu_seconds_between(before.proxy, after.proxy)
    stats = json.loads(get(f"{ports.backends[0]}/stats"))
    arrived = [backend["requests"] for backend in stats["backends"]]
    return Sample(
        load=load,
        paced_events_per_s=scenario.paced_events_per_s,
        proxy_cpu_seconds=spent,
        load_core_share=round((after.load_core - before.load_core) / seconds, 3),
        others_share=round(max(0.0, (after.proxy_core - before.proxy_core - spent) / seconds), 3),
        affinity=stats["affinity"],
        least_backend_share=round(min(arrived) / max(sum(arrived), 1), 3),
    )


@contextmanager
def _scraping(port: int) -> Iterator[None]:
    """Read the metrics twice a second."""
    ended = threading.Event()

    def scrape() -> None:
        while not ended.wait(_SCRAPE_SECONDS):
            get(f"http://127.0.0.1:{port}/metrics")

    with ThreadPoolExecutor(1) as pool:
        scraping = pool.submit(scrape)
        try:
            yield
        finally:
            ended.set()
        scraping.result()


def parse_load(printed: str) -> Load:
    """The load generator's line. Raises MeasurementFailed."""
    try:
        return Load.model_validate_json(printed)
    except ValidationError as error:
        raise MeasurementFailed(f"the load generator printed {printed[:200]!r}") from error


@dataclass(frozen=True)
class _Snapshot:
    at: float
    proxy: CpuTimes
    proxy_core: float
    load_core: float


def _snapshot(bench: Bench, proxy_pid: int) -> _Snapshot:
    return _Snapshot(
        at=time.monotonic(),
        proxy=cpu_times(proxy_pid),
        proxy_core=core_busy_seconds(bench.cores.proxy),
        load_core=core_busy_seconds(bench.cores.load),
    )


def _under_load(
    bench: Bench, command: list[str], proxy_pid: int, deadline_seconds: float
) -> tuple[_Snapshot, _Snapshot, str]:
    """Run the load generator; look at the proxy when its window opens and when it shuts."""
    process = launch(command, bench.cores.load, subprocess.PIPE, subprocess.PIPE)
    watchdog = threading.Timer(deadline_seconds, process.kill)
    watchdog.start()
    snapshots: dict[bytes, _Snapshot] = {}
    said = b""
    try:
        assert process.stderr is not None
        assert process.stdout is not None
        for line in process.stderr:
            if line.strip() in (b"open", b"shut"):
                snapshots[line.strip()] = _snapshot(bench, proxy_pid)
            else:
                said += line
        printed = process.stdout.read().decode()
        process.wait()
    finally:
        watchdog.cancel()
        stop(process)
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
    if len(snapshots) < 2:
        raise MeasurementFailed(f"the load generator ended with {process.returncode}: {said.decode().strip()}")
    return snapshots[b"open"], snapshots[b"shut"], printed
