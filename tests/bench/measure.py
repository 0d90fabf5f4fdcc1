"""One proxy under load: what it spends, what it adds."""

import json
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from loadtest.compare.proxy import Peer
from loadtest.servers.processes import (
    CpuTimes,
    core_busy_seconds,
    cpu_seconds_between,
    cpu_times,
    launch,
    memory_mib,
    running,
    stop,
)
from tests.bench.peers import setting
from tests.bench.place import Cores, Place, Ports, choose_ports
from tests.bench.results import Load, Sample, Turn
from tests.bench.scenarios import Scenario

_READY_SECONDS = 60
_READY_ANSWERS = 5
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


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
    """The mock engines, running."""
    ports = choose_ports()
    command = [str(place.engine), *(str(port) for port in ports.engines)]
    with running(command, cores.load, place.logs / "engine.log") as process:
        _wait_for(process, lambda: _get(f"{ports.backends[-1]}/health"), "the mock engine", answers=1)
        yield Bench(place, ports.engines, cores)


def measure_turn(bench: Bench, peer: Peer, scenarios: list[Scenario]) -> Turn:
    """Start a proxy, put every load on it, stop it. What fails is in the turn, with the samples taken before."""
    log = bench.place.logs / f"{peer.name}.log"
    ports = choose_ports(bench.engines)
    started = setting(bench.place, ports)
    samples: dict[str, Sample] = {}
    memory: float | None = None
    try:
        command = peer.command(bench.place.peers, started)
        with running(command, bench.cores.proxy, log, peer.environment(started)) as process:
            _wait_for(process, lambda: _chat(ports.proxy), peer.name, _READY_ANSWERS)
            for scenario in scenarios:
                samples[scenario.name] = measure(bench, ports, process.pid, scenario)
            memory = memory_mib(process.pid)
    except (MeasurementFailed, OSError) as error:
        return Turn(samples=samples, failure=f"{error}; its last words: {_last_line(log)}")
    return Turn(samples=samples, memory_mib=memory)


def measure(bench: Bench, ports: Ports, proxy_pid: int, scenario: Scenario) -> Sample:
    """Put one load on a running proxy. Raises MeasurementFailed."""
    _post(f"{ports.backends[0]}/reset")
    before, after, printed = _under_load(
        bench, scenario.arguments(bench.place, ports.proxy), proxy_pid, scenario.deadline_seconds
    )
    load = parse_load(printed)
    seconds = max(after.at - before.at, 1e-9)
    spent = cpu_seconds_between(before.proxy, after.proxy)
    stats = json.loads(_get(f"{ports.backends[0]}/stats"))
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


def _wait_for(process: subprocess.Popen[bytes], ask: Callable[[], object], name: str, answers: int) -> None:
    """Until a server gave some good answers."""
    deadline = time.monotonic() + _READY_SECONDS
    good = 0
    while good < answers:
        if process.poll() is not None:
            raise MeasurementFailed(f"{name} ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise MeasurementFailed(f"{name} gave no good answer in {_READY_SECONDS} s")
        try:
            ask()
            good += 1
        except (OSError, ValueError):
            time.sleep(0.1)


def _get(url: str) -> bytes:
    with _direct.open(url, timeout=5) as response:
        body: bytes = response.read()
        return body


def _post(url: str, body: bytes = b"{}") -> bytes:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with _direct.open(request, timeout=5) as response:
        answer: bytes = response.read()
        return answer


def _chat(port: int) -> None:
    chat = {"model": "mock", "messages": [{"role": "user", "content": "ready?"}]}
    answer = json.loads(_post(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(chat).encode()))
    if not answer.get("choices"):
        raise ValueError("not a chat completion")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1][:300] if lines else "none"
