"""The command `gateway plan`: from what was typed to what is printed."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gateway.plan import checkpoint as of
from gateway.plan.advice import caps, concurrency_of, shortened, too_long, warnings
from gateway.plan.checkpoint import PlanError, read_checkpoint
from gateway.plan.document import plan_document, running_document, serve_command, shell
from gateway.plan.memory import GIB, Settings, default_block_tokens
from gateway.plan.model_shape import DTYPE_BYTES, ModelShape, read_shape
from gateway.plan.plan import TENSOR_PARALLEL, Plan, Workload, defaults, make_plan, recommended, startable_length
from gateway.plan.running import ask_running
from gateway.plan.weights import chosen

Document = dict[str, Any]
PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 256
_LARGEST_DEFAULT = 1024  # of vLLM's own for max_num_seqs


@dataclass(frozen=True, slots=True)
class Asked:
    """What was typed; None = not said."""

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
        """A running backend is meant."""
        return self.model.startswith(("http://", "https://"))

    @property
    def workload(self) -> Workload:
        """The requests that are expected."""
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


def plan_running(asked: Asked) -> Document:
    """What fits in a backend that runs. Raises PlanError."""
    running, workload = ask_running(asked.model, asked.api_key), asked.workload
    told = asked.max_num_seqs or running.max_num_seqs
    most = told or _LARGEST_DEFAULT
    fits = recommended(running.pool, workload, most)
    held = running.pool.sequences(workload.tokens, workload.shared_prefix_tokens)
    found = [*too_long(workload, running.max_length_tokens), *caps(held, fits, told, workload)]
    found += concurrency_of(workload, running.engines, fits)
    return running_document(replace(running, max_num_seqs=told), workload, found, fits)


def plan_model(asked: Asked) -> Document:
    """What a model needs, and what fits. Raises PlanError."""
    checkpoint = read_checkpoint(Path(asked.model))
    if asked.gpu_memory_gib is None:
        raise PlanError("give --gpu-memory-gib: the memory of one GPU, as nvidia-smi tells it")
    config = with_fields(checkpoint.config, asked.fields)
    shape = read_shape(config, asked.dtype)
    size, source = replace(checkpoint, config=config).weigh(shape.dtype_bytes)
    if asked.quantization != "auto":
        size, source = None, "counted from config.json"
    settings = _settings(asked, shape, size)
    plan, found = _planned(asked, shape, settings)
    command = None
    if plan.choice is not None:
        command = shell(serve_command(plan, plan.choice, checkpoint.name, asked.kv_cache_dtype, asked.quantization))
    return plan_document(plan, found, model=checkpoint.name, weights_from=source, command=command)


def _planned(asked: Asked, shape: ModelShape, settings: Settings) -> tuple[Plan, list[str]]:
    splits = _splits(asked, shape)
    plan = make_plan(shape, settings, asked.workload, asked.gpus, splits)
    if asked.max_model_len is None and (length := startable_length(plan)):
        shorter = make_plan(shape, replace(settings, max_length_tokens=length), asked.workload, asked.gpus, splits)
        return shorter, [shortened(plan, length), *warnings(shorter, asked.max_num_seqs)]
    return plan, warnings(plan, asked.max_num_seqs)


def _splits(asked: Asked, shape: ModelShape) -> tuple[int, ...]:
    told = asked.tensor_parallel
    if told is None:
        return TENSOR_PARALLEL
    if told > asked.gpus:
        raise PlanError(f"--tensor-parallel-size {told} needs as many GPUs: give --gpus {told}")
    if not shape.splits(told):
        raise PlanError(f"--tensor-parallel-size {told}: vLLM cannot split {shape.heads} attention heads like that")
    return (told,)


def with_fields(config: Document, assignments: tuple[str, ...]) -> Document:
    """The config.json with `FIELD=VALUE` of the command line, in the part that makes text. Raises PlanError."""
    told: Document = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name or not value.isascii() or not value.isdigit():
            raise PlanError(f"--set {assignment}: give a field of config.json and a number, such as head_dim=128")
        told[name] = int(value)
    return {**of.text_part(config), **_beside_text(config), **told} if told else config


def _beside_text(config: Document) -> Document:
    return {name: part for name, part in config.items() if name in ("vision_config", "audio_config")}


def _settings(asked: Asked, shape: ModelShape, size: int | None) -> Settings:
    gpu_bytes = int((asked.gpu_memory_gib or 0) * GIB)
    seqs, batched = defaults(gpu_bytes)
    quantization = chosen(asked.quantization, shape.quantization)
    length = asked.max_model_len or shape.max_length_tokens
    batched = asked.batched_tokens or batched
    return Settings(
        gpu_bytes=gpu_bytes,
        max_length_tokens=length,
        max_num_seqs=min(asked.max_num_seqs or seqs, batched),
        batched_tokens=batched,
        block_tokens=asked.block_tokens or default_block_tokens(shape),
        kv_value_bytes=_kv_value_bytes(asked.kv_cache_dtype, shape),
        utilization=asked.utilization,
        quantization=quantization,
        weight_bytes=size,
        reserve_bytes=None if asked.reserve_gib is None else int(asked.reserve_gib * GIB),
    )


def _kv_value_bytes(dtype: str, shape: ModelShape) -> float:
    if dtype == "auto":
        return 1 if shape.quantization is not None and shape.quantization.kv_cache_fp8 else shape.dtype_bytes
    return 1 if dtype == "fp8" else DTYPE_BYTES[dtype]
