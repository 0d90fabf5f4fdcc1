"""What vLLM's settings bring: chunked prefill, max_num_seqs, tensor parallelism, prefix caching, utilisation. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from gateway.features.plan.capacity import GIB, Settings, assumed_reserve, defaults, make_plan
from gateway.features.plan.command import workload_of
from gateway.features.plan.gpus import gpu_of, preset
from gateway.features.plan.model import read_shape
from gateway.features.plan.roofline import Roofline, fleet_tokens_per_second
from loadtest.engine.scheduler import Batching, Limits
from loadtest.engine.step_time import PRESETS
from loadtest.figures.batches import GPU
from loadtest.figures.exhibit import Exhibit, chart, limits, times
from loadtest.figures.virtual import Demanded, Measured, closed_loop, open_loop
from loadtest.report.chart import Chart

_TARGET = 0.85
_LONGEST = 32_768
_MODELS = ("llama-3.2-3b", "llama-3.1-8b", "qwen3-32b", "llama-3.1-70b")


def chunked_prefill() -> Exhibit:
    ways = {
        "2048": limits(GPU, batched_tokens=2048),
        "4096": limits(GPU, batched_tokens=4096),
        "8192": limits(GPU, batched_tokens=8192),
        "off": limits(GPU, batched_tokens=_LONGEST, chunked=False),
    }
    asked, arrivals = _mixed_lengths()
    found = {name: open_loop(asked, arrivals, its, PRESETS[GPU]) for name, its in ways.items()}
    short = {
        name: closed_loop([Demanded(128, 128)] * 2000, 256, its, PRESETS[GPU]).tokens_per_second
        for name, its in ways.items()
    }
    shape, gib = read_shape(preset("llama-3.1-8b")), {}
    for name, its in ways.items():
        settings = Settings(
            80 * GIB,
            max_length_tokens=_LONGEST,
            max_num_seqs=256,
            batched_tokens=its.max_num_batched_tokens,
            block_tokens=16,
            kv_value_bytes=2,
        )
        gib[name] = assumed_reserve(shape, settings, 1) / GIB
    off, on = found["off"], found["2048"]
    late = times(on.ttft_seconds(50, shortest_prompt=8000), off.ttft_seconds(50, shortest_prompt=8000))
    return Exhibit(
        "chunked-prefill",
        title="Chunked prefill, on and off",
        statement=(
            "Chunked prefill computes long prompts in segments and prevents VRAM spikes; it slows short prompts; with "
            "good batch settings it brings 2 to 4 times the throughput."
        ),
        verdict="holds for pauses and memory, not for throughput alone",
        finding=(
            f"Without it a long prompt stops all answers for {off.gap_seconds(100) * 1e3:,.0f} ms, with 2,048 tokens a "
            f"step for {on.gap_seconds(100) * 1e3:,.0f} ms, and a step needs {gib['off']:.1f} GiB of working memory "
            f"instead of {gib['2048']:.1f} GiB. The long prompts themselves start {late} as late. Requests/s hardly "
            f"change ({off.requests_per_second:.2f} and {on.requests_per_second:.2f}). With short prompts alone, small "
            f"steps cost throughput ({short['2048']:,.0f} tokens/s with 2,048, {short['8192']:,.0f} with 8,192). Test "
            "both. vLLM refuses max-num-batched-tokens 0: off needs the longest prompt."
        ),
        charts=_chunk_charts(found),
        head=[
            "tokens a step",
            "requests/s",
            "between tokens p50",
            "p99",
            "longest",
            "TTFT p50, short",
            "TTFT p50, long",
            "working memory",
            "tokens/s, short prompts only",
        ],
        rows=[
            [
                name,
                f"{one.requests_per_second:.2f}",
                *(f"{one.gap_seconds(percent) * 1e3:.0f} ms" for percent in (50, 99, 100)),
                f"{one.ttft_seconds(50, 1000) * 1e3:,.0f} ms",
                f"{one.ttft_seconds(50, shortest_prompt=8000):.2f} s",
                f"{gib[name]:.1f} GiB",
                f"{short[name]:,.0f}",
            ]
            for name, one in found.items()
        ],
        setting=(
            "h100-8b, open loop of 10 requests/s: one of 25 prompts has 16,000 tokens, the others 128; answers of 128."
        ),
    )


def _chunk_charts(found: Mapping[str, Measured]) -> list[Chart]:
    budgets = [(_budget(name), name) for name in found]
    return [
        chart(
            "Time between tokens",
            {
                f"p{percent}": [(size, found[name].gap_seconds(percent) * 1e3) for size, name in budgets]
                for percent in (50, 99, 100)
            },
            "max_num_batched_tokens (the last: chunked prefill off)",
            "ms",
            log=True,
        ),
        chart(
            "Time to first token, p50",
            {
                "prompts of 128 tokens": [(at, found[name].ttft_seconds(50, 1000) * 1e3) for at, name in budgets],
                "prompts of 16,000 tokens": [
                    (at, found[name].ttft_seconds(50, shortest_prompt=8000) * 1e3) for at, name in budgets
                ],
            },
            "max_num_batched_tokens (the last: chunked prefill off)",
            "ms",
            log=True,
        ),
    ]


def max_num_seqs() -> Exhibit:
    sizes = (8, 16, 32, 64, 128, 256, 512)
    asked = [Demanded(512, 256)] * 1500
    found = {size: closed_loop(asked, 512, limits(GPU, size), PRESETS[GPU]) for size in sizes}
    best = max(found, key=lambda size: found[size].tokens_per_second)
    gain, share = times(found[best].tokens_per_second, found[8].tokens_per_second), found[64].tokens_per_second
    return Exhibit(
        "max-num-seqs",
        title="Tuning max_num_seqs",
        statement="max-num-seqs controls how many sequences are batched: tune it for the hardware. The default is 256.",
        verdict="holds",
        finding=f"The most tokens/s come with {best} ({found[best].tokens_per_second:,.0f}), {gain} "
        f"those of 8; {share / found[best].tokens_per_second:.0%} of it come with 64 already, at "
        f"{found[64].gap_seconds(50) * 1e3:.0f} instead of {found[best].gap_seconds(50) * 1e3:.0f} ms between tokens.",
        charts=[
            chart(
                "Throughput",
                {"tokens/s": [(size, one.tokens_per_second) for size, one in found.items()]},
                "max_num_seqs",
                "tokens/s",
            ),
            chart(
                "Time between tokens",
                {
                    f"p{percent}": [(size, one.gap_seconds(percent) * 1e3) for size, one in found.items()]
                    for percent in (50, 99)
                },
                "max_num_seqs",
                "ms",
                log=True,
            ),
        ],
        head=["max_num_seqs", "tokens/s", "between tokens p50", "TTFT p50", "preemptions"],
        rows=[
            [
                f"{size}",
                f"{one.tokens_per_second:,.0f}",
                f"{one.gap_seconds(50) * 1e3:.1f} ms",
                f"{one.ttft_seconds(50):.1f} s",
                f"{one.preemptions}",
            ]
            for size, one in found.items()
        ],
        setting="h100-8b, 512 users, prompts of 512 tokens, answers of 256.",
    )


def tensor_parallel() -> Exhibit:
    gpu, gpus, asked = gpu_of("h100"), 4, workload_of(1024, 256, 0, 256)
    fleet: dict[str, list[tuple[float, float]]] = {}
    alone: dict[str, list[tuple[float, float]]] = {}
    rows = []
    for name in _MODELS:
        shape = read_shape(preset(name))
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
        plan = make_plan(shape, settings, asked, gpus)
        for option in plan.options:
            size = option.tensor_parallel
            if not option.starts or not option.sequences:
                rows.append([name, f"{option.replicas} x tp {size}", "does not fit", "", ""])
                continue
            line = Roofline(shape, settings, gpu, tensor_parallel=size)
            rate = fleet_tokens_per_second(line, option, asked)
            token = line.at(1, asked).seconds_per_token * 1e3
            fleet.setdefault(name, []).append((size, rate))
            alone.setdefault(name, []).append((size, token))
            rows.append(
                [
                    name,
                    f"{option.replicas} x tp {size}",
                    f"{rate:,.0f}",
                    f"{token:.1f} ms",
                    f"{option.fleet_sequences:,}",
                ]
            )
    gains = {name: dict(line)[1] / dict(line)[4] for name, line in fleet.items() if 1 in dict(line)}
    said = ", ".join(f"{gain:.2f}x for {name}" for name, gain in gains.items())
    single = dict(alone["llama-3.1-8b"])
    return Exhibit(
        "tensor-parallel",
        title="Tensor parallelism",
        statement=(
            "Tensor parallelism only benefits models of more than 13B on several GPUs; smaller ones belong on a single "
            "GPU."
        ),
        verdict="holds for throughput",
        finding=(
            f"Tokens/s of four backends with one GPU each over one backend on four: {said}. Of large models little or "
            "no "
            "KV cache fits beside the weights on one GPU, so they have to be split; llama-3.1-70b does not start on "
            "one. "
            f"A split makes a single answer faster, whatever the size: {single[1]:.1f} ms a token of the 8B model on "
            f"one GPU, {single[4]:.1f} ms on four."
        ),
        charts=[
            chart("Four H100, 256 requests at once", fleet, "tensor parallel size", "tokens/s of all backends"),
            chart("One request alone", alone, "tensor parallel size", "ms a token"),
        ],
        head=["model", "backends", "tokens/s, all", "ms a token, alone", "sequences that fit"],
        rows=rows,
        setting="gateway plan's roofline for h100; prompts of 1,024 tokens, answers of 256.",
    )


def prefix_caching() -> Exhibit:
    found = {
        f"{name}, caching {switch}": _prefixed(f"{name}, caching {switch}", 1500, 64)
        for name in ("identical prefixes", "unique prefixes")
        for switch in ("on", "off")
    }
    on, off, unique, _ = found.values()
    return Exhibit(
        "prefix-caching",
        title="Prefix caching with identical and with unique prefixes",
        statement="Prefix caching saves the computing of shared system prompts. It needs identical prompt prefixes.",
        verdict="holds",
        finding="With the same 2,048 tokens at the start of all prompts, caching serves "
        f"{times(on.tokens_per_second, off.tokens_per_second)} the tokens/s ({on.hit_ratio:.0%} of prompt tokens are "
        f"hits). With prefixes of their own it brings {times(unique.tokens_per_second, off.tokens_per_second)} and "
        "costs nothing. Put the shared system prompt first; of several backends, send equal prefixes to the same "
        "one, as the gateway does.",
        charts=[chart("Tokens per second by users", {name: _by_users(name) for name in found}, "users", "tokens/s")],
        head=["", "tokens/s", "hits", "TTFT p50", "TTFT p99"],
        rows=[
            [
                name,
                f"{one.tokens_per_second:,.0f}",
                f"{one.hit_ratio:.0%}",
                f"{one.ttft_seconds(50) * 1e3:,.0f} ms",
                f"{one.ttft_seconds(99) * 1e3:,.0f} ms",
            ]
            for name, one in found.items()
        ],
        setting="h100-8b, 64 users, prompts of 2,112 tokens, answers of 128.",
    )


def _prefixed(way: str, requests: int, users: int) -> Measured:
    asked = [Demanded(2112, 128, 0 if "identical" in way else number, prefix_tokens=2048) for number in range(requests)]
    return closed_loop(asked, users, limits(GPU, prefix_caching=way.endswith("on")), PRESETS[GPU])


def _by_users(way: str) -> list[tuple[float, float]]:
    return [(users, _prefixed(way, 8 * users, users).tokens_per_second) for users in (1, 8, 32, 64, 128)]


def utilization() -> Exhibit:
    users = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    found = {
        name: {
            many: closed_loop([Demanded(512, 256)] * (6 * many), many, limits(name), PRESETS[name]) for many in users
        }
        for name in ("a100-8b", GPU, "h200-8b")
    }
    lines = {name: [(many, 100 * one.gpu_utilization) for many, one in its.items()] for name, its in found.items()}
    first = {
        name: next((many for many, one in its.items() if one.gpu_utilization > _TARGET), None)
        for name, its in found.items()
    }
    one, full = found[GPU][1], found[GPU][256]
    return Exhibit(
        "gpu-utilization",
        title="GPU utilisation",
        statement="Monitor nvidia-smi: the target is a utilisation above 85 %.",
        verdict="necessary, not sufficient",
        finding=(
            f"An H100 passes 85 % from {first[GPU]} users on. But it counts the time in which something runs, not how "
            f"well: one user keeps it busy for {one.gpu_utilization:.0%} of the time at {one.tokens_per_second:,.0f} "
            f"tokens/s, 256 users for {full.gpu_utilization:.0%} at {full.tokens_per_second:,.0f}. Below 85 % raise "
            "the concurrency; above it, look at tokens/s by batch."
        ),
        charts=[chart("Time in which the GPU computes", lines, "users", "%", bounds=[(100 * _TARGET, "target: 85 %")])],
        head=["users", *found],
        rows=[[f"{many}", *(_busy(its[many]) for its in found.values())] for many in users],
        setting="Closed loop, prompts of 512 tokens, answers of 256; 2 ms of each step are the host's.",
    )


def all_together() -> Exhibit:
    random = Random("all")
    asked = [
        Demanded(1024 + 128, max(8, round(150 * random.lognormvariate(0, 0.8))), 0, prefix_tokens=1024)
        for _ in range(1500)
    ]
    ladder: dict[str, Limits] = {
        "static groups of 32": limits(GPU, 32, prefix_caching=False, batching=Batching.STATIC),
        "continuous batching, max_num_seqs 32": limits(GPU, 32, prefix_caching=False),
        "max_num_seqs 256, 2,048 tokens a step": limits(GPU, 256, 2048, prefix_caching=False),
        "8,192 tokens a step": limits(GPU, 256, 8192, prefix_caching=False),
        "prefix caching": limits(GPU, 256, 8192),
    }
    found = {name: closed_loop(asked, 256, its, PRESETS[GPU]) for name, its in ladder.items()}
    rates = [one.tokens_per_second for one in found.values()]
    return Exhibit(
        "all-together",
        title="All of it, one after the other",
        statement="Expect 2 to 4 times the throughput with chunked prefill and optimal batch settings.",
        verdict="holds for the batch settings",
        finding=(
            f"From static groups to continuous batching: {times(rates[1], rates[0])}. From there, larger batches bring "
            f"{times(rates[3], rates[1])} and prefix caching {times(rates[4], rates[3])} more: "
            f"{times(rates[4], rates[0])} in all."
        ),
        charts=[],
        head=["", "tokens/s", "over the one before", "over the first", "TTFT p50", "between tokens p50"],
        rows=[
            [
                name,
                f"{one.tokens_per_second:,.0f}",
                times(one.tokens_per_second, rates[max(0, at - 1)]),
                times(one.tokens_per_second, rates[0]),
                f"{one.ttft_seconds(50):.2f} s",
                f"{one.gap_seconds(50) * 1e3:.1f} ms",
            ]
            for at, (name, one) in enumerate(found.items())
        ],
        setting="h100-8b, 256 users, prompts of 1,152 tokens (1,024 the same in all), answers log-normal around 150.",
    )


def _mixed_lengths() -> tuple[list[Demanded], list[float]]:
    random, now, arrivals = Random("mixed"), 0.0, []
    for _ in range(1500):
        now += random.expovariate(10)
        arrivals.append(now)
    return [Demanded(16_000 if number % 25 == 7 else 128, 128) for number in range(1500)], arrivals


def _busy(found: Measured) -> str:
    return f"{found.gpu_utilization:.0%}, {found.tokens_per_second:,.0f} tokens/s"


def _budget(name: str) -> float:
    return float(_LONGEST if name == "off" else int(name))
