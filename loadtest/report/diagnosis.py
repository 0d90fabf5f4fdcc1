"""The limits of a server, as seen in a run: one sentence each, with the flag of vLLM to change. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import correlation, fmean, linear_regression, pstdev

from loadtest.drive.counted import preemptions
from loadtest.drive.record import Record
from loadtest.report.schema import Figures, PageSeries, Samples, Throughput

GPU_TARGET_PERCENT = 85.0
_FULL_CACHE = 0.95
_WAITING_SHARE = 0.2
_AT_THE_TOP = 0.95
_HITS_BELOW_IDEAL = 0.2
_FEWEST_PROMPTS = 30
_LEAST_SPREAD = 0.2
_LEAST_CORRELATION = 0.9
_LEAST_PART_OF_TTFT = 0.5


@dataclass(frozen=True, slots=True)
class MeasuredPrompt:
    """The prompt tokens that a request's engine had to compute, and its TTFT from the actual send."""

    computed_tokens: int
    ttft_seconds: float


def prompt_of(record: Record) -> MeasuredPrompt:
    """Without reported tokens it has none to compute."""
    first = record.sent if record.first_token is None else record.first_token
    return MeasuredPrompt((record.prompt_tokens or 0) - (record.cached_tokens or 0), first - record.sent)


def gpu_percent(samples: Samples | None, window: Throughput) -> float | None:
    """The mean utilisation of all GPUs in a stretch of the run; None where none reported any."""
    found = [
        busy
        for gpu in (samples.gpus if samples else [])
        for at, busy in zip(gpu.at, gpu.utilization_percent, strict=True)
        if busy is not None and window.start <= at <= window.end
    ]
    return fmean(found) if found else None


def gpu_watts(samples: Samples | None, window: Throughput) -> float | None:
    """The mean power of all GPUs together in a stretch of the run; None where one of them reported none."""
    watts = [
        [w for at, w in zip(gpu.at, gpu.power_watts, strict=True) if w is not None and window.start <= at <= window.end]
        for gpu in (samples.gpus if samples else [])
    ]
    return sum(map(fmean, watts)) if watts and all(watts) else None


def tokens_per_joule(samples: Samples | None, window: Throughput) -> float | None:
    """Output tokens, of embeddings prompt tokens, for the energy that all GPUs took meanwhile."""
    watts = gpu_watts(samples, window)
    return (window.output_tokens_per_second or window.prompt_tokens_per_second) / watts if watts else None


def diagnose(figures: Figures, prompts: Sequence[MeasuredPrompt]) -> list[str]:
    """Changes to the server, most pressing first; empty without findings."""
    return [
        *_preempted(figures),
        *(finding for page in _engines(figures) for finding in _of_engine(page)),
        *_hits(figures),
        *_prefill(prompts),
        *_gpus(figures),
    ]


def _engines(figures: Figures) -> list[PageSeries]:
    """Pages that report a KV cache; a gateway's has none, and its queue is not an engine's."""
    pages = figures.samples.pages if figures.samples else []
    return [page for page in pages if any(usage is not None for usage in page.kv_cache_usage)]


def _preempted(figures: Figures) -> Iterator[str]:
    # A run that is ended by hand has no counters from its end, but samples until then.
    count = preemptions(figures.metrics_delta) or sum(_gained(page.preemptions) for page in _engines(figures))
    if count:
        yield (
            f"{count:.0f} preemption{'s' if count != 1 else ''}: sequences lost their KV cache and were computed "
            "again; lower --max-num-seqs, or make the cache larger (--gpu-memory-utilization, --kv-cache-dtype fp8)"
        )


def _gained(totals: Sequence[float | None]) -> float:
    known = [total for total in totals if total is not None]
    return max(0.0, known[-1] - known[0]) if known else 0.0


def _of_engine(page: PageSeries) -> Iterator[str]:
    fullest = max((usage for usage in page.kv_cache_usage if usage is not None), default=0.0)
    is_full = fullest > _FULL_CACHE
    if is_full:
        yield (
            f"{page.name}: the KV cache was {fullest:.0%} full, so it limits the batch: make it larger "
            "(--gpu-memory-utilization, --kv-cache-dtype fp8, --tensor-parallel-size), or send shorter requests"
        )
    running = max((count for count in page.running if count is not None), default=0.0)
    both = [(r, w) for r, w in zip(page.running, page.waiting, strict=True) if r is not None and w is not None]
    held = [waiting for r, waiting in both if waiting and r >= _AT_THE_TOP * running]
    if not is_full and running and len(held) > _WAITING_SHARE * len(both):
        yield (
            f"{page.name}: up to {max(held):.0f} requests waited while {running:.0f} ran, and the KV cache had room "
            f"({fullest:.0%} full): --max-num-seqs (or the gateway's cap) limits the batch; raise it"
        )


def _hits(figures: Figures) -> Iterator[str]:
    hits, ideal = figures.routing.hit_ratio, figures.routing.ideal_hit_ratio
    if hits is None or ideal is None or hits >= ideal - _HITS_BELOW_IDEAL:
        return
    affinity = figures.routing.affinity
    if len(figures.routing.backends) > 1 and affinity is not None and affinity < 1 - _HITS_BELOW_IDEAL:
        remedy = f"only {affinity:.0%} of requests went to their group's main backend; route by prefix"
    else:
        remedy = "check --enable-prefix-caching, and whether the KV cache holds all prefixes (--gpu-memory-utilization)"
    yield f"prefix cache hits were {hits:.0%} of prompt tokens, {ideal:.0%} are possible: {remedy}"


def _prefill(prompts: Sequence[MeasuredPrompt]) -> Iterator[str]:
    """TTFT that follows the tokens to compute is prefill; a queue would hide the line."""
    tokens = [float(prompt.computed_tokens) for prompt in prompts]
    seconds = [prompt.ttft_seconds for prompt in prompts]
    if len(prompts) < _FEWEST_PROMPTS or pstdev(tokens) < _LEAST_SPREAD * fmean(tokens) or not pstdev(seconds):
        return
    if not fmean(tokens) or correlation(tokens, seconds) < _LEAST_CORRELATION:
        return
    slope = linear_regression(tokens, seconds).slope
    if slope * fmean(tokens) >= _LEAST_PART_OF_TTFT * fmean(seconds):
        yield (
            f"TTFT grows in proportion to the prompt, {slope * 1e6:.0f} ms for 1,000 tokens: prefill limits it; use "
            "--enable-prefix-caching for shared prompts, a larger --max-num-batched-tokens, or --tensor-parallel-size"
        )


def _gpus(figures: Figures) -> Iterator[str]:
    busy = gpu_percent(figures.samples, figures.steady or figures.overall)
    if busy is not None and busy < GPU_TARGET_PERCENT:
        yield (
            f"GPUs were busy {busy:.0f} % of the time, below {GPU_TARGET_PERCENT:.0f} %: send more at once (-c, -r), "
            "or raise --max-num-seqs and --max-num-batched-tokens"
        )
