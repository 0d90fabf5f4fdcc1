"""What fits on the GPUs that serve one copy of the model: weights, working memory, and the KV cache in the rest."""

from dataclasses import dataclass, replace

from gateway.plan.kv import KvLayout, Pool, layout
from gateway.plan.model_shape import ModelShape
from gateway.plan.quantization import Quantization

GIB = 1 << 30
UTILIZATION = 0.92  # vLLM's default for --gpu-memory-utilization

# Assumed, since vLLM measures it at start: what CUDA itself takes, what NCCL adds, and captured CUDA graphs.
CONTEXT_BYTES = GIB // 2
NCCL_BYTES = GIB
GRAPHS_BYTES = GIB
_LOGITS_BYTES = 8  # 32-bit logits of every sequence, and a copy for sampling


@dataclass(frozen=True, slots=True)
class Settings:
    """The engine's settings that memory depends on."""

    gpu_bytes: int
    max_length_tokens: int
    max_num_seqs: int
    batched_tokens: int
    block_tokens: int
    kv_value_bytes: float
    utilization: float = UTILIZATION
    quantization: Quantization | None = None
    weight_bytes: int | None = None  # of the checkpoint's files; None = counted from config.json
    reserve_bytes: int | None = None  # told by the operator; None = assumed


@dataclass(frozen=True, slots=True)
class Fit:
    """One engine on `tensor_parallel` GPUs. Bytes are those of each GPU."""

    tensor_parallel: int
    budget_bytes: int
    weight_bytes: int
    reserve_bytes: int
    kv_layout: KvLayout
    max_length_tokens: int
    blocks_to_start: int

    @property
    def kv_bytes(self) -> int:
        """What is left for the KV cache; below 0, the weights do not even fit."""
        return self.budget_bytes - self.weight_bytes - self.reserve_bytes

    @property
    def pool(self) -> Pool:
        """Blocks to hand out; vLLM keeps one to itself."""
        if self.kv_bytes <= 0 or not self.kv_layout.block_bytes:
            return Pool(self.kv_layout, 0)
        return Pool(self.kv_layout, max(0, self.kv_bytes // self.kv_layout.block_bytes - 1))

    @property
    def weights_fit(self) -> bool:
        """Something is left beside weights and working memory."""
        return self.kv_bytes > 0

    @property
    def starts(self) -> bool:
        """vLLM starts only if one sequence of the greatest length has room."""
        return self.weights_fit and (not self.kv_layout.groups or self.pool.blocks >= self.blocks_to_start)

    @property
    def kv_tokens(self) -> int:
        """Tokens as vLLM counts them: sequences of the greatest length, times that length."""
        if not self.kv_layout.groups:
            return 0
        return int(self.pool.blocks / self.blocks_to_start * self.max_length_tokens)


def fit(shape: ModelShape, settings: Settings, tensor_parallel: int) -> Fit:
    """Work out one engine."""
    kv_layout = layout(shape, tensor_parallel, settings.kv_value_bytes, settings.block_tokens)
    weights = weight_bytes(shape, settings)
    return Fit(
        tensor_parallel=tensor_parallel,
        budget_bytes=int(settings.gpu_bytes * settings.utilization),
        weight_bytes=-(-weights // tensor_parallel),
        reserve_bytes=assumed_reserve(shape, settings, tensor_parallel)
        if settings.reserve_bytes is None
        else settings.reserve_bytes,
        kv_layout=kv_layout,
        max_length_tokens=settings.max_length_tokens,
        blocks_to_start=kv_layout.blocks_to_start(settings.max_length_tokens, settings.batched_tokens),
    )


def weight_bytes(shape: ModelShape, settings: Settings) -> int:
    """The whole model's."""
    if settings.weight_bytes is not None:
        return settings.weight_bytes
    return shape.parameters.bytes(shape.dtype_bytes, settings.quantization)


def assumed_reserve(shape: ModelShape, settings: Settings, tensor_parallel: int) -> int:
    """Working memory: the widest layer's values for a whole batch of prompt tokens, logits, and what CUDA takes."""
    batch = settings.batched_tokens
    layer = batch * (3 * shape.intermediate // tensor_parallel + 4 * shape.hidden) * shape.dtype_bytes
    logits = 0 if shape.stored is None else settings.max_num_seqs * shape.vocabulary * _LOGITS_BYTES
    return layer + logits + CONTEXT_BYTES + GRAPHS_BYTES + (NCCL_BYTES if tensor_parallel > 1 else 0)


def longest_that_starts(shape: ModelShape, settings: Settings, tensor_parallel: int) -> int:
    """The greatest --max-model-len with which vLLM starts here; 0 = none."""
    low, high = 0, settings.max_length_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if fit(shape, replace(settings, max_length_tokens=middle), tensor_parallel).starts:
            low = middle
        else:
            high = middle - 1
    return low
