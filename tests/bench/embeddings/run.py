"""One engine, reached directly, through a gateway that sends each request as it came, and through one that batches."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from loadtest.console import markdown_table
from loadtest.report.statistics import percentile
from loadtest.servers.processes import cpu_seconds_between, cpu_times
from loadtest.servers.server import Server, gateway_server, simulated_engine
from loadtest.vllm_cpu.process import VllmOptions, VllmProcess
from tests.bench.embeddings.load import apply, bodies

_GATEWAYS: dict[str, dict[str, Any]] = {
    "not batching": {"coalesce": False},
    "batching": {},
}
ARMS = ("direct", *_GATEWAYS)
_FIGURES = ("per_second", "p50_ms", "p99_ms", "engine_cpu_ms", "gateway_cpu_ms")
_WARM_UP_SECONDS = 3.0
# As fast as a GPU embeds with a model of some hundred million parameters; its API server takes the CPU that vLLM 0.32's
# was seen to take with 64 texts of 4 words at once: 0.9 ms each in requests of their own, 0.26 ms each in one request.
_LIKE_A_GPU = (
    "--embedding",
    "--preset",
    "h100-8b",
    "--time-scale",
    "0.25",
    "--api-request-seconds",
    "0.0005",
    "--api-input-seconds",
    "0.00015",
)


@dataclass(frozen=True)
class Options:
    """What is compared, and how."""

    engine: str
    model_dir: Path
    clients: tuple[int, ...]
    words: int
    encoding: str
    seconds: float
    repetitions: int
    logs: Path

    def requests(self, seed: int) -> Iterator[bytes]:
        return bodies(self.model, self.words, self.encoding, seed)

    @property
    def model(self) -> str:
        """The name that clients ask for."""
        return self.model_dir.name


@dataclass(frozen=True)
class Sample:
    """One arm under one load, once."""

    arm: str
    clients: int
    per_second: float
    p50_ms: float
    p99_ms: float
    engine_cpu_ms: float  # for each input
    gateway_cpu_ms: float


def engine(options: Options) -> Server:
    log = options.logs / "engine.log"
    if options.engine == "vllm":
        return VllmProcess(VllmOptions(options.model_dir, kv_events=False, max_num_seqs=256), log)
    return simulated_engine(["--model", options.model, *_LIKE_A_GPU], log)


def gateway(options: Options, backend: str, name: str) -> Server:
    """A gateway before the engine, not started yet."""
    config = {
        "server": {"access_log": False},
        "backends": [{"url": backend}],
        "health": {"slow_start_seconds": 0},
        "embeddings": _GATEWAYS[name],
    }
    return gateway_server(config, options.logs / f"{name.replace(' ', '-')}.log")


def compare(options: Options, say: Callable[[str], None]) -> list[Sample]:
    """Every arm under every load, in turn, again and again."""
    options.logs.mkdir(parents=True, exist_ok=True)
    samples: list[Sample] = []
    with ExitStack() as stack:
        direct = stack.enter_context(engine(options))
        arms = {"direct": direct}
        for name in _GATEWAYS:
            arms[name] = stack.enter_context(gateway(options, direct.url, name))
        for arm in arms.values():
            apply(arm.url, options.requests(0), 32, _WARM_UP_SECONDS)
        for repetition in range(options.repetitions):
            order = random.Random(repetition).sample(list(arms), len(arms))
            for clients in options.clients:
                for name in order:
                    samples.append(_measured(options, arms, name, clients, repetition + 1))
                    say(f"{repetition + 1}/{options.repetitions} {samples[-1]}")
    return samples


def _measured(options: Options, arms: Mapping[str, Server], name: str, clients: int, seed: int) -> Sample:
    direct, arm = arms["direct"], arms[name]
    before = {each.pid: cpu_times(each.pid) for each in (direct, arm)}
    answers = apply(arm.url, options.requests(seed), clients, options.seconds)
    spent = {pid: cpu_seconds_between(times, cpu_times(pid)) for pid, times in before.items()}
    count, ordered = answers.all, sorted(answers.latencies)
    return Sample(
        name,
        clients,
        answers.per_second,
        percentile(ordered, 50) * 1000,
        percentile(ordered, 99) * 1000,
        spent[direct.pid] / count * 1000,
        0.0 if arm is direct else spent[arm.pid] / count * 1000,
    )


def arms_in(samples: Sequence[Sample]) -> list[str]:
    return [arm for arm in ARMS if any(sample.arm == arm for sample in samples)]


def middle(samples: Sequence[Sample], arm: str, clients: int, figure: str) -> float:
    """The median of a figure over the repetitions."""
    return median(getattr(sample, figure) for sample in samples if (sample.arm, sample.clients) == (arm, clients))


_HEAD = (*("clients", "way", "requests/s", "p50 ms", "p99 ms"), "engine CPU ms per input", "gateway CPU ms per input")


def table(samples: Sequence[Sample]) -> str:
    rows = []
    for clients in dict.fromkeys(sample.clients for sample in samples):
        for arm in arms_in(samples):
            rate, p50, p99, engine, gateway = (middle(samples, arm, clients, figure) for figure in _FIGURES)
            rows.append(
                [str(clients), arm, f"{rate:.0f}", f"{p50:.2f}", f"{p99:.1f}", f"{engine:.2f}", f"{gateway:.3f}"]
            )
    return markdown_table(_HEAD, rows, texts=2)
