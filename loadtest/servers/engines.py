"""The engines: real vLLM on this CPU or simulated ones, each on its own cores, with their counters and faults."""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

import aiohttp

from loadtest.drive import counted
from loadtest.drive.sampling import page_values
from loadtest.drive.target import counters
from loadtest.servers.processes import bound_to, free_ports
from loadtest.servers.server import Server, simulated_engine
from loadtest.vllm_cpu.process import VllmOptions, VllmProcess

_IDLE_SECONDS = 60.0
_POLL_SECONDS = 0.02
_CPU_ATTENTION_BLOCK_TOKENS = 32  # of which vLLM's blocks are multiples on a CPU


class Kind(StrEnum):
    """What the engines are."""

    VLLM = "vllm"
    SIM = "sim"


@dataclass(frozen=True)
class EngineOptions:
    """How all engines are started. `slow` is how many times slower the last one is (simulated only).

    A real engine's KV cache must hold one sequence of `max_model_len_tokens` (None = what the model can), and a block.
    """

    kind: Kind = Kind.VLLM
    count: int = 2
    model_dir: Path = Path(".models/tiny")
    _: KW_ONLY
    kv_tokens: int = 65_536
    block_tokens: int = _CPU_ATTENTION_BLOCK_TOKENS
    max_num_seqs: int = 32
    kv_events: bool = False
    slow: float = 1.0
    max_model_len_tokens: int | None = None

    @property
    def model(self) -> str:
        return self.model_dir.name

    @property
    def speeds(self) -> tuple[float, ...]:
        return (*([1.0] * (self.count - 1)), self.slow)


@dataclass
class Counted:
    """What the engines counted, summed; by engine, where one may be short of its share."""

    hit_tokens: float
    prompt_tokens: float
    preemptions: float
    _: KW_ONLY
    requests: tuple[float, ...]


class Engines:
    """All engines of a run, running."""

    def __init__(self, options: EngineOptions, processes: list[Server]) -> None:
        self.options = options
        self.processes = processes
        self._before: list[dict[str, float]] = [{} for _ in processes]
        self._lost: list[dict[str, float]] = [{} for _ in processes]

    @property
    def urls(self) -> list[str]:
        return [process.url for process in self.processes]

    @property
    def ports(self) -> tuple[int, ...]:
        """The same, as ports of 127.0.0.1."""
        return tuple(int(url.rpartition(":")[2]) for url in self.urls)

    def some(self) -> range:
        """Half of the engines, at least one: those to which faults happen."""
        return range(max(1, len(self.processes) // 2))

    async def make_cold(self) -> None:
        """Wait until nothing runs, then empty the prefix caches. Raises TimeoutError."""
        async with aiohttp.ClientSession() as session:
            for url in self.urls:
                await _until(partial(_is_idle, session, url), f"{url} becomes idle")
            for url in self.urls:
                await _until(partial(_reset, session, url), f"{url} empties its prefix cache")

    async def wipe_some(self) -> None:
        """Empty half of the prefix caches under load: what runs there begins again. Only real engines can."""
        async with aiohttp.ClientSession() as session:
            for number in self.some():
                await _reset(session, self.urls[number], reset_running_requests="true")

    async def start_counting(self) -> None:
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
        deltas = [
            {name: value - before.get(name, 0.0) + lost.get(name, 0.0) for name, value in now.items()}
            for now, before, lost in zip(await self._read(), self._before, self._lost, strict=True)
        ]
        return Counted(
            hit_tokens=sum(counted.hits(delta) for delta in deltas),
            prompt_tokens=sum(counted.looked_up(delta) for delta in deltas),
            preemptions=sum(counted.preemptions(delta) for delta in deltas),
            requests=tuple(counted.served(delta) for delta in deltas),
        )

    async def _read(self) -> list[dict[str, float]]:
        async with aiohttp.ClientSession() as session:
            return [await _counters(session, url) for url in self.urls]

    def start(self, number: int) -> None:
        """Start one, on its cores; returns at once."""
        with bound_to(cores_of(number, len(self.processes), sorted(os.sched_getaffinity(0)))):
            self.processes[number].start()

    def stop(self) -> None:
        for process in self.processes:
            process.stop()

    def restart(self, number: int) -> None:
        """Stop one engine and start it again at the same address; returns once it serves."""
        self.processes[number].stop()
        self.start(number)
        self.processes[number].wait_ready()


@contextmanager
def running_engines(options: EngineOptions, logs: Path) -> Iterator[Engines]:
    """Start them side by side; stop them however the block ends."""
    logs.mkdir(parents=True, exist_ok=True)
    processes = [_process(options, number, port, logs) for number, port in enumerate(free_ports(options.count))]
    engines = Engines(options, processes)
    with ExitStack() as stack:
        stack.callback(engines.stop)
        for number in range(options.count):
            engines.start(number)
        for process in processes:
            process.wait_ready()
        yield engines


def _process(options: EngineOptions, number: int, port: int, logs: Path) -> Server:
    log = logs / f"engine-{number}.log"
    if options.kind is Kind.SIM:
        return simulated_engine(_simulated_flags(options, options.speeds[number]), log, port)
    blocks = options.kv_tokens // options.block_tokens
    return VllmProcess(
        VllmOptions(
            options.model_dir,
            port=port,
            kv_events=options.kv_events,
            block_size_tokens=options.block_tokens,
            max_num_seqs=options.max_num_seqs,
            max_model_len_tokens=options.max_model_len_tokens,
            flags=("--num-gpu-blocks-override", str(blocks), *_flags_without_events(options)),
            environment={"VLLM_SERVER_DEV_MODE": "1"},  # for /reset_prefix_cache
        ),
        log,
    )


def _simulated_flags(options: EngineOptions, time_scale: float) -> list[str]:
    sizes = {
        "model": options.model,
        "preset": "cpu-tiny",
        "kv-tokens": options.kv_tokens,
        "block-size": options.block_tokens,
        "max-num-seqs": options.max_num_seqs,
        "max-num-batched-tokens": 2048,  # as vLLM on a CPU
        "time-scale": time_scale,
    }
    return ["--dev-mode", *(part for name, value in sizes.items() for part in (f"--{name}", str(value)))]


def _flags_without_events(options: EngineOptions) -> Sequence[str]:
    """What `VllmOptions` leaves out with the events."""
    return () if options.kv_events else ("--enable-prompt-tokens-details", "--block-size", str(options.block_tokens))


def cores_of(number: int, count: int, allowed: Sequence[int]) -> set[int]:
    """An even part of the cores for each engine, so that a busy one cannot borrow from an idle one; all, if too few."""
    share = len(allowed) // count
    return set(allowed[number * share : (number + 1) * share]) if share else set(allowed)


async def _until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + _IDLE_SECONDS
    while not await holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {_IDLE_SECONDS:g} s: {what}")
        await asyncio.sleep(_POLL_SECONDS)


async def _is_idle(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether an engine neither runs a sequence nor lets one wait, by its own account."""
    async with session.get(f"{url}/metrics") as response:
        values = page_values(await response.text())
    return values.get("running", 0.0) + values.get("waiting", 0.0) == 0.0


async def _counters(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(f"{url}/metrics") as response:
        return counters(await response.text())


async def _reset(session: aiohttp.ClientSession, url: str, **how: str) -> bool:
    """Whether the cache was emptied; a simulated engine does not report it."""
    async with session.post(f"{url}/reset_prefix_cache", params=how) as response:
        response.raise_for_status()
        body = await response.read()
    return not body or bool(json.loads(body)["success"])
