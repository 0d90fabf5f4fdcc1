"""The engines: real vLLM on this CPU or simulated ones, each on its own cores, with their counters and their faults."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Protocol

import aiohttp

from loadtest.drive.target import counters
from loadtest.vllm_cpu.process import VllmOptions, VllmProcess, free_ports
from tests.bench import procs
from tests.integration.observed import engines_become_idle, eventually
from tests.integration.processes import wait_until_serving

_IDLE_SECONDS = 60.0
_CPU_ATTENTION_BLOCK_TOKENS = 32  # of which vLLM's blocks are multiples on a CPU


class Kind(StrEnum):
    """What the engines are."""

    VLLM = "vllm"
    SIM = "sim"


@dataclass(frozen=True)
class EngineOptions:
    """How all engines are started. `slow` is how many times slower the last one is (simulated only)."""

    kind: Kind = Kind.VLLM
    count: int = 2
    model_dir: Path = Path(".models/tiny")
    kv_tokens: int = 65_536
    block_tokens: int = _CPU_ATTENTION_BLOCK_TOKENS
    max_num_seqs: int = 32
    kv_events: bool = False
    slow: float = 1.0

    @property
    def model(self) -> str:
        """The served model's name."""
        return self.model_dir.name

    @property
    def speeds(self) -> tuple[float, ...]:
        """Relative times of the engines."""
        return (*([1.0] * (self.count - 1)), self.slow)


class Process(Protocol):
    """One engine's process."""

    @property
    def url(self) -> str:
        """Where it serves."""

    @property
    def pid(self) -> int:
        """The first of its processes."""

    def start(self) -> None:
        """Start it; returns at once."""

    def wait_ready(self) -> None:
        """Return once it serves."""

    def stop(self) -> None:
        """Stop it and whatever it started."""


class SimulatedProcess:
    """One `loadtest sim`."""

    def __init__(self, options: EngineOptions, port: int, time_scale: float, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        sizes = {
            "port": port,
            "kv-tokens": options.kv_tokens,
            "block-size": options.block_tokens,
            "max-num-seqs": options.max_num_seqs,
            "max-num-batched-tokens": 2048,  # as vLLM on a CPU
            "time-scale": time_scale,
        }
        names = {"model": options.model, "preset": "cpu-tiny"}
        flags = [part for name, value in {**sizes, **names}.items() for part in (f"--{name}", str(value))]
        self._command = [sys.executable, "-m", "loadtest", "sim", "--dev-mode", *flags]

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it; returns at once."""
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
            )

    def wait_ready(self) -> None:
        """Return once it serves."""
        assert self._process is not None
        wait_until_serving(self._process, f"{self.url}/health", self._log)

    def stop(self) -> None:
        """Stop it."""
        if self._process is not None:
            procs.stop(self._process)
            self._process = None


@dataclass
class Counted:
    """What the engines counted, summed; by engine, where one may be short of its share."""

    hit_tokens: float
    prompt_tokens: float
    preemptions: float
    requests: tuple[float, ...]


class Engines:
    """All engines of a run, running."""

    def __init__(self, options: EngineOptions, processes: list[Process]) -> None:
        self.options = options
        self.processes = processes
        self._before: list[dict[str, float]] = [{} for _ in processes]
        self._lost: list[dict[str, float]] = [{} for _ in processes]

    @property
    def urls(self) -> list[str]:
        """Where they serve."""
        return [process.url for process in self.processes]

    @property
    def ports(self) -> tuple[int, ...]:
        """The same, as ports of 127.0.0.1."""
        return tuple(int(url.rpartition(":")[2]) for url in self.urls)

    def some(self) -> range:
        """Half of the engines, at least one: those to which faults happen."""
        return range(max(1, len(self.processes) // 2))

    async def make_cold(self) -> None:
        """Wait until nothing runs, then empty the prefix caches."""
        await engines_become_idle(tuple(self.urls), _IDLE_SECONDS)
        async with aiohttp.ClientSession() as session:
            for url in self.urls:
                await eventually(partial(_reset, session, url), f"{url} empties its prefix cache", _IDLE_SECONDS)

    async def wipe_some(self) -> None:
        """Empty half of the prefix caches under load: what runs there begins again. Only real engines can."""
        async with aiohttp.ClientSession() as session:
            for number in self.some():
                await _reset(session, self.urls[number], reset_running_requests="true")

    async def start_counting(self) -> None:
        """Counters start at zero here."""
        self._before = await self._read()
        self._lost = [{} for _ in self.processes]

    async def note_before_restart(self, number: int) -> None:
        """An engine's counters are about to be lost: keep what they say."""
        async with aiohttp.ClientSession() as session:
            now = await _counters(session, self.urls[number])
        before = self._before[number]
        self._lost[number] = {name: value - before.get(name, 0.0) for name, value in now.items()}
        self._before[number] = {}

    async def counted(self) -> Counted:
        """What was counted since."""
        deltas = [
            {name: value - before.get(name, 0.0) + lost.get(name, 0.0) for name, value in now.items()}
            for now, before, lost in zip(await self._read(), self._before, self._lost, strict=True)
        ]
        return Counted(
            hit_tokens=sum(_total(delta, "vllm:prefix_cache_hits_total") for delta in deltas),
            prompt_tokens=sum(_total(delta, "vllm:prefix_cache_queries_total") for delta in deltas),
            preemptions=sum(_total(delta, "vllm:num_preemptions_total") for delta in deltas),
            requests=tuple(_total(delta, "vllm:request_success_total") for delta in deltas),
        )

    async def _read(self) -> list[dict[str, float]]:
        async with aiohttp.ClientSession() as session:
            return [await _counters(session, url) for url in self.urls]

    def stop(self) -> None:
        """Stop all of them."""
        for process in self.processes:
            process.stop()

    def restart(self, number: int) -> None:
        """Stop one engine and start it again at the same address; returns once it serves."""
        process = self.processes[number]
        process.stop()
        if isinstance(process, VllmProcess):
            process = self.processes[number] = VllmProcess(process.options, process.log_path)
        with on_its_cores(number, len(self.processes)):
            process.start()
        process.wait_ready()


@contextmanager
def running_engines(options: EngineOptions, logs: Path) -> Iterator[Engines]:
    """Start them side by side; stop them however the block ends."""
    logs.mkdir(parents=True, exist_ok=True)
    processes = [_process(options, number, port, logs) for number, port in enumerate(free_ports(options.count))]
    engines = Engines(options, processes)
    with ExitStack() as stack:
        stack.callback(engines.stop)
        for number, process in enumerate(processes):
            with on_its_cores(number, options.count):
                process.start()
        for process in processes:
            process.wait_ready()
        yield engines


def _process(options: EngineOptions, number: int, port: int, logs: Path) -> Process:
    log = logs / f"engine-{number}.log"
    if options.kind is Kind.SIM:
        return SimulatedProcess(options, port, options.slow if number == options.count - 1 else 1.0, log)
    blocks = options.kv_tokens // options.block_tokens
    return VllmProcess(
        VllmOptions(
            options.model_dir,
            port=port,
            kv_events=options.kv_events,
            block_size_tokens=options.block_tokens,
            max_num_seqs=options.max_num_seqs,
            flags=("--num-gpu-blocks-override", str(blocks), *_flags_without_events(options)),
            environment={"VLLM_SERVER_DEV_MODE": "1"},  # for /reset_prefix_cache
        ),
        log,
    )


def _flags_without_events(options: EngineOptions) -> Sequence[str]:
    """What `VllmOptions` leaves out with the events."""
    return () if options.kv_events else ("--enable-prompt-tokens-details", "--block-size", str(options.block_tokens))


def cores_of(number: int, count: int, allowed: Sequence[int]) -> set[int]:
    """An even part of the cores for each engine, so that a busy one cannot borrow from an idle one; all, if too few."""
    share = len(allowed) // count
    return set(allowed[number * share : (number + 1) * share]) if share else set(allowed)


@contextmanager
def on_its_cores(number: int, count: int) -> Iterator[None]:
    """What this thread starts meanwhile runs on the cores of that engine."""
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores_of(number, count, sorted(usual)))
    try:
        yield
    finally:
        os.sched_setaffinity(0, usual)


async def _counters(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(f"{url}/metrics") as response:
        return counters(await response.text())


def _total(found: dict[str, float], name: str) -> float:
    return sum(value for key, value in found.items() if key == name or key.startswith(f"{name}{{"))


async def _reset(session: aiohttp.ClientSession, url: str, **how: str) -> bool:
    """Whether the cache was emptied; a simulated engine does not tell."""
    async with session.post(f"{url}/reset_prefix_cache", params=how) as response:
        response.raise_for_status()
        body = await response.read()
    return not body or bool(json.loads(body)["success"])
