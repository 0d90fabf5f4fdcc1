"""The command `gateway plan`: from the options to the document; the view is drawn from it.

The document has the plan for programs, vLLM's command line and the gateway's section. For a running engine, the real
figures replace the estimated ones.
"""

import asyncio
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gateway.backends.health import ProbeResult
from gateway.backends.survey import survey
from gateway.config import ConfigError
from gateway.config_file import parse
from gateway.plan import checkpoint as of
from gateway.plan.checkpoint import PlanError, read_checkpoint
from gateway.plan.memory import (
    BLOCK_TOKENS,
    GIB,
    UTILIZATION,
    BlockPool,
    KvLayout,
    Settings,
    bytes_per_sequence,
    bytes_per_token,
    default_block_tokens,
)
from gateway.plan.model_shape import DTYPE_BYTES, ModelShape, read_shape
from gateway.plan.plan import (
    KV_HEADROOM,
    TENSOR_PARALLEL,
    Plan,
    PlanOption,
    Workload,
    caps,
    concurrency_of,
    defaults,
    make_plan,
    recommended,
    rows,
    shortened,
    startable_length,
    too_long,
    warnings,
)
from gateway.plan.weights import chosen


@dataclass(frozen=True, slots=True)
class Running:
    """One backend; several engines (data-parallel ranks) have a KV cache each."""

    url: str
    model: str
    version: str | None
    max_length_tokens: int
    engines: int
    kv_tokens: int  # of one engine
    max_num_seqs: int | None  # of one engine; None = not exposed
    pool: BlockPool


def ask_running(url: str, api_key: str = "") -> Running:
    """Ask a backend once. Raises PlanError."""
    try:
        config = parse({"backends": [{"url": url, "api_key": api_key}]})
    except ConfigError as error:
        raise PlanError(str(error).splitlines()[0]) from None
    [answers] = asyncio.run(survey(config))
    facts = answers.facts
    if answers.probe is not ProbeResult.OK:
        raise PlanError(f"{url}: {answers.why_not_used}")
    if not facts.models:
        why = next(
            (str(error) for path, error in answers.problems.items() if path == "/v1/models"), "it lists no model"
        )
        raise PlanError(f"{url}: {why}" + (": give --api-key" if "401" in why else ""))
    if facts.kv_cache_tokens is None:
        raise PlanError(f"{url}/metrics does not tell the size of its KV cache: is this a vLLM server, with a decoder?")
    card = next((card for card in facts.models if card.parent is None), facts.models[0])
    if card.max_model_len is None:
        raise PlanError(f"{url}/v1/models does not tell max_model_len of {card.id}")
    block, tokens = facts.block_size_tokens or BLOCK_TOKENS, facts.kv_cache_tokens // facts.engines
    pool = BlockPool(KvLayout(block, 0, (None,)), tokens // block)
    return Running(url, card.id, facts.version, card.max_model_len, facts.engines, tokens, facts.max_num_seqs, pool)


Document = dict[str, Any]


def plan_document(plan: Plan, warnings: list[str], *, model: str, weights_from: str, command: str | None) -> Document:
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
            "layers": list(map(asdict, shape.attention)),
            "kv_heads": None if shape.stored is None else shape.stored.heads,
            "latent": shape.stored is not None and shape.stored.latent,
            "kv_bytes_per_token": bytes_per_token(shape, settings.kv_value_bytes),
            "kv_bytes_of_longest": bytes_per_sequence(shape, text, settings.kv_value_bytes),
            "max_model_len": text,
        },
        "gpus": {"count": plan.gpus, "memory_bytes": settings.gpu_bytes, "utilization": settings.utilization},
        "assumed": _assumed(plan),
        "workload": asdict(plan.workload),
        "options": [_option(option) for option in plan.options],
        "cannot_split_by": [size for size in TENSOR_PARALLEL if size <= plan.gpus and not shape.splits(size)],
        "choice": None if choice is None else choice.fit.tensor_parallel,
        "lengths": []
        if choice is None or encoder
        else list(map(asdict, rows(choice.fit.pool, text, plan.workload, choice.fit.tensor_parallel))),
        "without_paging": None if choice is None or encoder else choice.fit.kv_tokens // text,
        "block_tokens": settings.block_tokens,
        "max_num_batched_tokens": settings.batched_tokens,
        "kv_headroom": KV_HEADROOM,
        "warnings": warnings,
        "vllm": command,
        "gateway": None if choice is None else gateway_file(choice.replicas, choice.max_num_seqs),
    }


def running_document(running: Running, workload: Workload, warnings: list[str], max_num_seqs: int) -> Document:
    return {
        "model": {"name": running.model, "max_model_len": running.max_length_tokens, "version": running.version},
        "backend": {
            "url": running.url,
            "engines": running.engines,
            "kv_cache_tokens": running.kv_tokens,
            "max_num_seqs": running.max_num_seqs,
        },
        "workload": asdict(workload),
        "lengths": list(map(asdict, rows(running.pool, running.max_length_tokens, workload, None))),
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


def _option(option: PlanOption) -> Document:
    fit = option.fit
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
        "replicas": option.replicas,
        "sequences": option.sequences,
        "max_num_seqs": option.max_num_seqs,
        "fleet_sequences": option.fleet_sequences,
        "fleet_kv_tokens": option.fleet_kv_tokens,
    }


def serve_command(plan: Plan, choice: PlanOption, model: str, kv_cache_dtype: str, quantization: str) -> list[str]:
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
    if quantization == "fp8":  # other methods are applied beforehand, and found in the checkpoint
        words += ["--quantization", "fp8"]
    return [*words, "--enable-prompt-tokens-details", "--shutdown-timeout", "600"]


def shell(words: list[str]) -> str:
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return " \\\n    ".join(shlex.join(line) for line in lines)


def gateway_file(replicas: int, max_in_flight: int, url: str | None = None) -> str:
    urls = [url] if url else [f"http://HOST-{number}:8000" for number in range(1, replicas + 1)]
    lines = [f'  - {{url: "{each}", max_in_flight: {max_in_flight}}}' for each in urls]
    return "\n".join(["backends:", *lines]) + "\n"


PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 256
_LARGEST_DEFAULT = 1024  # the largest of vLLM's defaults of max_num_seqs


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The options of the command; None = not given."""

    model: str
    gpu_memory_gib: float | None
    gpus: int
    tensor_parallel: int | None
    utilization: float
    max_model_len: int | None
    dtype: str
    kv_cache_dtype: str
    quantization: str
    max_num_seqs: int | None
    batched_tokens: int | None
    block_tokens: int | None
    reserve_gib: float | None
    prompt_tokens: int | None
    output_tokens: int | None
    shared_prefix_tokens: int
    concurrency: int | None
    fields: tuple[str, ...]  # FIELD=VALUE
    api_key: str = ""

    @property
    def is_url(self) -> bool:
        return self.model.startswith(("http://", "https://"))

    @property
    def workload(self) -> Workload:
        prompt = PROMPT_TOKENS if self.prompt_tokens is None else self.prompt_tokens
        prompt = max(prompt, self.shared_prefix_tokens) if self.prompt_tokens is None else prompt
        output = OUTPUT_TOKENS if self.output_tokens is None else self.output_tokens
        assumed = self.prompt_tokens is None or self.output_tokens is None
        if self.shared_prefix_tokens > prompt:
            raise PlanError(
                "--shared-prefix-tokens is more than --prompt-tokens: the shared part belongs to the prompt"
            )
        if prompt + output < 1:
            raise PlanError("--prompt-tokens and --output-tokens are both 0: there is nothing to plan for")
        return Workload(prompt, output, self.shared_prefix_tokens, self.concurrency, assumed)


def plan_running(request: PlanRequest) -> Document:
    """What fits in a running backend. Raises PlanError."""
    running, workload = ask_running(request.model, request.api_key), request.workload
    max_num_seqs = request.max_num_seqs or running.max_num_seqs
    fits = recommended(running.pool, workload, max_num_seqs or _LARGEST_DEFAULT)
    held = running.pool.sequences(workload.tokens, workload.shared_prefix_tokens)
    found = [*too_long(workload, running.max_length_tokens), *caps(held, fits, max_num_seqs, workload)]
    found += concurrency_of(workload, running.engines, fits)
    return running_document(replace(running, max_num_seqs=max_num_seqs), workload, found, fits)


def plan_model(request: PlanRequest) -> Document:
    """What a model needs, and what fits. Raises PlanError."""
    checkpoint = read_checkpoint(Path(request.model))
    if request.gpu_memory_gib is None:
        raise PlanError("give --gpu-memory-gib: the memory of one GPU, as nvidia-smi tells it")
    config = with_fields(checkpoint.config, request.fields)
    shape = read_shape(config, request.dtype)
    size, source = replace(checkpoint, config=config).weigh(shape.dtype_bytes)
    if request.quantization != "auto":
        size, source = None, "counted from config.json"
    settings = _settings(request, shape, size)
    plan, found = _planned(request, shape, settings)
    command = None
    if plan.choice is not None:
        command = shell(serve_command(plan, plan.choice, checkpoint.name, request.kv_cache_dtype, request.quantization))
    return plan_document(plan, found, model=checkpoint.name, weights_from=source, command=command)


def _planned(request: PlanRequest, shape: ModelShape, settings: Settings) -> tuple[Plan, list[str]]:
    splits = _splits(request, shape)
    plan = make_plan(shape, settings, request.workload, request.gpus, splits)
    if request.max_model_len is None and (length := startable_length(plan)):
        shorter = make_plan(shape, replace(settings, max_length_tokens=length), request.workload, request.gpus, splits)
        return shorter, [shortened(plan, length), *warnings(shorter, request.max_num_seqs)]
    return plan, warnings(plan, request.max_num_seqs)


def _splits(request: PlanRequest, shape: ModelShape) -> tuple[int, ...]:
    size = request.tensor_parallel
    if size is None:
        return TENSOR_PARALLEL
    if size > request.gpus:
        raise PlanError(f"--tensor-parallel-size {size} needs as many GPUs: give --gpus {size}")
    if not shape.splits(size):
        raise PlanError(f"--tensor-parallel-size {size}: vLLM cannot split {shape.heads} attention heads like that")
    return (size,)


def with_fields(config: Document, assignments: tuple[str, ...]) -> Document:
    """The config.json with `FIELD=VALUE` of the command line, in the part that makes text. Raises PlanError."""
    fields: Document = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name or not value.isascii() or not value.isdigit():
            raise PlanError(f"--set {assignment}: give a field of config.json and a number, such as head_dim=128")
        fields[name] = int(value)
    other_parts = {name: part for name, part in config.items() if name in ("vision_config", "audio_config")}
    return {**of.text_part(config), **other_parts, **fields} if fields else config


def _settings(request: PlanRequest, shape: ModelShape, size: int | None) -> Settings:
    gpu_bytes = int((request.gpu_memory_gib or 0) * GIB)
    seqs, batched = defaults(gpu_bytes)
    quantization = chosen(request.quantization, shape.quantization)
    length = request.max_model_len or shape.max_length_tokens
    batched = request.batched_tokens or batched
    return Settings(
        gpu_bytes=gpu_bytes,
        max_length_tokens=length,
        max_num_seqs=min(request.max_num_seqs or seqs, batched),
        batched_tokens=batched,
        block_tokens=request.block_tokens or default_block_tokens(shape),
        kv_value_bytes=_kv_value_bytes(request.kv_cache_dtype, shape),
        utilization=request.utilization,
        quantization=quantization,
        weight_bytes=size,
        reserve_bytes=None if request.reserve_gib is None else int(request.reserve_gib * GIB),
    )


def _kv_value_bytes(dtype: str, shape: ModelShape) -> float:
    if dtype == "auto":
        return 1 if shape.quantization is not None and shape.quantization.kv_cache_fp8 else shape.dtype_bytes
    return 1 if dtype == "fp8" else DTYPE_BYTES[dtype]
