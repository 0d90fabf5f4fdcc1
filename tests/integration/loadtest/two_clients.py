"""The load tester and vLLM's own client in turns on one engine with the same prompts, and how their figures compare."""

import asyncio
import json
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console

from loadtest.access import Access
from loadtest.drive.options import RunOptions
from loadtest.drive.plan import Plan
from loadtest.drive.run import Order, measured
from loadtest.drive.target import look_at
from loadtest.report.schema import Results
from loadtest.report.statistics import mean_interval, value_of
from loadtest.vllm_cpu.process import DEFAULT_VENV
from loadtest.workloads.prompts import Endpoint, WorkloadKind
from loadtest.workloads.sources import source_of

WITHIN = 0.03
FEWEST_PAIRS, MOST_PAIRS = 5, 12
_CLIENT = Path(__file__).with_name("vllm_client.py")
_ONE_TOKEN = " word"  # in the tokenizer of the tests' model, and as often as it is repeated


# What each is called in the results of `vllm bench serve`, and where it stands in ours; ITL is left out where a busy
# machine packed tokens.
FIGURES: Mapping[str, tuple[str, Callable[[Results], float | None]]] = {
    "TTFT p50": ("median_ttft_ms", lambda results: value_of(results.latency.ttft, "p50")),
    "TPOT p50": ("median_tpot_ms", lambda results: value_of(results.latency.tpot, "p50")),
    "ITL p50": ("median_itl_ms", lambda results: value_of(results.latency.itl, "p50")),
    "requests/s": ("request_throughput", lambda results: results.overall.requests_per_second),
    "output tokens/s": ("output_throughput", lambda results: results.overall.output_tokens_per_second),
}


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many users of an engine; an odd number of requests has its median at one of them in both clients."""

    url: str
    model: str
    users: int
    requests: int
    prompt_tokens: int
    output_tokens: int

    def options(self) -> RunOptions:
        return RunOptions(
            url=self.url,
            model=self.model,
            endpoint=Endpoint.COMPLETIONS,
            workload=WorkloadKind.UNIQUE,
            concurrency=str(self.users),
            requests=self.requests,
            tail_tokens=self.prompt_tokens,
            max_tokens=self.output_tokens,
            output_spread=0.5,
        )


@dataclass(slots=True)
class Ratios:
    """Of each figure, ours to theirs, of each pair of runs."""

    of: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in FIGURES})

    def take(self, ours: Results, theirs: Mapping[str, float]) -> None:
        for name, (their_name, figure) in FIGURES.items():
            if (value := figure(ours)) is not None:
                self.of[name].append(value / theirs[their_name])

    def are_known(self) -> bool:
        """Whether the intervals are as narrow as what they are to show."""
        intervals = [mean_interval(ratios) for ratios in self.of.values()]
        return all(interval is not None and interval[1] - interval[0] <= 2 * WITHIN for interval in intervals)

    def not_within(self) -> list[str]:
        """The figures whose median is farther from 1 than it may be, or of too few pairs."""
        return [
            name for name, ratios in self.of.items() if len(ratios) < FEWEST_PAIRS or abs(median(ratios) - 1) > WITHIN
        ]

    def certainly_beyond(self) -> list[str]:
        """Those of them that chance does not explain: the whole interval is beyond."""
        intervals = {name: mean_interval(self.of[name]) for name in self.not_within()}
        return [name for name, at in intervals.items() if at is not None and (at[0] > 1 + WITHIN or at[1] < 1 - WITHIN)]

    def __str__(self) -> str:
        return "; ".join(
            f"{name} {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} pairs)"
            for name, ratios in self.of.items()
            if ratios
        )


class VllmClient:
    """vLLM's own client, in a process that makes one run after the other."""

    def __init__(self, process: subprocess.Popen[str], tokenizer: Path, folder: Path) -> None:
        self._process = process
        self._tokenizer = tokenizer
        self._prompts = folder / "prompts.json"

    def run(self, plan: Plan) -> dict[str, float]:
        """The figures of the plan's requests, under vLLM's names."""
        prompts = [turn.prompt for index in range(plan.requests or 0) for turn in source_of(plan.workload).turns(index)]
        said = [[{"value": prompt.tail}, {"value": _ONE_TOKEN * prompt.max_tokens}] for prompt in prompts]
        self._prompts.write_text(json.dumps([{"conversations": turns} for turns in said]))
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(self._arguments(plan)) + "\n")
        self._process.stdin.flush()
        figures: dict[str, float] = json.loads(self._process.stdout.readline())
        assert figures["completed"] == plan.requests
        assert figures["total_output_tokens"] == sum(prompt.max_tokens for prompt in prompts)
        return figures

    def _arguments(self, plan: Plan) -> list[str]:
        by_name = {
            "backend": "openai",
            "base-url": plan.url,
            "endpoint": "/v1/completions",
            "model": plan.model,
            "tokenizer": str(self._tokenizer.absolute()),
            "dataset-name": "sharegpt",
            "dataset-path": str(self._prompts),
            "num-prompts": str(plan.requests),
            "max-concurrency": str(plan.concurrency),
            "temperature": "0",
            "ready-check-timeout-sec": "0",
            "num-warmups": str(plan.warmup_requests),
            "extra-body": json.dumps({"cache_salt": secrets.token_hex(8)}),
        }
        flags = ["--disable-shuffle", "--ignore-eos", "--disable-tqdm"]
        return [*flags, *(word for name, value in by_name.items() for word in (f"--{name}", value))]


@contextmanager
def vllm_client(tokenizer: Path, folder: Path) -> Iterator[VllmClient]:
    """The client for the block; what it prints goes to a log in the folder."""
    command = [str(DEFAULT_VENV.absolute() / "bin/python"), "-P", str(_CLIENT)]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    pipe, environment = subprocess.PIPE, os.environ | offline
    with (
        (folder / "vllm-client.log").open("wb") as log,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment) as process,
    ):
        try:
            yield VllmClient(process, tokenizer, folder)
        finally:
            process.terminate()


def compared(load: ClosedLoop, client: VllmClient, deadline: float) -> Ratios:
    """Runs pairs, each beginning with the other client, until the ratios are known; `deadline` is monotonic."""
    options, ratios = load.options(), Ratios()
    target, (users,) = asyncio.run(look_at(load.url, Access(), load.model)), options.loads()
    for number in range(MOST_PAIRS):
        if number >= FEWEST_PAIRS and (ratios.are_known() or time.monotonic() > deadline):
            break
        plan = options.plan(load.url, target, users, seed=number)
        order, quiet = Order(plan, target, bounds=options.bounds, pages={}, out=None), Console(quiet=True)
        if number % 2:
            theirs, (ours, _) = client.run(plan), measured(order, quiet)
        else:
            (ours, _), theirs = measured(order, quiet), client.run(plan)
        ratios.take(ours, theirs)
    return ratios
