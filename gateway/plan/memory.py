"""What fits on the GPUs that serve one copy of the model: weights, working memory, and the KV cache in the rest.

The KV cache is counted in blocks, as vLLM allocates them: how many there are, and how many a sequence takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.plan.model_shape import AttentionLayers, ModelShape
from gateway.plan.weights import Quantization

BLOCK_TOKENS = 16  # vLLM's default
LATENT_BLOCK_TOKENS = 64  # what its kernels for latent vectors want
_EVEN_ENOUGH = 1.5
_BATCHES_UNDER_WAY = 2  # one is scheduled while another runs

GIB = 1 << 30
UTILIZATION = 0.92  # vLLM's default for --gpu-memory-utilization

# Assumed, since vLLM measures it at start: what CUDA itself takes, what NCCL adds, and captured CUDA graphs.
CONTEXT_BYTES = GIB // 2
NCCL_BYTES = GIB
GRAPHS_BYTES = GIB
_LOGITS_BYTES = 8  # 32-bit logits of every sequence, and a copy for sampling


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How sequences take blocks on each GPU of one engine."""

    block_tokens: int
    block_bytes: int
    groups: tuple[int | None, ...]  # layers that share a table of blocks, by their window in tokens; None = all

    def blocks_for(self, tokens: int, shared_tokens: int = 0) -> int:
        """Blocks that one sequence of this length holds for itself, while it decodes."""
        return sum(self._blocks(window, tokens, shared_tokens) for window in self.groups)

    def shared_blocks(self, shared_tokens: int) -> int:
        """Blocks of a prefix that many sequences begin with: held once. Only whole ones are shared."""
        return sum(min(shared_tokens, window or shared_tokens) // self.block_tokens for window in self.groups)

    def blocks_to_start(self, tokens: int, batched_tokens: int) -> int:
        """Blocks that vLLM requires for one sequence: a window also holds the tokens of the batches in progress."""
        return sum(self._at_most(window, tokens, batched_tokens) for window in self.groups)

    def _at_most(self, window: int | None, tokens: int, batched_tokens: int) -> int:
        if window is None:
            return _ceil(tokens, self.block_tokens)
        held = window - 1 + _BATCHES_UNDER_WAY * batched_tokens
        return _ceil(min(held, tokens), self.block_tokens) + 1  # it need not begin where a block does

    def _blocks(self, window: int | None, tokens: int, shared_tokens: int) -> int:
        behind = 0 if window is None else max(0, tokens - window) // self.block_tokens  # dropped blocks
        shared = max(0, shared_tokens // self.block_tokens - behind)
        return max(1, _ceil(tokens, self.block_tokens) - behind - shared)


@dataclass(frozen=True, slots=True)
class BlockPool:
    """The blocks of one engine."""

    layout: KvLayout
    blocks: int

    def sequences(self, tokens: int, shared_tokens: int = 0, share: float = 1.0) -> int:
        """How many of this length are held at once in this share of the blocks."""
        if not self.layout.groups:
            return 0
        shared = min(shared_tokens, tokens)
        free = int(self.blocks * share) - self.layout.shared_blocks(shared)
        return max(0, free // self.layout.blocks_for(tokens, shared))


def default_block_tokens(shape: ModelShape) -> int:
    return LATENT_BLOCK_TOKENS if shape.stored is not None and shape.stored.latent else BLOCK_TOKENS


def layout(shape: ModelShape, tensor_parallel: int, value_bytes: float, block_tokens: int) -> KvLayout:
    if shape.stored is None:
        return KvLayout(block_tokens, 0, ())
    layers_in_group, counts = _group(shape.attention)
    one_layer = shape.stored.bytes_on_gpu(tensor_parallel, value_bytes)
    groups = [kind.window_tokens for kind, count in zip(shape.attention, counts, strict=True) for _ in range(count)]
    return KvLayout(block_tokens, int(block_tokens * one_layer * layers_in_group), tuple(groups))


def bytes_per_token(shape: ModelShape, value_bytes: float) -> int:
    """What all layers store for a token that all of them see, on one GPU that holds the whole model."""
    return 0 if shape.stored is None else int(shape.layers * shape.stored.bytes_on_gpu(1, value_bytes))


def bytes_per_sequence(shape: ModelShape, tokens: int, value_bytes: float) -> int:
    """What a sequence of this length stores: of a window, no more than the window."""
    if shape.stored is None:
        return 0
    one = shape.stored.bytes_on_gpu(1, value_bytes)
    return int(sum(kind.count * min(tokens, kind.window_tokens or tokens) for kind in shape.attention) * one)


def _group(kinds: Sequence[AttentionLayers]) -> tuple[int, list[int]]:
    """vLLM's rule: groups of as many layers as the rarest kind has, or as the commonest if these are close."""
    fewest, most = min(kind.count for kind in kinds), max(kind.count for kind in kinds)
    size = most if most < fewest * _EVEN_ENOUGH else fewest
    return size, [_ceil(kind.count, size) for kind in kinds]


def _ceil(number: int, size: int) -> int:
    return -(-number // size)


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
    reserve_bytes: int | None = None  # set by the operator; None = assumed


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
    def pool(self) -> BlockPool:
        """Blocks to hand out; vLLM keeps one to itself."""
        if self.kv_bytes <= 0 or not self.kv_layout.block_bytes:
            return BlockPool(self.kv_layout, 0)
        return BlockPool(self.kv_layout, max(0, self.kv_bytes // self.kv_layout.block_bytes - 1))

    @property
    def weights_fit(self) -> bool:
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
