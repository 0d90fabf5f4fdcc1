"""One engine, reached directly, through a gateway that sends each request as it came, and through one that batches.

Where texts repeat: also through one that caches embeddings.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from gateway.cli.demo import free_ports
from loadtest.servers.processes import cpu_seconds_between, cpu_times, running
from loadtest.vllm_cpu.process import VllmOptions, VllmProcess
from tests.bench.embeddings.load import apply, bodies
from tests.integration.processes import wait_until_serving

_GATEWAYS: dict[str, dict[str, Any]] = {
    "not batching": {"coalesce": False}, "batching": {}, "caching": {"cache_bytes": 100_000_000}
}  # fmt: skip
ARMS = ("direct", *_GATEWAYS)
_FIGURES = ("per_second", "p50_ms", "p99_ms", "engine_cpu_ms", "gateway_cpu_ms")
_WARM_UP_SECONDS = 3.0
# As fast as a GPU embeds with a model of some hundred million parameters; its API server takes the CPU that vLLM 0.32's
# was seen to take with 64 texts of 4 words at once: 0.9 ms each in requests of their own, 0.26 ms each in one request.
_LIKE_A_GPU = (
    "--embedding", "--preset", "h100-8b", "--time-scale", "0.25",
    "--api-request-seconds", "0.0005", "--api-input-seconds", "0.00015",
)  # fmt: skip


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
    texts: int = 0  # different ones; 0 = none comes again

    @property
    def gateways(self) -> tuple[str, ...]:
        """What is compared with the engine alone."""
        return ("batching", "caching") if self.texts else ("not batching", "batching")

    def requests(self, seed: int) -> Iterator[bytes]:
        """What clients ask."""
        return bodies(self.model, self.words, self.encoding, seed, self.texts)

    @property
    def model(self) -> str:
        """The name that clients ask for."""
        return self.model_dir.name


@dataclass(frozen=True)
class Server:
    """Something that answers embeddings requests. `pid` is 0 where nothing is between client and engine."""

    name: str
    url: str
    pid: int = 0


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


@contextmanager
def engine(options: Options) -> Iterator[Server]:
    """The engine, running."""
    if options.engine == "vllm":
        chosen = VllmOptions(options.model_dir, kv_events=False, max_num_seqs=256)
        with VllmProcess(chosen, options.logs / "engine.log") as process:
            yield Server("direct", process.url, process.pid)
        return
    [port] = free_ports(1)
    command = [sys.executable, "-m", "loadtest", "sim", "--port", str(port), "--model", options.model, *_LIKE_A_GPU]
    with running(command, None, options.logs / "engine.log") as process:
        url = f"http://127.0.0.1:{port}"
        wait_until_serving(process, f"{url}/health", options.logs / "engine.log")
        yield Server("direct", url, process.pid)


@contextmanager
def gateway(options: Options, backend: str, name: str) -> Iterator[Server]:
    """A gateway before the engine."""
    port = free_ports(1)[0]
    config = {
        "server": {"host": "127.0.0.1", "port": port, "admin": None, "access_log": False, "drain_delay_seconds": 0},
        "backends": [{"url": backend}],
        "health": {"slow_start_seconds": 0},
        "embeddings": _GATEWAYS[name],
    }
    file = options.logs / f"{name.replace(' ', '-')}.yaml"
    file.write_text(yaml.safe_dump(config))
    log = file.with_suffix(".log")
    with running([sys.executable, "-m", "gateway", "serve", "-c", str(file)], None, log) as process:
        url = f"http://127.0.0.1:{port}"
        wait_until_serving(process, f"{url}/readyz", log)
        yield Server(name, url, process.pid)


def compare(options: Options, say: Callable[[str], None]) -> list[Sample]:
    """Every arm under every load, in turn, again and again."""
    options.logs.mkdir(parents=True, exist_ok=True)
    samples: list[Sample] = []
    with ExitStack() as stack:
        direct = stack.enter_context(engine(options))
        arms = [direct, *(stack.enter_context(gateway(options, direct.url, each)) for each in options.gateways)]
        for arm in arms:
            apply(arm.url, options.requests(0), 32, _WARM_UP_SECONDS)
        for repetition in range(options.repetitions):
            order = random.Random(repetition).sample(arms, len(arms))
            for clients in options.clients:
                for arm in order:
                    samples.append(_measured(options, direct, arm, clients, repetition + 1))
                    say(f"{repetition + 1}/{options.repetitions} {samples[-1]}")
    return samples


def _measured(options: Options, direct: Server, arm: Server, clients: int, seed: int) -> Sample:
    before = {each.pid: cpu_times(each.pid) for each in (direct, arm)}
    answers = apply(arm.url, options.requests(seed), clients, options.seconds)
    spent = {pid: cpu_seconds_between(times, cpu_times(pid)) for pid, times in before.items()}
    count = answers.all
    return Sample(
        arm.name,
        clients,
        answers.per_second,
        answers.quantile(0.5) * 1000,
        answers.quantile(0.99) * 1000,
        spent[direct.pid] / count * 1000,
        0.0 if arm is direct else spent[arm.pid] / count * 1000,
    )


def arms_in(samples: Sequence[Sample]) -> list[str]:
    """Those that were measured."""
    return [arm for arm in ARMS if any(sample.arm == arm for sample in samples)]


def middle(samples: Sequence[Sample], arm: str, clients: int, figure: str) -> float:
    """The median of a figure over the repetitions."""
    return median(getattr(sample, figure) for sample in samples if (sample.arm, sample.clients) == (arm, clients))


def table(samples: Sequence[Sample]) -> str:
    """Medians over the repetitions."""
    lines = [
        "| clients | way | requests/s | p50 ms | p99 ms | engine CPU ms per input | gateway CPU ms per input |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for clients in dict.fromkeys(sample.clients for sample in samples):
        for arm in arms_in(samples):
            rate, p50, p99, engine, gateway = (middle(samples, arm, clients, figure) for figure in _FIGURES)
            lines.append(f"| {clients} | {arm} | {rate:.0f} | {p50:.2f} | {p99:.1f} | {engine:.2f} | {gateway:.3f} |")
    return "\n".join(lines)
