"""What the size of a batch brings and costs: throughput, memory, static groups, concurrency, offline work. Pure."""

from __future__ import annotations

from random import Random

from gateway.features.plan.capacity import GIB, Settings, bytes_per_sequence, defaults, fit
from gateway.features.plan.gpus import gpu_of, preset
from gateway.features.plan.model import read_shape
from loadtest.engine.scheduler import Batching
from loadtest.engine.step_time import PRESETS, kv_tokens
from loadtest.figures.exhibit import Exhibit, chart, even, limits, times
from loadtest.figures.virtual import Demanded, Measured, closed_loop

CARD, GPU = "card-8b", "h100-8b"
_USERS = (1, 2, 4, 8, 16, 32, 64, 128)
_STATED = {1: 95.0, 8: 620.0, 32: 2400.0}
_SHORT = Demanded(64, 256)
_SLOTS = 32


def batch_curve() -> Exhibit:
    found = {
        name: {users: closed_loop([_SHORT] * (6 * users), users, limits(name), PRESETS[name]) for users in _USERS}
        for name in (CARD, "a100-8b", GPU, "h200-8b")
    }
    rates = {name: [(users, one.tokens_per_second) for users, one in its.items()] for name, its in found.items()}
    each = {name: [(users, rate / users) for users, rate in line] for name, line in rates.items()}
    card = dict(rates[CARD])
    rows = [
        [
            f"{users}",
            f"{_STATED[users]:,.0f}" if users in _STATED else "",
            f"{card[users]:,.0f}",
            f"{card[users] / users:.0f}",
            times(card[users], card[1]),
            f"{found[CARD][users].gap_seconds(50) * 1e3:.1f} ms",
        ]
        for users in _USERS
    ]
    return Exhibit(
        "batch-curve",
        title="Tokens per second by batch size",
        statement=(
            "Llama 3.1 8B: about 95 tokens/s for one user, 620 for 8, 2,400 for 32, which is 25 times the single "
            "stream."
        ),
        verdict="holds",
        finding=(
            f"Computed: {card[1]:,.0f}, {card[8]:,.0f} and {card[32]:,.0f} tokens/s, {times(card[32], card[1])} at 32. "
            "Each user still gets most of the speed of a single stream, because a step reads the weights once for all."
        ),
        charts=[
            chart("Output tokens per second", rates, "users", "tokens/s"),
            chart("Output tokens per second and user", each, "users", "tokens/s a user"),
        ],
        head=["users", "stated", "computed", "a user", "gain", "between tokens"],
        rows=rows,
        setting="Closed loop, prompts of 64 tokens, answers of 256; the table is that of card-8b.",
    )


def memory_ceiling() -> Exhibit:
    shape = read_shape(preset("llama-3.1-8b"))
    gpu = gpu_of("rtx-5090")
    gpu_bytes = int(gpu.memory_gib * GIB)
    max_num_seqs, batched_tokens = defaults(gpu_bytes)
    settings = Settings(
        gpu_bytes,
        max_length_tokens=8192,
        max_num_seqs=max_num_seqs,
        batched_tokens=batched_tokens,
        block_tokens=16,
        kv_value_bytes=2,
    )
    memory = fit(shape, settings, 1)
    tokens = 1536
    each = bytes_per_sequence(shape, tokens, 2)
    fits = memory.cache.sequences(tokens)
    sizes = (1, 8, 16, 32, 48, 64, 80, 96, 128)
    constant = memory.weight_bytes + memory.reserve_bytes
    needed = [(size, (constant + size * each) / GIB) for size in sizes]
    asked = [Demanded(1024, 512)] * 600
    runs = {size: closed_loop(asked, size, limits(CARD), PRESETS[CARD]) for size in sizes}
    long = bytes_per_sequence(shape, 32_768, 2)
    rows = [
        [f"{size}", f"{gib:.1f} GiB", "yes" if size <= fits else "no", f"{runs[size].tokens_per_second:,.0f}",
         f"{runs[size].preemptions:,}", f"{runs[size].peak_running}"]
        for size, gib in needed
    ]  # fmt: skip
    return Exhibit(
        "memory",
        title="The memory ceiling",
        statement="The KV cache grows with the batch: at 64 the VRAM tops out, and 32 sequences of 4 GB need 128 GB. "
        "The total is batch x (model + cache of a sequence).",
        verdict="holds, but for the formula",
        finding=f"With {memory.weight_bytes / GIB:.1f} GiB of weights, a card of {gpu.memory_gib:.0f} GiB holds {fits} "
        f"sequences of {tokens:,} tokens. Beyond that vLLM does not run out of memory: it preempts, and computes "
        f"again what it dropped. 32 sequences of 32,768 tokens take 32 x {long / GIB:.1f} GiB = {32 * long / GIB:.0f} "
        f"GiB of cache, and the weights once, not 32 times. Paged blocks take what {tokens:,} tokens need, "
        f"{tokens / 8192:.0%} of what reserving 8,192 for each would.",
        charts=[
            chart(
                "Memory by sequences",
                {"weights, working memory and KV cache": needed},
                "sequences in the batch",
                "GiB",
                x=even(128),
                bounds=[(memory.budget_bytes / GIB, "what vLLM may use")],
            ),
            chart(
                "Preemptions by sequences",
                {"preemptions": [(size, float(run.preemptions)) for size, run in runs.items()]},
                "users",
                "preemptions of 600 requests",
                x=even(128),
            ),
        ],
        head=["sequences", "memory", "fits", "tokens/s", "preemptions", "most at once"],
        rows=rows,
        setting=(
            f"gateway plan for rtx-5090; card-8b ({kv_tokens(CARD):,} KV tokens), prompts of 1,024, answers of 512 "
            "tokens."
        ),
    )


def continuous_and_static() -> Exhibit:
    found = {}
    for sigma in (0.0, 0.4, 0.8, 1.2, 1.4):
        asked = _spread_answers(1000, sigma)
        found[sigma] = {
            batching: closed_loop(asked, 2 * _SLOTS, limits(GPU, _SLOTS, batching=batching), PRESETS[GPU])
            for batching in Batching
        }
    ratios = [
        (sigma, both[Batching.CONTINUOUS].tokens_per_second / both[Batching.STATIC].tokens_per_second)
        for sigma, both in found.items()
    ]
    typical = found[0.8]
    occupied = {str(batching): _first(one, 20.0) for batching, one in typical.items()}
    rows = [
        [f"{sigma:g}", str(batching), f"{one.tokens_per_second:,.0f}", f"{one.ttft_seconds(50):.2f} s",
         f"{one.ttft_seconds(99):.2f} s", f"{dict(ratios)[sigma]:.1f}x" if batching is Batching.CONTINUOUS else ""]
        for sigma, both in found.items() for batching, one in both.items()
    ]  # fmt: skip
    low, high = ratios[0][1], max(ratio for _, ratio in ratios)
    return Exhibit(
        "static",
        title="Continuous against static batching",
        statement=(
            "Static groups wait for their longest answer: slow requests block fast ones. Continuous batching brings 5 "
            "to 10 times the throughput."
        ),
        verdict="holds for uneven answers" if high >= 5 else f"up to {high:.1f}x here",
        finding=(
            f"The gain depends on how uneven the answers are: {low:.1f}x if all have the same length, {high:.1f}x with "
            "a wide spread. At the spread of chats (0.8) half of the requests wait "
            f"{typical[Batching.STATIC].ttft_seconds(50):.1f} s for their first token in static groups, "
            f"{typical[Batching.CONTINUOUS].ttft_seconds(50):.1f} s with continuous batching. Finished answers leave "
            "at once here; engines that hold them back are slower still."
        ),
        charts=[
            chart("Sequences in the batch", occupied, "time", "sequences", x=even(20, " s"), steps=True),
            chart(
                "Continuous over static", {"tokens/s, ratio": ratios}, "spread of answer lengths", "times", x=even(1.5)
            ),
        ],
        head=["spread", "batching", "tokens/s", "TTFT p50", "TTFT p99", "gain"],
        rows=rows,
        setting=(
            f"h100-8b, {_SLOTS} slots, {2 * _SLOTS} users, prompts of 128 tokens, answers log-normal around 200 "
            "(spread: sigma)."
        ),
    )


def effective_batch() -> Exhibit:
    found = {
        (slots, users): closed_loop([_SHORT] * (6 * users), users, limits(GPU, slots), PRESETS[GPU])
        for slots in (8, 32, 128)
        for users in (8, 32, 128)
    }
    lines = {
        f"{users} users": [(slots, found[slots, users].tokens_per_second) for slots in (8, 32, 128)]
        for users in (8, 32, 128)
    }
    few, many = found[128, 8], found[8, 8]
    return Exhibit(
        "concurrency",
        title="The effective batch is the active concurrency",
        statement="A batch size of 128 with 8 active users wastes the cap.",
        verdict="holds",
        finding=f"With 8 users, 128 slots give {few.tokens_per_second:,.0f} tokens/s and 8 slots "
        f"{many.tokens_per_second:,.0f}: the batch has {few.peak_running} sequences in both. Plan with the real "
        "concurrency.",
        charts=[chart("Tokens per second by max_num_seqs", lines, "max_num_seqs", "tokens/s")],
        head=["max_num_seqs", "users", "tokens/s", "most at once", "TTFT p50"],
        rows=[
            [
                f"{slots}",
                f"{users}",
                f"{one.tokens_per_second:,.0f}",
                f"{one.peak_running}",
                f"{one.ttft_seconds(50) * 1e3:,.0f} ms",
            ]
            for (slots, users), one in found.items()
        ],
        setting="h100-8b, closed loop, prompts of 64 tokens, answers of 256.",
    )


def offline() -> Exhibit:
    asked = _spread_answers(1000, 0.8)
    sizes = (1, 8, 32, 64, 128, 256)
    found = {size: closed_loop(asked, len(asked), limits(GPU, size), PRESETS[GPU]) for size in sizes}
    texts = {
        size: size / (PRESETS[GPU].base_seconds + size * PRESETS[GPU].prefill_seconds(64, 0)) for size in (1, 4, 16, 64)
    }
    return Exhibit(
        "offline",
        title="Offline batches and embeddings",
        statement=(
            "Process 1,000 prompts at once; embed many texts in one call; a single user gains nothing from batching."
        ),
        verdict="holds",
        finding=f"1,000 prompts take {found[1].seconds / 60:,.0f} min one by one and {found[256].seconds:,.0f} s with "
        f"max_num_seqs 256 ({times(found[1].seconds, found[256].seconds)}). One call with 64 texts embeds "
        f"{times(texts[64], texts[1])} as many a second as calls with one.",
        charts=[
            chart(
                "1,000 prompts", {"all done": [(size, one.seconds) for size, one in found.items()]}, "max_num_seqs", "s"
            ),
            chart("Embedded texts per second", {"texts/s": list(texts.items())}, "texts in a step", "texts/s"),
        ],
        head=["max_num_seqs", "all done", "tokens/s", "between tokens"],
        rows=[
            [f"{size}", f"{one.seconds:,.0f} s", f"{one.tokens_per_second:,.0f}", f"{one.gap_seconds(50) * 1e3:.1f} ms"]
            for size, one in found.items()
        ],
        setting="h100-8b; prompts of 128 tokens, answers log-normal around 200; texts of 64 tokens.",
    )


def _spread_answers(count: int, sigma: float) -> list[Demanded]:
    random = Random(f"answers/{sigma}")
    return [Demanded(128, min(4096, max(4, round(200 * random.lognormvariate(0, sigma))))) for _ in range(count)]


def _first(found: Measured, seconds: float) -> list[tuple[float, float]]:
    """The sequences in the batch until then, at the times at which they change."""
    shown: list[tuple[float, float]] = []
    for at, running in found.running:
        if at > seconds:
            break
        if not shown or shown[-1][1] != running:
            shown.append((round(at, 2), float(running)))
    return [*shown, (seconds, shown[-1][1])]
