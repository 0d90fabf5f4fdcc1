"""What to know about a plan, and what to change where it does not fit."""

from collections.abc import Iterator
from dataclasses import replace

from gateway.plan.memory import GIB, Fit, Settings, fit, longest_that_starts
from gateway.plan.model_shape import ModelShape
from gateway.plan.plan import Plan, PlanOption, Workload
from gateway.plan.weights import chosen

_SPLITS = (1, 2, 4, 8, 16, 32, 64)


def warnings(plan: Plan, told_max_num_seqs: int | None) -> list[str]:
    """In the order of their weight; the first lines of a plan that does not fit say what would."""
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
    found += caps(plan.choice.sequences, plan.choice.max_num_seqs, told_max_num_seqs, plan.workload)
    found += _concurrency(plan, plan.choice)
    return found


def caps(held: int, recommended: int, told: int | None, workload: Workload) -> Iterator[str]:
    """What max_num_seqs does that is not what fits."""
    if told is None:
        return
    if told > held:
        yield (
            f"max_num_seqs {told:,} is more than the {held:,} sequences of {workload.tokens:,} tokens that the KV "
            f"cache holds: if so many come, the engine will preempt and compute again what it drops. Set it to "
            f"{recommended:,}."
        )
    elif told < held // 2:
        yield (
            f"max_num_seqs {told:,} leaves KV cache unused: it holds {held:,} sequences of {workload.tokens:,} tokens."
        )


def concurrency_of(workload: Workload, replicas: int, slots: int) -> Iterator[str]:
    """What the expected concurrency means for the batches and the line. `slots` are those of one backend."""
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
    way = f"{_gpus(needs[split])} ({needs[split] // split} x tp {split})"
    if needs[split] < plan.gpus:
        yield (
            f"{way} would hold {expected:,} at once: fewer backends decode larger batches, and so more tokens a GPU; "
            "more backends answer each request sooner."
        )
    elif needs[split] > plan.gpus:
        yield f"To hold all {expected:,} at once takes {way}."


def too_long(workload: Workload, length: int) -> Iterator[str]:
    """Requests that the engine refuses."""
    if workload.tokens > length:
        yield (
            f"{workload.tokens:,} tokens of prompt and answer are more than max_model_len {length:,}: "
            "the engine refuses such requests."
        )


def _does_not_fit(plan: Plan) -> Iterator[str]:
    if not plan.options:
        yield f"{plan.shape.heads} attention heads cannot be split over {_gpus(plan.gpus)} in a way that vLLM knows."
        return
    roomiest = max(plan.options, key=lambda option: option.fit.kv_bytes).fit
    yield _what_lacks(plan, roomiest)
    split = roomiest.tensor_parallel
    length = longest_that_starts(plan.shape, plan.settings, split)
    ways = [f"with --max-model-len {length}"] if length else []
    ways += _ways(plan.shape, plan.settings, split, plan.gpus)
    yield f"It fits {'; or '.join(ways)}." if ways else "Nothing simple makes it fit: take larger GPUs."


def shortened(plan: Plan, length: int) -> str:
    """That the model's own length has no room, and what would give it."""
    split = max(option.fit.tensor_parallel for option in plan.options)
    ways = list(_ways(plan.shape, plan.settings, split, plan.gpus))
    told = f" That fits {'; or '.join(ways)}." if ways else ""
    return (
        f"The KV cache has no room for one sequence of the model's own {plan.settings.max_length_tokens:,} tokens, so "
        f"this is a plan for --max-model-len {length}.{told}"
    )


def _what_lacks(plan: Plan, best: Fit) -> str:
    on = _gpus(best.tensor_parallel)
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
        yield f"on {_gpus(size)} (tensor parallel {size})"
    if settings.kv_value_bytes > 1 and fit(shape, replace(settings, kv_value_bytes=1), split).starts:
        yield "with --kv-cache-dtype fp8"
    if settings.quantization is None:
        for name, told in (("fp8", "with --quantization fp8"), ("int4", "as a 4-bit checkpoint (AWQ, GPTQ)")):
            packed = replace(settings, quantization=chosen(name, None), weight_bytes=None)
            if fit(shape, packed, split).starts:
                yield f"{told} on {_gpus(split)}"
                return


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
