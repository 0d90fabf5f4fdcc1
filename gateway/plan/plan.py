"""The plan: every way to use the GPUs, the recommended one, and advice where something does not fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gateway.plan.memory import GIB, BlockPool, Fit, Settings, fit, longest_that_starts
from gateway.plan.model_shape import ModelShape
from gateway.plan.weights import chosen

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
    assumed: bool = False  # no lengths were given

    @property
    def tokens(self) -> int:
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
    """One way to use the GPUs: `replicas` backends, each on `fit.tensor_parallel` GPUs."""

    fit: Fit
    replicas: int
    sequences: int  # of the workload, on one backend
    max_num_seqs: int

    @property
    def fleet_sequences(self) -> int:
        return self.replicas * self.sequences

    @property
    def fleet_kv_tokens(self) -> int:
        return self.replicas * self.fit.kv_tokens

    @property
    def fleet_slots(self) -> int:
        return self.replicas * self.max_num_seqs


@dataclass(frozen=True, slots=True)
class Plan:
    """All options; `choice` is None if none of them fits."""

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
    splits = [size for size in splits if size <= gpus and shape.splits(size)]
    options = tuple(_option(shape, settings, workload, gpus // size, size) for size in splits)
    return Plan(shape, settings, workload, gpus, options, choose(options, workload))


def startable_length(plan: Plan) -> int:
    """The greatest length with which vLLM starts at the largest split, in whole steps; 0 = none."""
    if plan.choice is not None or not plan.options:
        return 0
    split = plan.options[-1].fit.tensor_parallel
    return longest_that_starts(plan.shape, plan.settings, split) // _STEP_TOKENS * _STEP_TOKENS


def choose(options: Sequence[PlanOption], workload: Workload) -> PlanOption | None:
    """The smallest split that is sufficient, since GPUs that need not communicate are faster.

    A split is sufficient if it holds the expected concurrency; without one, if no other split holds twice as much.
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
    expected = min(workload.tokens, max_length_tokens)
    lengths = sorted({expected, max_length_tokens, *(size for size in _LENGTHS if size < max_length_tokens)})
    return tuple(
        Row(
            tokens=length,
            sequences=pool.sequences(length, workload.shared_prefix_tokens if length == expected else 0),
            kv_bytes=None if gpus is None else pool.layout.blocks_for(length) * pool.layout.block_bytes * gpus,
            is_workload=length == expected,
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


_SPLITS = (1, 2, 4, 8, 16, 32, 64)


def warnings(plan: Plan, given_max_num_seqs: int | None) -> list[str]:
    """The most important first; if nothing fits, the first lines say what would."""
    if plan.choice is None:
        return list(_does_not_fit(plan))
    if not plan.choice.fit.kv_layout.groups:
        return []
    found = [*too_long(plan.workload, plan.settings.max_length_tokens)]
    if plan.settings.max_length_tokens > plan.shape.max_length_tokens:
        found.append(
            f"max_model_len {plan.settings.max_length_tokens:,} is more than the model's own "
            f"{plan.shape.max_length_tokens:,}: vLLM refuses to start."
        )
    found += caps(plan.choice.sequences, plan.choice.max_num_seqs, given_max_num_seqs, plan.workload)
    found += _concurrency(plan, plan.choice)
    return found


def caps(held: int, recommended: int, given: int | None, workload: Workload) -> Iterator[str]:
    """The effect of a given max_num_seqs that does not match the KV cache."""
    if given is None:
        return
    if given > held:
        yield (
            f"max_num_seqs {given:,} is more than the {held:,} sequences of {workload.tokens:,} tokens that the KV "
            f"cache holds: if so many come, the engine will preempt and compute again what it drops. Set it to "
            f"{recommended:,}."
        )
    elif given < held // 2:
        yield (
            f"max_num_seqs {given:,} leaves KV cache unused: it holds {held:,} sequences of {workload.tokens:,} tokens."
        )


def concurrency_of(workload: Workload, replicas: int, slots: int) -> Iterator[str]:
    """The effect of the expected concurrency on batches and queue. `slots` are those of one backend."""
    expected = workload.concurrency
    if expected is None:
        return
    if expected > replicas * slots:
        yield (
            f"You expect {expected:,} requests at once and {replicas * slots:,} have a place: about "
            f"{expected - replicas * slots:,} wait in the gateway's line, which is what the cap is for."
        )
    elif expected < replicas * slots:
        batch = -(-expected // replicas)
        where = "the backend" if replicas == 1 else f"each of {replicas} backends"
        yield (
            f"The effective batch is the active concurrency: with {expected:,} requests at once {where} decodes "
            f"{batch:,} together, whatever max_num_seqs is ({slots:,}). More slots or KV cache make nothing faster."
        )


def _concurrency(plan: Plan, choice: PlanOption) -> Iterator[str]:
    yield from concurrency_of(plan.workload, choice.replicas, choice.max_num_seqs)
    expected = plan.workload.concurrency
    if expected is None:
        return
    needs = {
        option.fit.tensor_parallel: -(-expected // option.max_num_seqs) * option.fit.tensor_parallel
        for option in plan.options
        if option.fit.starts and option.sequences
    }
    if not needs:
        return
    split = min(needs, key=lambda size: (needs[size], size))
    way = f"{gpu_text(needs[split])} ({needs[split] // split} x tp {split})"
    if needs[split] < plan.gpus:
        yield (
            f"{way} would hold {expected:,} at once: fewer backends decode larger batches, and so more tokens a GPU; "
            "more backends answer each request sooner."
        )
    elif needs[split] > plan.gpus:
        yield f"To hold all {expected:,} at once takes {way}."


def too_long(workload: Workload, length: int) -> Iterator[str]:
    if workload.tokens > length:
        yield (
            f"{workload.tokens:,} tokens of prompt and answer are more than max_model_len {length:,}: "
            "the engine refuses such requests."
        )


def _does_not_fit(plan: Plan) -> Iterator[str]:
    if not plan.options:
        yield f"{plan.shape.heads} attention heads cannot be split over {gpu_text(plan.gpus)} in a way that vLLM knows."
        return
    roomiest = max(plan.options, key=lambda option: option.fit.kv_bytes).fit
    yield _what_lacks(plan, roomiest)
    split = roomiest.tensor_parallel
    length = longest_that_starts(plan.shape, plan.settings, split)
    ways = [f"with --max-model-len {length}"] if length else []
    ways += _ways(plan.shape, plan.settings, split, plan.gpus)
    yield f"It fits {'; or '.join(ways)}." if ways else "Nothing simple makes it fit: take larger GPUs."


def shortened(plan: Plan, length: int) -> str:
    """That the model's own length does not fit, and what would make it fit."""
    split = max(option.fit.tensor_parallel for option in plan.options)
    ways = list(_ways(plan.shape, plan.settings, split, plan.gpus))
    alternatives = f" That fits {'; or '.join(ways)}." if ways else ""
    return (
        f"The KV cache has no room for one sequence of the model's own {plan.settings.max_length_tokens:,} tokens, so "
        f"this is a plan for --max-model-len {length}.{alternatives}"
    )


def _what_lacks(plan: Plan, best: Fit) -> str:
    on = gpu_text(best.tensor_parallel)
    if not best.weights_fit:
        return (
            f"It does not fit on {on}: each would need {best.weight_bytes / GIB:.1f} GiB for weights and "
            f"{best.reserve_bytes / GIB:.1f} GiB to work with, and vLLM may use {best.budget_bytes / GIB:.1f} GiB."
        )
    held = best.pool.blocks * best.kv_layout.block_bytes
    wanted = best.blocks_to_start * best.kv_layout.block_bytes
    return (
        f"vLLM does not start on {on}: one sequence of {plan.settings.max_length_tokens:,} tokens needs "
        f"{wanted / GIB:.1f} GiB of KV cache on each, {held / GIB:.1f} GiB are left."
    )


def _ways(shape: ModelShape, settings: Settings, split: int, gpus: int) -> Iterator[str]:
    more = [size for size in _SPLITS if size > gpus and shape.splits(size)]
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


def gpu_text(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
