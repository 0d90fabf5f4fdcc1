"""The plan: every way to use the GPUs, the one to take, and what to know about it."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.plan.memory import GIB, BlockPool, Fit, Settings, fit, longest_that_starts
from gateway.plan.model_shape import ModelShape

TENSOR_PARALLEL = (1, 2, 4, 8)
KV_HEADROOM = 0.95  # the default of `admission.kv_headroom`: what the gateway reserves of a KV cache
_STEP_TOKENS = 1024
_LENGTHS = (512, 2048, 8192, 32768, 131072)
# vLLM's defaults for --max-num-seqs and --max-num-batched-tokens, by the GPU's memory.
_DEFAULTS = ((160 * GIB, 1024, 16384), (70 * GIB, 1024, 8192), (0, 256, 2048))


@dataclass(frozen=True, slots=True)
class Workload:
    """What is expected of requests."""

    prompt_tokens: int
    output_tokens: int
    shared_prefix_tokens: int = 0
    concurrency: int | None = None
    assumed: bool = False  # nobody told the lengths

    @property
    def tokens(self) -> int:
        """A sequence at its end."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Row:
    """Sequences of one length."""

    tokens: int
    sequences: int
    kv_bytes: int | None  # of one such sequence, over all GPUs of an engine
    is_workload: bool = False


@dataclass(frozen=True, slots=True)
class PlanOption:
    """One way to use the GPUs: so many backends, each on `fit.tensor_parallel` of them."""

    fit: Fit
    replicas: int
    sequences: int  # of the workload, on one backend
    max_num_seqs: int

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return self.replicas * self.fit.tensor_parallel

    @property
    def fleet_sequences(self) -> int:
        """Sequences of the workload that the backends hold together."""
        return self.replicas * self.sequences

    @property
    def fleet_kv_tokens(self) -> int:
        """Tokens that the backends hold together."""
        return self.replicas * self.fit.kv_tokens

    @property
    def fleet_slots(self) -> int:
        """Sequences that the backends are given together at most."""
        return self.replicas * self.max_num_seqs


@dataclass(frozen=True, slots=True)
class Plan:
    """All of it. `choice` is None if the model fits in no way."""

    shape: ModelShape
    settings: Settings
    workload: Workload
    gpus: int
    options: tuple[PlanOption, ...]
    choice: PlanOption | None


def defaults(gpu_bytes: int) -> tuple[int, int]:
    """vLLM's max_num_seqs and max_num_batched_tokens on such a GPU."""
    return next((seqs, tokens) for least, seqs, tokens in _DEFAULTS if gpu_bytes >= least)


def make_plan(
    shape: ModelShape, settings: Settings, workload: Workload, gpus: int, splits: Sequence[int] = TENSOR_PARALLEL
) -> Plan:
    """Try these splits of the model, as far as the GPUs and its heads allow, and choose one."""
    splits = [size for size in splits if size <= gpus and shape.splits(size)]
    options = tuple(_option(shape, settings, workload, gpus // size, size) for size in splits)
    return Plan(shape, settings, workload, gpus, options, choose(options, workload))


def startable_length(plan: Plan) -> int:
    """The greatest length with which vLLM starts if the model is split most, in whole steps; 0 = none."""
    if plan.choice is not None or not plan.options:
        return 0
    split = plan.options[-1].fit.tensor_parallel
    return longest_that_starts(plan.shape, plan.settings, split) // _STEP_TOKENS * _STEP_TOKENS


def choose(options: Sequence[PlanOption], workload: Workload) -> PlanOption | None:
    """The least split that will do, for GPUs that need not talk are faster.

    It does if it holds the expected concurrency; where none is told, if no other holds twice as much.
    """
    possible = [option for option in options if option.fit.starts]
    if not possible or not possible[0].fit.kv_layout.groups:
        return possible[0] if possible else None
    roomiest = max(possible, key=lambda option: option.fleet_sequences)
    if workload.concurrency is None:
        return next(option for option in possible if 2 * option.fleet_sequences >= roomiest.fleet_sequences)
    enough = [option for option in possible if option.sequences and option.fleet_slots >= workload.concurrency]
    return enough[0] if enough else roomiest


def recommended(pool: BlockPool, workload: Workload, most: int) -> int:
    """max_num_seqs: what fits in the share of the KV cache that the gateway fills, and no more than `most`."""
    return max(1, min(most, pool.sequences(workload.tokens, workload.shared_prefix_tokens, KV_HEADROOM)))


def rows(pool: BlockPool, max_length_tokens: int, workload: Workload, gpus: int | None) -> tuple[Row, ...]:
    """Sequences that fit by their length, shortest first."""
    asked = min(workload.tokens, max_length_tokens)
    lengths = sorted({asked, max_length_tokens, *(size for size in _LENGTHS if size < max_length_tokens)})
    return tuple(
        Row(
            tokens=length,
            sequences=pool.sequences(length, workload.shared_prefix_tokens if length == asked else 0),
            kv_bytes=None if gpus is None else pool.layout.blocks_for(length) * pool.layout.block_bytes * gpus,
            is_workload=length == asked,
        )
        for length in lengths
    )


def _option(
    shape: ModelShape, settings: Settings, workload: Workload, replicas: int, tensor_parallel: int
) -> PlanOption:
    found = fit(shape, settings, tensor_parallel)
    if not found.kv_layout.groups:
        return PlanOption(found, replicas, settings.max_num_seqs, settings.max_num_seqs)
    held = found.pool.sequences(workload.tokens, workload.shared_prefix_tokens) if found.weights_fit else 0
    return PlanOption(found, replicas, held, recommended(found.pool, workload, settings.max_num_seqs))
