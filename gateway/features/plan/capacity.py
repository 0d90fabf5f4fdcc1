"""The use of GPU memory: weights, working memory and the KV cache in the rest, in vLLM's blocks; splits and advice."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from gateway.features.plan.model import ModelShape, Quantization, chosen

BLOCK_TOKENS = 16  # vLLM's default
LATENT_BLOCK_TOKENS = 64  # for vLLM's kernels for latent vectors
_EVEN_ENOUGH = 1.5
_BATCHES_UNDER_WAY = 2  # one is scheduled while another runs

GIB = 1 << 30
UTILIZATION = 0.92  # vLLM's default for --gpu-memory-utilization
KV_HEADROOM = 1.0  # the default of `admission.kv_headroom`: the share of a KV cache that the gateway reserves

# Assumed, since vLLM measures it at start: memory of CUDA itself, of NCCL, and of captured CUDA graphs.
CONTEXT_BYTES = GIB // 2
NCCL_BYTES = GIB
GRAPHS_BYTES = GIB
_LOGITS_BYTES = 8  # 32-bit logits of every sequence, and a copy for sampling

TENSOR_PARALLEL = (1, 2, 4, 8)
_LARGER_SPLITS = (1, 2, 4, 8, 16, 32, 64)
_STEP_TOKENS = 1024
_LENGTHS = (512, 2048, 8192, 32768, 131072)
# vLLM's defaults for --max-num-seqs and --max-num-batched-tokens, by the GPU's memory.
_DEFAULTS = ((160 * GIB, 1024, 16384), (70 * GIB, 1024, 8192), (0, 256, 2048))


@dataclass(frozen=True, slots=True)
class KvCache:
    """The KV cache on each GPU of one engine: its blocks, and how sequences take them."""

    block_tokens: int
    block_bytes: int
    groups: tuple[int | None, ...]  # layers that share a table of blocks, by their window in tokens; None = all
    _: KW_ONLY
    blocks: int  # to hand out; vLLM keeps one more to itself

    def blocks_for(self, tokens: int, shared_tokens: int = 0) -> int:
        """Blocks that one sequence of this length holds for itself, while it decodes."""
        whole, shared = _ceil(tokens, self.block_tokens), shared_tokens // self.block_tokens
        dropped = (max(0, tokens - (window or tokens)) // self.block_tokens for window in self.groups)
        return sum(max(1, whole - max(behind, shared)) for behind in dropped)

    def blocks_to_start(self, tokens: int, batched_tokens: int) -> int:
        """Blocks that vLLM requires for one sequence: a window also holds the tokens of the batches in progress."""
        windows = [window for window in self.groups if window is not None]
        held = (min(tokens, window - 1 + _BATCHES_UNDER_WAY * batched_tokens) for window in windows)
        whole = (len(self.groups) - len(windows)) * _ceil(tokens, self.block_tokens)
        return whole + sum(_ceil(size, self.block_tokens) + 1 for size in held)  # it need not begin where a block does

    def sequences(self, tokens: int, shared_tokens: int = 0, share: float = 1.0) -> int:
        """How many of this length fit in this share of the blocks; of a common prefix, whole blocks are held once."""
        if not self.groups:
            return 0
        shared = min(shared_tokens, tokens)
        held_once = sum(min(shared, window or shared) // self.block_tokens for window in self.groups)
        return max(0, (int(self.blocks * share) - held_once) // self.blocks_for(tokens, shared))


def default_block_tokens(shape: ModelShape) -> int:
    return LATENT_BLOCK_TOKENS if shape.stored is not None and shape.stored.latent else BLOCK_TOKENS


def kv_cache(shape: ModelShape, split: int, value_bytes: float, block_tokens: int, size_bytes: int) -> KvCache:
    if shape.stored is None:
        return KvCache(block_tokens, 0, (), blocks=0)
    counts = [kind.count for kind in shape.attention]
    fewest, most = min(counts), max(counts)
    # vLLM's rule: groups of as many layers as the rarest kind has, or as the commonest if these are close.
    size = most if most < fewest * _EVEN_ENOUGH else fewest
    groups = [kind.window_tokens for kind in shape.attention for _ in range(_ceil(kind.count, size))]
    block_bytes = int(block_tokens * shape.stored.bytes_on_gpu(split, value_bytes) * size)
    return KvCache(block_tokens, block_bytes, tuple(groups), blocks=max(0, size_bytes // block_bytes - 1))


def bytes_per_sequence(shape: ModelShape, tokens: int, value_bytes: float) -> int:
    """The KV bytes of a sequence on one GPU with the whole model; layers with a window store at most the window."""
    if shape.stored is None:
        return 0
    one = shape.stored.bytes_on_gpu(1, value_bytes)
    return int(sum(kind.count * min(tokens, kind.window_tokens or tokens) for kind in shape.attention) * one)


def _ceil(number: int, size: int) -> int:
    return -(-number // size)


@dataclass(frozen=True, slots=True)
class Settings:
    """The engine's settings that memory depends on."""

    gpu_bytes: int
    _: KW_ONLY
    max_length_tokens: int
    max_num_seqs: int
    batched_tokens: int
    block_tokens: int
    kv_value_bytes: float
    utilization: float = UTILIZATION
    quantization: Quantization | None = None
    weight_bytes: int | None = None  # of the checkpoint's files; None = counted from config.json
    reserve_bytes: int | None = None  # set by the operator; None = assumed
    pipeline_parallel: int = 1


@dataclass(frozen=True, slots=True)
class Workload:
    """The expected lengths and number of requests."""

    prompt_tokens: int
    output_tokens: int
    shared_prefix_tokens: int = 0
    _: KW_ONLY
    concurrency: int | None = None
    assumed: bool = False  # no lengths were given

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Fit:
    """One way to use the GPUs: `replicas` backends, each on `gpus` GPUs. Bytes are for each GPU."""

    tensor_parallel: int
    _: KW_ONLY
    budget_bytes: int
    weight_bytes: int
    reserve_bytes: int
    cache: KvCache
    max_length_tokens: int
    blocks_to_start: int
    replicas: int = 1
    sequences: int = 0  # of the workload, on one backend
    max_num_seqs: int = 0
    pipeline_parallel: int = 1

    @property
    def gpus(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def kv_bytes(self) -> int:
        """The memory left for the KV cache; below 0, even the weights do not fit."""
        return self.budget_bytes - self.weight_bytes - self.reserve_bytes

    @property
    def starts(self) -> bool:
        """vLLM starts only if one sequence of the greatest length has room."""
        return self.kv_bytes > 0 and (not self.cache.groups or self.cache.blocks >= self.blocks_to_start)

    @property
    def kv_tokens(self) -> int:
        """Tokens as vLLM counts them: sequences of the greatest length, times that length."""
        return int(self.cache.blocks / self.blocks_to_start * self.max_length_tokens) if self.cache.groups else 0

    @property
    def fleet_sequences(self) -> int:
        return self.replicas * self.sequences


def fit(shape: ModelShape, settings: Settings, tensor_parallel: int) -> Fit:
    budget = int(settings.gpu_bytes * settings.utilization)
    weights, reserve = settings.weight_bytes, settings.reserve_bytes
    if weights is None:
        weights = shape.parameters.bytes(shape.dtype_bytes, settings.quantization)
    if reserve is None:
        reserve = assumed_reserve(shape, settings, tensor_parallel)
    stages = settings.pipeline_parallel
    weights = _ceil(_of_a_stage(weights, shape, stages), tensor_parallel)
    left, longest = budget - weights - reserve, settings.max_length_tokens
    cache = kv_cache(
        _stage(shape, stages),
        tensor_parallel,
        settings.kv_value_bytes,
        block_tokens=settings.block_tokens,
        size_bytes=left,
    )
    to_start = cache.blocks_to_start(longest, settings.batched_tokens)
    return Fit(
        tensor_parallel,
        budget_bytes=budget,
        weight_bytes=weights,
        reserve_bytes=reserve,
        cache=cache,
        max_length_tokens=longest,
        blocks_to_start=to_start,
        pipeline_parallel=stages,
    )


def _stage(shape: ModelShape, stages: int) -> ModelShape:
    """The layers of the fullest stage of a pipeline."""
    return replace(shape, attention=tuple(replace(each, count=_ceil(each.count, stages)) for each in shape.attention))


def _of_a_stage(weight_bytes: int, shape: ModelShape, stages: int) -> int:
    """The first stage has the table of embeddings, the last one the output layer: neither has both."""
    if stages == 1:
        return weight_bytes
    table = shape.vocabulary * shape.hidden * shape.dtype_bytes
    tables = min(weight_bytes, shape.parameters.embeddings * shape.dtype_bytes)
    return _ceil(weight_bytes - tables, stages) + min(table, tables)


def assumed_reserve(shape: ModelShape, settings: Settings, tensor_parallel: int) -> int:
    """Working memory: the widest layer's values for a whole batch of prompt tokens, logits, and CUDA's own memory."""
    batch = settings.batched_tokens
    layer = batch * (3 * shape.parameters.widest // tensor_parallel + 4 * shape.hidden) * shape.dtype_bytes
    logits = 0 if shape.stored is None else settings.max_num_seqs * shape.vocabulary * _LOGITS_BYTES
    return layer + logits + CONTEXT_BYTES + GRAPHS_BYTES + (NCCL_BYTES if tensor_parallel > 1 else 0)


def longest_that_starts(shape: ModelShape, settings: Settings, tensor_parallel: int) -> int:
    """The greatest --max-model-len with which vLLM starts here; 0 = none."""

    def is_too_long(length: int) -> bool:
        return not fit(shape, replace(settings, max_length_tokens=length), tensor_parallel).starts

    return bisect_left(range(1, settings.max_length_tokens + 1), True, key=is_too_long)


@dataclass(frozen=True, slots=True)
class Plan:
    """All options; `choice` is None if none of them fits."""

    shape: ModelShape
    settings: Settings
    _: KW_ONLY
    workload: Workload
    gpus: int
    options: tuple[Fit, ...]
    choice: Fit | None


def defaults(gpu_bytes: int) -> tuple[int, int]:
    """vLLM's max_num_seqs and max_num_batched_tokens on such a GPU."""
    return next((seqs, tokens) for least, seqs, tokens in _DEFAULTS if gpu_bytes >= least)


def make_plan(
    shape: ModelShape, settings: Settings, workload: Workload, gpus: int, splits: Sequence[int] = TENSOR_PARALLEL
) -> Plan:
    options = []
    for size in splits:
        if size * settings.pipeline_parallel <= gpus and shape.splits(size):
            found, held, slots = fit(shape, settings, size), settings.max_num_seqs, settings.max_num_seqs
            if found.cache.groups:
                held = found.cache.sequences(workload.tokens, workload.shared_prefix_tokens)
                slots = recommended(found.cache, workload, slots)
            options.append(replace(found, replicas=gpus // found.gpus, sequences=held, max_num_seqs=slots))
    return Plan(shape, settings, workload=workload, gpus=gpus, options=tuple(options), choice=choose(options, workload))


def startable_length(plan: Plan) -> int:
    """The greatest length with which vLLM starts at the largest split, in whole steps; 0 = none."""
    if plan.choice is not None or not plan.options:
        return 0
    split = plan.options[-1].tensor_parallel
    return longest_that_starts(plan.shape, plan.settings, split) // _STEP_TOKENS * _STEP_TOKENS


def choose(options: Sequence[Fit], workload: Workload) -> Fit | None:
    """The smallest split that is sufficient, since GPUs that need not communicate are faster.

    A split is sufficient if it holds the expected concurrency; without one, if no other split holds twice as much.
    """
    possible = [option for option in options if option.starts]
    if not possible or not possible[0].cache.groups:
        return possible[0] if possible else None
    roomiest = max(possible, key=lambda option: option.fleet_sequences)
    if workload.concurrency is None:
        return next(option for option in possible if 2 * option.fleet_sequences >= roomiest.fleet_sequences)
    expected = workload.concurrency
    enough = (each for each in possible if each.sequences and each.replicas * each.max_num_seqs >= expected)
    return next(enough, roomiest)


def recommended(cache: KvCache, workload: Workload, most: int) -> int:
    """max_num_seqs: the number that fits in the share of the KV cache that the gateway fills, at most `most`."""
    return max(1, min(most, cache.sequences(workload.tokens, workload.shared_prefix_tokens, KV_HEADROOM)))


def rows(cache: KvCache, max_length_tokens: int, workload: Workload, gpus: int | None) -> list[dict[str, Any]]:
    """The number of sequences that fit, by length; `kv_bytes`: of one sequence on all GPUs of an engine."""
    expected = min(workload.tokens, max_length_tokens)
    lengths = sorted({expected, max_length_tokens, *(size for size in _LENGTHS if size < max_length_tokens)})
    return [
        {
            "tokens": length,
            "sequences": cache.sequences(length, workload.shared_prefix_tokens if length == expected else 0),
            "kv_bytes": None if gpus is None else cache.blocks_for(length) * cache.block_bytes * gpus,
            "is_workload": length == expected,
        }
        for length in lengths
    ]


def warnings(plan: Plan, given_max_num_seqs: int | None) -> list[str]:
    """The most important first; if nothing fits, the first lines suggest changes."""
    if plan.choice is None:
        return list(_does_not_fit(plan))
    if not plan.choice.cache.groups:
        return []
    choice, longest, own = plan.choice, plan.settings.max_length_tokens, plan.shape.max_length_tokens
    refused = f"max_model_len {longest:,} is more than the model's own {own:,}: vLLM refuses to start."
    return [
        *([refused] if longest > own else []),
        *advice(
            plan.workload,
            longest,
            held=choice.sequences,
            fits=choice.max_num_seqs,
            given=given_max_num_seqs,
            backends=choice.replicas,
        ),
        *_concurrency(plan),
    ]


def advice(workload: Workload, longest: int, held: int, fits: int, given: int | None, backends: int) -> Iterator[str]:
    """About the requests, and the given max_num_seqs, if a backend holds `held` requests and had best take `fits`."""
    tokens, expected, slots = workload.tokens, workload.concurrency, backends * fits
    if tokens > longest:
        yield (
            f"{tokens:,} tokens of prompt and answer are more than max_model_len {longest:,}: "
            "the engine refuses such requests."
        )
    if given is not None and given > held:
        yield (
            f"max_num_seqs {given:,} is more than the {held:,} sequences of {tokens:,} tokens that the KV cache holds: "
            f"if so many come, the engine will preempt and compute again what it drops. Set it to {fits:,}."
        )
    elif given is not None and given < held // 2:
        yield f"max_num_seqs {given:,} leaves KV cache unused: it holds {held:,} sequences of {tokens:,} tokens."
    if expected is not None and expected > slots:
        yield (
            f"You expect {expected:,} requests at once and {slots:,} have a place: about "
            f"{expected - slots:,} wait in the gateway's line, which is what the cap is for."
        )
    elif expected is not None and expected < slots:
        where = "the backend" if backends == 1 else f"each of {backends} backends"
        yield (
            f"The effective batch is the active concurrency: with {expected:,} requests at once {where} decodes "
            f"{_ceil(expected, backends):,} together, whatever max_num_seqs is ({fits:,}). More slots or KV "
            "cache make nothing faster."
        )


def _concurrency(plan: Plan) -> Iterator[str]:
    """Other numbers of GPUs that would hold the expected requests."""
    expected = plan.workload.concurrency
    holding = [option for option in plan.options if option.starts and option.sequences]
    if expected is None or not holding:
        return
    sizes = [(option, _ceil(expected, option.max_num_seqs)) for option in holding]
    option, replicas = min(sizes, key=lambda size: (size[0].gpus * size[1], size[0].gpus))
    gpus = option.gpus * replicas
    way = f"{gpu_text(gpus)} ({replicas} x {split_text(option)})"
    if gpus < plan.gpus:
        yield (
            f"{way} would hold {expected:,} at once: fewer backends decode larger batches, and so more tokens a GPU; "
            "more backends answer each request sooner."
        )
    elif gpus > plan.gpus:
        yield f"To hold all {expected:,} at once takes {way}."


def _does_not_fit(plan: Plan) -> Iterator[str]:
    if not plan.options:
        yield f"{plan.shape.heads} attention heads cannot be split over {gpu_text(plan.gpus)} in a way that vLLM knows."
        return
    best = max(plan.options, key=lambda option: option.kv_bytes)
    split, block_bytes = best.tensor_parallel, best.cache.block_bytes
    if best.kv_bytes <= 0:
        yield (
            f"It does not fit on {gpu_text(split)}: each would need {best.weight_bytes / GIB:.1f} GiB for weights and "
            f"{best.reserve_bytes / GIB:.1f} GiB to work with, and vLLM may use {best.budget_bytes / GIB:.1f} GiB."
        )
    else:
        yield (
            f"vLLM does not start on {gpu_text(split)}: one sequence of {best.max_length_tokens:,} tokens needs "
            f"{best.blocks_to_start * block_bytes / GIB:.1f} GiB of KV cache on each, "
            f"{best.cache.blocks * block_bytes / GIB:.1f} GiB are left."
        )
    length = longest_that_starts(plan.shape, plan.settings, split)
    ways = [f"with --max-model-len {length}"] if length else []
    ways += _ways(plan.shape, plan.settings, split, plan.gpus)
    yield f"It fits {'; or '.join(ways)}." if ways else "Nothing simple makes it fit: take larger GPUs."


def shortened(plan: Plan, length: int) -> str:
    """Says that the model's own length does not fit, and suggests changes."""
    split = max(option.tensor_parallel for option in plan.options)
    ways = list(_ways(plan.shape, plan.settings, split, plan.gpus))
    alternatives = f" That fits {'; or '.join(ways)}." if ways else ""
    return (
        f"The KV cache has no room for one sequence of the model's own {plan.settings.max_length_tokens:,} tokens, so "
        f"this is a plan for --max-model-len {length}.{alternatives}"
    )


def _ways(shape: ModelShape, settings: Settings, split: int, gpus: int) -> Iterator[str]:
    more = [size for size in _LARGER_SPLITS if size > gpus and shape.splits(size)]
    if size := next((size for size in more if fit(shape, settings, size).starts), None):
        yield f"on {gpu_text(size)} (tensor parallel {size})"
    if settings.kv_value_bytes > 1 and fit(shape, replace(settings, kv_value_bytes=1), split).starts:
        yield "with --kv-cache-dtype fp8"
    if settings.quantization is None:
        for name, how in (("fp8", "with --quantization fp8"), ("int4", "as a 4-bit checkpoint (AWQ, GPTQ)")):
            packed = replace(settings, quantization=chosen(name, None), weight_bytes=None)
            if fit(shape, packed, split).starts:
                yield f"{how} on {gpu_text(split)}"
                return


def split_text(option: Fit) -> str:
    pipeline = f" x pp {option.pipeline_parallel}" if option.pipeline_parallel > 1 else ""
    return f"tp {option.tensor_parallel}{pipeline}"


def gpu_text(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
