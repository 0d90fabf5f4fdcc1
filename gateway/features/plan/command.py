"""The command `gateway plan`: from its options, or from a running engine's reports, to the document to show."""

import asyncio
import shlex
from dataclasses import KW_ONLY, asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gateway.config import ConfigError
from gateway.config.file import parse
from gateway.core.backends.facts import Facts
from gateway.core.backends.health import ProbeResult
from gateway.core.backends.probe import survey
from gateway.features.plan import capacity
from gateway.features.plan.capacity import GIB, TENSOR_PARALLEL, Fit, KvCache, Plan, Settings, Workload
from gateway.features.plan.gpus import Gpu, gpu_of, preset
from gateway.features.plan.model import (
    DTYPE_BYTES,
    ModelShape,
    PlanError,
    chosen,
    read_checkpoint,
    read_shape,
    text_part,
    weigh,
)
from gateway.features.plan.roofline import BatchSpeed, Roofline, batch_curve, fleet_tokens_per_second

Document = dict[str, Any]
PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 256
_LARGEST_DEFAULT = 1024  # the largest of vLLM's defaults of max_num_seqs


def ask_running(url: str, api_key: str = "") -> Facts:
    """Ask a backend once. Raises PlanError."""
    try:
        config = parse({"backends": [{"url": url, "api_key": api_key}]})
    except ConfigError as error:
        raise PlanError(str(error).splitlines()[0]) from None
    [answers] = asyncio.run(survey(config))
    facts = answers.backend.facts
    if answers.probe is not ProbeResult.OK:
        raise PlanError(f"{url}: {answers.probe_error}")
    if not facts.models:
        why = str(answers.problems.get("/v1/models", "it lists no model"))
        raise PlanError(f"{url}: {why}" + (": give --api-key" if "401" in why else ""))
    return facts


def plan_document(plan: Plan, warnings: list[str], *, model: str, weights_from: str, command: str | None) -> Document:
    shape, settings, choice, longest = plan.shape, plan.settings, plan.choice, plan.settings.max_length_tokens
    first = plan.options[0] if plan.options else None
    cached = None if shape.stored is None else choice
    return {
        "model": {
            "name": model,
            "family": shape.family,
            "parameters": shape.parameters.total,
            "weight_bytes": first.weight_bytes * first.gpus if first else settings.weight_bytes,
            "weights_from": weights_from,
            "quantization": settings.quantization.name if settings.quantization else None,
            "dtype": shape.dtype,
            "layers": list(map(asdict, shape.attention)),
            "kv_heads": None if shape.stored is None else shape.stored.heads,
            "latent": shape.stored is not None and shape.stored.latent,
            "kv_bytes_per_token": capacity.bytes_per_sequence(shape, 1, settings.kv_value_bytes),
            "kv_bytes_of_longest": capacity.bytes_per_sequence(shape, longest, settings.kv_value_bytes),
            "max_model_len": longest,
        },
        "gpus": {"count": plan.gpus, "memory_bytes": settings.gpu_bytes, "utilization": settings.utilization},
        "assumed": _assumed(plan),
        "workload": asdict(plan.workload),
        "options": [_option(option) for option in plan.options],
        "cannot_split_by": [size for size in TENSOR_PARALLEL if size <= plan.gpus and not shape.splits(size)],
        "choice": None if choice is None else choice.tensor_parallel,
        "lengths": capacity.rows(cached.cache, longest, plan.workload, cached.gpus) if cached else [],
        "without_paging": cached.kv_tokens // longest if cached else None,
        "block_tokens": settings.block_tokens,
        "max_num_batched_tokens": settings.batched_tokens,
        "kv_headroom": capacity.KV_HEADROOM,
        "warnings": warnings,
        "vllm": command,
        "gateway": None if choice is None else gateway_file(choice.replicas, choice.max_num_seqs),
    }


def running_document(url: str, facts: Facts, workload: Workload, given_max_num_seqs: int | None) -> Document:
    """The capacity of a running backend; each engine has a KV cache. A given value has precedence. Raises PlanError."""
    if facts.kv_cache_tokens is None:
        raise PlanError(f"{url}/metrics does not tell the size of its KV cache: is this a vLLM server, with a decoder?")
    card = next((card for card in facts.models if card.parent is None), facts.models[0])
    if (longest := card.max_model_len) is None:
        raise PlanError(f"{url}/v1/models does not tell max_model_len of {card.id}")
    block, tokens = facts.block_size_tokens or capacity.BLOCK_TOKENS, facts.kv_cache_tokens // facts.engines
    cache, slots = KvCache(block, 0, (None,), blocks=tokens // block), given_max_num_seqs or facts.max_num_seqs
    fits = capacity.recommended(cache, workload, slots or _LARGEST_DEFAULT)
    held = cache.sequences(workload.tokens, workload.shared_prefix_tokens)
    return {
        "model": {"name": card.id, "max_model_len": longest, "version": facts.version},
        "backend": {"url": url, "engines": facts.engines, "kv_cache_tokens": tokens, "max_num_seqs": slots},
        "workload": asdict(workload),
        "lengths": capacity.rows(cache, longest, workload, None),
        "without_paging": tokens // longest,
        "block_tokens": block,
        "kv_headroom": capacity.KV_HEADROOM,
        "max_num_seqs": fits,
        "warnings": list(capacity.advice(workload, longest, held=held, fits=fits, given=slots, backends=facts.engines)),
        "gateway": gateway_file(1, fits * facts.engines, url),
    }


def _assumed(plan: Plan) -> list[str]:
    settings, shape = plan.settings, plan.shape
    counted, packed = settings.weight_bytes is None, settings.quantization
    unknown = packed.name if packed is not None and packed.bits is None else None
    found = {
        "working memory (--reserve-gib sets it)": settings.reserve_bytes is None,
        "weights, counted from config.json": counted,
        "no weights for what sees or hears": shape.has_other_parts and counted,
        f"weights as if unpacked: {unknown} is not known": unknown is not None,
        "lengths of requests (--prompt-tokens, --output-tokens)": plan.workload.assumed and shape.stored is not None,
    }
    return [text for text, is_assumed in found.items() if is_assumed]


def _option(fit: Fit) -> Document:
    return {
        "tensor_parallel": fit.tensor_parallel,
        "pipeline_parallel": fit.pipeline_parallel,
        "starts": fit.starts,
        "gpu_bytes": {
            "budget": fit.budget_bytes,
            "weights": fit.weight_bytes,
            "reserve": fit.reserve_bytes,
            "kv_cache": max(0, fit.kv_bytes),
        },
        "blocks": fit.cache.blocks,
        "kv_tokens": fit.kv_tokens,
        "replicas": fit.replicas,
        "sequences": fit.sequences,
        "max_num_seqs": fit.max_num_seqs,
        "fleet_sequences": fit.fleet_sequences,
        "fleet_kv_tokens": fit.replicas * fit.kv_tokens,
    }


def serve_command(plan: Plan, choice: Fit, model: str, kv_cache_dtype: str, quantization: str) -> str:
    """For a shell, with an option in each line."""
    settings, words = plan.settings, [["vllm", "serve", model]]
    if choice.tensor_parallel > 1:
        words.append(["--tensor-parallel-size", str(choice.tensor_parallel)])
    if choice.pipeline_parallel > 1:
        words.append(["--pipeline-parallel-size", str(choice.pipeline_parallel)])
    words += [["--max-num-seqs", str(choice.max_num_seqs)], ["--max-model-len", str(settings.max_length_tokens)]]
    if settings.utilization != capacity.UTILIZATION:
        words.append(["--gpu-memory-utilization", f"{settings.utilization:g}"])
    if settings.block_tokens != capacity.default_block_tokens(plan.shape):
        words.append(["--block-size", str(settings.block_tokens)])
    if kv_cache_dtype != "auto":
        words.append(["--kv-cache-dtype", kv_cache_dtype])
    if quantization == "fp8":  # other methods are applied beforehand, and found in the checkpoint
        words.append(["--quantization", "fp8"])
    words += [["--enable-prompt-tokens-details"], ["--shutdown-timeout", "600"]]
    return " \\\n    ".join(map(shlex.join, words))


def gateway_file(replicas: int, max_in_flight: int, url: str | None = None) -> str:
    urls = [url] if url else [f"http://HOST-{number}:8000" for number in range(1, replicas + 1)]
    lines = [f'  - {{url: "{each}", max_in_flight: {max_in_flight}}}' for each in urls]
    return "\n".join(["backends:", *lines]) + "\n"


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The options of the command that are of vLLM and its GPUs; None = not given."""

    model: str
    _: KW_ONLY
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
    fields: tuple[str, ...]  # FIELD=VALUE
    preset: str | None = None  # a model known by name, instead of `model`
    gpu: str | None = None
    pipeline_parallel: int = 1


def workload_of(prompt: int | None, output: int | None, shared_prefix: int, concurrency: int | None) -> Workload:
    """The expected requests, in tokens; None = not given. Raises PlanError."""
    assumed = prompt is None or output is None
    prompt = max(PROMPT_TOKENS, shared_prefix) if prompt is None else prompt
    output = OUTPUT_TOKENS if output is None else output
    if shared_prefix > prompt:
        raise PlanError("--shared-prefix-tokens is more than --prompt-tokens: the shared part belongs to the prompt")
    if prompt + output < 1:
        raise PlanError("--prompt-tokens and --output-tokens are both 0: there is nothing to plan for")
    return Workload(prompt, output, shared_prefix, concurrency=concurrency, assumed=assumed)


def plan_model(request: PlanRequest, workload: Workload) -> Document:
    """A model's memory, and the requests that fit. Raises PlanError."""
    gpu = None if request.gpu is None else gpu_of(request.gpu)
    name, config = _model(request)
    memory = request.gpu_memory_gib or (gpu.memory_gib if gpu else None)
    if memory is None:
        raise PlanError("give --gpu-memory-gib, the memory of one GPU as nvidia-smi shows it, or --gpu, such as h100")
    config = with_fields(config, request.fields)
    shape = read_shape(config, request.dtype)
    size, source = None, "counted from config.json"
    if request.preset is None and request.quantization == "auto":
        size, source = weigh(Path(request.model), config, shape.dtype_bytes)
    settings = _settings(request, shape, int(memory * GIB), weight_bytes=size, gpu=gpu)
    make = partial(capacity.make_plan, shape, workload=workload, gpus=request.gpus, splits=_splits(request, shape))
    plan, found = make(settings), []
    if request.max_model_len is None and (length := capacity.startable_length(plan)):
        found.append(capacity.shortened(plan, length))
        plan = make(replace(settings, max_length_tokens=length))
    found += capacity.warnings(plan, request.max_num_seqs)
    best = plan.choice
    command = (
        None
        if best is None
        else serve_command(plan, best, name, kv_cache_dtype=request.kv_cache_dtype, quantization=request.quantization)
    )
    document = plan_document(plan, found, model=name, weights_from=source, command=command)
    return document if gpu is None or shape.stored is None else _with_speeds(document, plan, gpu)


def _model(request: PlanRequest) -> tuple[str, Document]:
    if request.preset is not None:
        if request.model:
            raise PlanError(f"give MODEL or --preset {request.preset}, not both")
        config = dict(preset(request.preset))
        return str(config["_name_or_path"]), config
    if not request.model:
        raise PlanError("give a model: its folder, its config.json, a backend's URL, or --preset with a name")
    return read_checkpoint(Path(request.model))


def _with_speeds(document: Document, plan: Plan, gpu: Gpu) -> Document:
    """The document with tokens per second of each option, and by batch of the chosen one."""
    curve: list[BatchSpeed] = []
    for shown, option in zip(document["options"], plan.options, strict=True):
        line = Roofline(
            plan.shape,
            plan.settings,
            gpu,
            tensor_parallel=option.tensor_parallel,
            pipeline_parallel=option.pipeline_parallel,
        )
        if option.starts:
            shown["fleet_tokens_per_second"] = round(fleet_tokens_per_second(line, option, plan.workload), 1)
        if option is plan.choice:
            curve = batch_curve(line, option, plan.workload)
    return {**document, "gpu": gpu.name, "batches": list(map(asdict, curve))}


def _splits(request: PlanRequest, shape: ModelShape) -> tuple[int, ...]:
    size = request.tensor_parallel
    if size is None:
        return TENSOR_PARALLEL
    needed = size * request.pipeline_parallel
    if needed > request.gpus:
        raise PlanError(f"--tensor-parallel-size {size} needs as many GPUs: give --gpus {needed}")
    if not shape.splits(size):
        raise PlanError(f"--tensor-parallel-size {size}: vLLM cannot split {shape.heads} attention heads like that")
    return (size,)


def _stages(request: PlanRequest, shape: ModelShape) -> int:
    stages = request.pipeline_parallel
    if stages > request.gpus:
        raise PlanError(f"--pipeline-parallel-size {stages} needs as many GPUs: give --gpus {stages}")
    if stages > shape.layers:
        raise PlanError(f"--pipeline-parallel-size {stages} is more than the model's {shape.layers} layers")
    return stages


def with_fields(config: Document, assignments: tuple[str, ...]) -> Document:
    """The config.json with `FIELD=VALUE` of the command line, in the part that makes text. Raises PlanError."""
    fields: Document = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name or not value.isascii() or not value.isdigit():
            raise PlanError(f"--set {assignment}: give a field of config.json and a number, such as head_dim=128")
        fields[name] = int(value)
    other_parts = {name: part for name, part in config.items() if name in ("vision_config", "audio_config")}
    return {**text_part(config), **other_parts, **fields} if fields else config


def _settings(
    request: PlanRequest, shape: ModelShape, gpu_bytes: int, weight_bytes: int | None, gpu: Gpu | None
) -> Settings:
    seqs, batched = capacity.defaults(0 if gpu is not None and gpu.has_small_defaults else gpu_bytes)
    batched, kv_dtype = request.batched_tokens or batched, request.kv_cache_dtype
    if kv_dtype == "auto":
        keeps_fp8 = shape.quantization is not None and shape.quantization.kv_cache_fp8
        kv_dtype = "fp8" if keeps_fp8 else shape.dtype
    return Settings(
        gpu_bytes=gpu_bytes,
        max_length_tokens=request.max_model_len or shape.max_length_tokens,
        max_num_seqs=min(request.max_num_seqs or seqs, batched),
        batched_tokens=batched,
        block_tokens=request.block_tokens or capacity.default_block_tokens(shape),
        kv_value_bytes=1 if kv_dtype == "fp8" else DTYPE_BYTES[kv_dtype],
        utilization=request.utilization,
        quantization=chosen(request.quantization, shape.quantization),
        weight_bytes=weight_bytes,
        reserve_bytes=None if request.reserve_gib is None else int(request.reserve_gib * GIB),
        pipeline_parallel=_stages(request, shape),
    )
