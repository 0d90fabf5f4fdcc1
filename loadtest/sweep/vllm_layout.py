"""A sweep's runs as `vllm bench sweep` lays out its own, so that its `plot` and `plot_pareto` draw them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from loadtest.report.schema import Distribution, Results
from loadtest.sweep.plan import FlagValue
from loadtest.sweep.run import Sweep


def write_vllm_layout(sweep: Sweep, folder: Path) -> None:
    """Whole runs alone: a folder with a summary.json for each configuration, workload and way."""
    for stage in (stage for stage in sweep.stages if stage.share == 1):
        for way in sweep.plan.through:
            for configuration in stage.configurations:
                runs = sweep.runs(stage, way, configuration)
                if not runs:
                    continue
                bench = {"workload": stage.workload.name, "through": way}
                records = [record(run, number, dict(configuration.flags), bench) for number, run in enumerate(runs)]
                name = sweep.store.folder_of(configuration).name
                written = folder / f"SERVE-{name}-BENCH-{stage.workload.name}-{way}"
                written.mkdir(parents=True, exist_ok=True)
                (written / "summary.json").write_bytes(orjson.dumps(records, option=orjson.OPT_INDENT_2))


def record(results: Results, number: int, flags: Mapping[str, FlagValue], bench: Mapping[str, str]) -> dict[str, Any]:
    """One run under vLLM's names; latencies count from the actual send, as there."""
    overall, tokens, latency, plan = results.overall, results.tokens, results.latency, results.plan
    seconds = overall.end - overall.start
    made: dict[str, Any] = {
        "duration": seconds,
        "completed": results.requests.succeeded,
        "failed": results.requests.failed,
        "total_input_tokens": tokens.prompt,
        "total_output_tokens": tokens.completion,
        "request_throughput": overall.requests_per_second,
        "output_throughput": tokens.completion / seconds if seconds else 0.0,
        "total_token_throughput": (tokens.prompt + tokens.completion) / seconds if seconds else 0.0,
        "max_concurrent_requests": results.concurrency.peak,
        "request_rate": plan.get("rate_per_second") or "inf",
        "model_id": plan.get("model"),
        "num_prompts": results.requests.offered,
        "date": re.sub(r"[^0-9]", "", results.environment.started_at)[:14],
    }
    if plan.get("concurrency"):
        made["max_concurrency"] = plan["concurrency"]
    for name, values in (
        ("ttft", latency.ttft), ("tpot", latency.tpot), ("itl", latency.itl), ("e2el", latency.e2e),
    ):  # fmt: skip
        made |= _latency(name, values)
    chosen = {flag.replace("-", "_"): value for flag, value in flags.items() if value is not None}
    return made | {"run_number": number} | chosen | dict(bench)


def _latency(name: str, values: Distribution | None) -> dict[str, float]:
    if values is None:
        return {}
    return {
        f"mean_{name}_ms": values.mean,
        f"median_{name}_ms": values.p50,
        **{f"p{point}_{name}_ms": getattr(values, f"p{point}") for point in (90, 95, 99)},
    }
