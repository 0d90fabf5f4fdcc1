"""The KV cache in blocks, as vLLM hands them out: how many there are, and how many a sequence takes."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.plan.layers import AttentionLayers
from gateway.plan.model_shape import ModelShape

BLOCK_TOKENS = 16  # vLLM's default
LATENT_BLOCK_TOKENS = 64  # what its kernels for latent vectors want
_EVEN_ENOUGH = 1.5
_BATCHES_UNDER_WAY = 2  # one is scheduled while another runs


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share one table of blocks."""

    window_tokens: int | None


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How sequences take blocks on each GPU of one engine."""

    block_tokens: int
    block_bytes: int
    groups: tuple[Group, ...]

    def blocks_for(self, tokens: int, shared_tokens: int = 0) -> int:
        """Whole blocks that one sequence of this length holds for itself, while it decodes."""
        return sum(self._blocks(group, tokens, shared_tokens) for group in self.groups)

    def shared_blocks(self, shared_tokens: int) -> int:
        """Blocks of a prefix that many sequences begin with: held once. Only whole ones are shared."""
        return sum(
            min(shared_tokens, group.window_tokens or shared_tokens) // self.block_tokens for group in self.groups
        )

    def blocks_to_start(self, tokens: int, batched_tokens: int) -> int:
        """What vLLM wants to have for one sequence: a window also holds the tokens of the batches under way."""
        return sum(self._at_most(group, tokens, batched_tokens) for group in self.groups)

    def _at_most(self, group: Group, tokens: int, batched_tokens: int) -> int:
        if group.window_tokens is None:
            return _ceil(tokens, self.block_tokens)
        held = group.window_tokens - 1 + _BATCHES_UNDER_WAY * batched_tokens
        return _ceil(min(held, tokens), self.block_tokens) + 1  # it need not begin where a block does

    def _blocks(self, group: Group, tokens: int, shared_tokens: int) -> int:
        whole, window = _ceil(tokens, self.block_tokens), group.window_tokens
        behind = 0 if window is None else max(0, tokens - window) // self.block_tokens  # dropped blocks
        shared = max(0, shared_tokens // self.block_tokens - behind)
        return max(1, whole - behind - shared)


@dataclass(frozen=True, slots=True)
class Pool:
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
    """vLLM's block size where nobody chooses one."""
    return LATENT_BLOCK_TOKENS if shape.stored is not None and shape.stored.latent else BLOCK_TOKENS


def layout(shape: ModelShape, tensor_parallel: int, value_bytes: float, block_tokens: int) -> KvLayout:
    """The layout on each GPU."""
    if shape.stored is None:
        return KvLayout(block_tokens, 0, ())
    layers_in_group, counts = _group(shape.attention)
    one_layer = shape.stored.bytes_on_gpu(tensor_parallel, value_bytes)
    groups = tuple(
        Group(kind.window_tokens) for kind, count in zip(shape.attention, counts, strict=True) for _ in range(count)
    )
    return KvLayout(block_tokens, int(block_tokens * one_layer * layers_in_group), groups)


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
