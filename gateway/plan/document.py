"""A plan as a document for programs, with vLLM's command line and the gateway's section; the view is drawn from it."""

import shlex
from typing import Any

from gateway.plan.memory import UTILIZATION, BlockPool, Fit, bytes_per_sequence, bytes_per_token, default_block_tokens
from gateway.plan.plan import KV_HEADROOM, TENSOR_PARALLEL, Plan, PlanOption, Workload, rows
from gateway.plan.running import Running

Document = dict[str, Any]


def plan_document(plan: Plan, warnings: list[str], *, model: str, weights_from: str, command: str | None) -> Document:
    """Everything that was worked out."""
    shape, settings, choice = plan.shape, plan.settings, plan.choice
    text = settings.max_length_tokens
    encoder = shape.stored is None
    return {
        "model": {
            "name": model,
            "family": shape.family,
            "parameters": shape.parameters.total,
            "weight_bytes": plan.options[0].fit.weight_bytes * plan.options[0].fit.tensor_parallel
            if plan.options
            else settings.weight_bytes,
            "weights_from": weights_from,
            "quantization": settings.quantization.name if settings.quantization else None,
            "dtype": shape.dtype,
            "layers": [{"count": kind.count, "window_tokens": kind.window_tokens} for kind in shape.attention],
            "kv_heads": None if encoder or shape.stored is None else shape.stored.heads,
            "latent": shape.stored is not None and shape.stored.latent,
            "kv_bytes_per_token": bytes_per_token(shape, settings.kv_value_bytes),
            "kv_bytes_of_longest": bytes_per_sequence(shape, text, settings.kv_value_bytes),
            "max_model_len": text,
        },
        "gpus": {"count": plan.gpus, "memory_bytes": settings.gpu_bytes, "utilization": settings.utilization},
        "assumed": _assumed(plan),
        "workload": _workload(plan.workload),
        "options": [_option(option) for option in plan.options],
        "cannot_split_by": [size for size in TENSOR_PARALLEL if size <= plan.gpus and not shape.splits(size)],
        "choice": None if choice is None else choice.fit.tensor_parallel,
        "lengths": []
        if choice is None or encoder
        else _lengths(choice.fit.pool, text, plan.workload, choice.fit.tensor_parallel),
        "without_paging": None if choice is None or encoder else choice.fit.kv_tokens // text,
        "block_tokens": settings.block_tokens,
        "max_num_batched_tokens": settings.batched_tokens,
        "kv_headroom": KV_HEADROOM,
        "warnings": warnings,
        "vllm": command,
        "gateway": None if choice is None else gateway_file(choice.replicas, choice.max_num_seqs),
    }


def running_document(running: Running, workload: Workload, warnings: list[str], max_num_seqs: int) -> Document:
    """The same of a backend that runs: nothing is assumed but the requests."""
    return {
        "model": {"name": running.model, "max_model_len": running.max_length_tokens, "version": running.version},
        "backend": {
            "url": running.url,
            "engines": running.engines,
            "kv_cache_tokens": running.kv_tokens,
            "max_num_seqs": running.max_num_seqs,
        },
        "workload": _workload(workload),
        "lengths": _lengths(running.pool, running.max_length_tokens, workload, None),
        "without_paging": running.kv_tokens // running.max_length_tokens,
        "block_tokens": running.pool.layout.block_tokens,
        "kv_headroom": KV_HEADROOM,
        "max_num_seqs": max_num_seqs,
        "warnings": warnings,
        "gateway": gateway_file(1, max_num_seqs * running.engines, running.url),
    }


def _assumed(plan: Plan) -> list[str]:
    found = []
    if plan.settings.reserve_bytes is None:
        found.append("working memory (--reserve-gib tells it)")
    if plan.settings.weight_bytes is None:
        found.append("weights, counted from config.json")
    if plan.shape.has_other_parts and plan.settings.weight_bytes is None:
        found.append("no weights for what sees or hears")
    if plan.settings.quantization is not None and not plan.settings.quantization.known:
        found.append(f"weights as if unpacked: {plan.settings.quantization.name} is not known")
    if plan.workload.assumed and plan.shape.stored is not None:
        found.append("lengths of requests (--prompt-tokens, --output-tokens)")
    return found


def _workload(workload: Workload) -> Document:
    return {
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "shared_prefix_tokens": workload.shared_prefix_tokens,
        "concurrency": workload.concurrency,
        "assumed": workload.assumed,
    }


def _option(option: PlanOption) -> Document:
    return {
        **_fit(option.fit),
        "replicas": option.replicas,
        "sequences": option.sequences,
        "max_num_seqs": option.max_num_seqs,
        "fleet_sequences": option.fleet_sequences,
        "fleet_kv_tokens": option.fleet_kv_tokens,
    }


def _fit(fit: Fit) -> Document:
    return {
        "tensor_parallel": fit.tensor_parallel,
        "starts": fit.starts,
        "gpu_bytes": {
            "budget": fit.budget_bytes,
            "weights": fit.weight_bytes,
            "reserve": fit.reserve_bytes,
            "kv_cache": max(0, fit.kv_bytes),
        },
        "blocks": fit.pool.blocks,
        "kv_tokens": fit.kv_tokens,
    }


def _lengths(pool: BlockPool, longest: int, workload: Workload, gpus: int | None) -> list[Document]:
    return [
        {"tokens": row.tokens, "sequences": row.sequences, "kv_bytes": row.kv_bytes, "is_workload": row.is_workload}
        for row in rows(pool, longest, workload, gpus)
    ]


def serve_command(plan: Plan, choice: PlanOption, model: str, kv_cache_dtype: str, quantization: str) -> list[str]:
    """The arguments of one backend."""
    settings, words = plan.settings, ["vllm", "serve", model]
    if choice.fit.tensor_parallel > 1:
        words += ["--tensor-parallel-size", str(choice.fit.tensor_parallel)]
    words += ["--max-num-seqs", str(choice.max_num_seqs), "--max-model-len", str(settings.max_length_tokens)]
    if settings.utilization != UTILIZATION:
        words += ["--gpu-memory-utilization", f"{settings.utilization:g}"]
    if settings.block_tokens != default_block_tokens(plan.shape):
        words += ["--block-size", str(settings.block_tokens)]
    if kv_cache_dtype != "auto":
        words += ["--kv-cache-dtype", kv_cache_dtype]
    if quantization == "fp8":  # the others are made beforehand, and found in the checkpoint
        words += ["--quantization", "fp8"]
    return [*words, "--enable-prompt-tokens-details", "--shutdown-timeout", "600"]


def shell(words: list[str]) -> str:
    """The command for a shell, an option a line."""
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return " \\\n    ".join(shlex.join(line) for line in lines)


def gateway_file(replicas: int, max_in_flight: int, url: str | None = None) -> str:
    """The section of the gateway's file."""
    urls = [url] if url else [f"http://HOST-{number}:8000" for number in range(1, replicas + 1)]
    lines = [f'  - {{url: "{each}", max_in_flight: {max_in_flight}}}' for each in urls]
    return "\n".join(["backends:", *lines]) + "\n"
