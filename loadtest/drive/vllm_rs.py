"""vLLM's own Rust client on the same requests, to check our figures against."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from loadtest.drive.plan import Arrivals, Plan
from loadtest.report.schema import CrossCheck, Distribution, Pair, Results
from loadtest.workloads.body import Endpoint
from loadtest.workloads.prompts import Prompt
from loadtest.workloads.sources import source_of
from loadtest.workloads.spec import WorkloadKind

_PERCENTILES = "50,95"
_LAST_LINES = 5
_APART = 1.25
_RATES = ("requests_per_second", "output_tokens_per_second")


class NoClient(Exception):
    """vLLM's client cannot be used for this run; the message says why and what to do."""


def find_client() -> Path:
    """On the PATH, or inside an installed vLLM. Raises NoClient."""
    if (found := shutil.which("vllm-rs")) is not None:
        return Path(found)
    package = importlib.util.find_spec("vllm")
    inside = Path(package.origin).with_name("vllm-rs") if package is not None and package.origin else None
    if inside is not None and inside.exists():
        return inside
    raise NoClient(
        "--driver vllm-rs: not found; vLLM's wheels for GPUs have it as vllm/vllm-rs (0.33): put it on the PATH"
    )


def check_plan(plan: Plan) -> None:
    """Raises NoClient for what vLLM's client cannot repeat."""
    if plan.endpoint is Endpoint.EMBEDDINGS or not plan.stream or plan.mix:
        raise NoClient("--driver vllm-rs: only for streams of chat or completions, without --mix")
    if plan.workload.kind in (WorkloadKind.SESSIONS, WorkloadKind.TRACE) or plan.ramp_seconds is not None:
        raise NoClient("--driver vllm-rs: only for single questions at one load: no sessions, traces or ramps")


def cross_check(client: Path, plan: Plan, results: Results, tokenizer: str | None) -> CrossCheck:
    """Sends as many of the same prompts at the same load, with a salt of their own. Raises NoClient where it fails."""
    requests = results.requests.offered - results.requests.interrupted
    with tempfile.TemporaryDirectory(prefix="vllm-rs-") as folder:
        dataset = Path(folder) / "prompts.jsonl"
        source = source_of(plan.workload)
        prompts = (turn.prompt for index in range(requests) for turn in islice(source.turns(index), 1))
        dataset.write_bytes(b"".join(_line(prompt) for prompt in prompts))
        command = command_for(client, plan, dataset, requests, tokenizer)
        _run(command, plan.api_key)
        theirs = orjson.loads((Path(folder) / "result.json").read_bytes())
    return CrossCheck(client=client.name, failed=theirs["failed"], figures=pairs_of(results, theirs))


def command_for(client: Path, plan: Plan, dataset: Path, requests: int, tokenizer: str | None) -> list[str]:
    """The command line that repeats the plan, and writes result.json beside the dataset."""
    body = dict(plan.extra_body) | ({"cache_salt": f"{plan.cache_salt}-vllm-rs"} if plan.cache_salt else {})
    chat = plan.endpoint is Endpoint.CHAT
    command = [
        str(client), "bench", "serve", "--backend", "openai-chat" if chat else "openai", "--base-url", plan.url,
        "--model", plan.model, "--tokenizer", tokenizer or plan.model, "--dataset-name", "custom",
        "--dataset-path", str(dataset), "--custom-output-len", "-1", "--num-prompts", str(requests),
        "--disable-shuffle", "--no-oversample", "--temperature", "0", "--extra-body", orjson.dumps(body).decode(),
        "--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", _PERCENTILES, "--disable-tqdm",
        "--save-result", "--result-dir", str(dataset.parent), "--result-filename", "result.json",
    ]  # fmt: skip
    command += ["--ignore-eos"] if plan.ignore_eos else []
    if plan.concurrency is not None:
        return [*command, "--max-concurrency", str(plan.concurrency)]
    even = {Arrivals.POISSON: "1", Arrivals.CONSTANT: "inf", Arrivals.GAMMA: f"{plan.burstiness:g}"}
    return [*command, "--request-rate", f"{plan.rate_per_second:g}", "--burstiness", even[plan.arrivals]]


def pairs_of(results: Results, theirs: dict[str, Any]) -> dict[str, Pair]:
    """Our figure and theirs. Their latencies count from the actual send, so ours do here as well."""
    latency = results.latency
    pairs = {
        "requests_per_second": (results.overall.requests_per_second, theirs["request_throughput"]),
        "output_tokens_per_second": (results.overall.output_tokens_per_second, theirs["output_throughput"]),
    }
    for name, key, ours in (
        ("ttft", "ttft", latency.ttft),
        ("tpot", "tpot", latency.tpot),
        ("e2e", "e2el", latency.e2e),
    ):
        if ours is not None:
            pairs |= _latencies(name, ours, theirs, key)
    return {name: Pair(ours=ours, theirs=other) for name, (ours, other) in pairs.items()}


def with_check(results: Results, check: CrossCheck) -> Results:
    """The results with the check, and a warning for each figure that the two clients do not agree on."""
    # An open loop's rate is its arrivals', which the other client draws anew.
    compared = ("ttft_p50", "tpot_p50", "e2e_p50", *(_RATES if results.plan.get("concurrency") else ()))
    warnings = [
        f"{check.client} measured {name.replace('_', ' ')} {pair.theirs:.4g}, this client {pair.ours:.4g}: "
        "one of them, or the server's pace, is not to be trusted"
        for name, pair in check.figures.items()
        if name in compared and max(pair.ours, pair.theirs) > _APART * min(pair.ours, pair.theirs)
    ]
    verdict = results.verdict.model_copy(update={"warnings": [*results.verdict.warnings, *warnings]})
    return results.model_copy(update={"cross_check": check, "verdict": verdict})


def _latencies(name: str, ours: Distribution, theirs: dict[str, Any], key: str) -> dict[str, tuple[float, float]]:
    return {
        f"{name}_p50": (ours.p50, theirs[f"p50_{key}_ms"]),
        f"{name}_p95": (ours.p95, theirs[f"p95_{key}_ms"]),
    }


def _line(prompt: Prompt) -> bytes:
    asked = {"prompt": prompt.prefix + prompt.tail, "output_tokens": prompt.max_tokens}
    return orjson.dumps(asked, option=orjson.OPT_APPEND_NEWLINE)


def _run(command: Iterable[str], api_key: str | None) -> None:
    environment = os.environ | ({"OPENAI_API_KEY": api_key} if api_key else {})
    ended = subprocess.run(list(command), env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        told = " ".join((ended.stderr + ended.stdout).strip().splitlines()[-_LAST_LINES:])
        raise NoClient(f"vllm-rs ended with {ended.returncode}: {told}")
