"""The table of an overload run, and what in it misses the goals."""

from collections.abc import Mapping

from tests.bench.overload.load import CAPACITY_PER_S
from tests.bench.results import Sample

MOST_CPU_MS = 1.0  # for one refusal
MOST_P99_MS = 50.0  # until a refused client knows
LEAST_GOODPUT = 0.95  # of the best that any load reached


def cpu_us_per_refusal(sample: Sample, unrefused: Sample) -> float | None:
    """CPU of a refusal at most: all that was spent beyond what as many served requests cost without any refusal."""
    if not sample.load.refused or not unrefused.load.requests:
        return None
    per_request = unrefused.proxy_cpu_seconds / unrefused.load.requests
    return (sample.proxy_cpu_seconds - per_request * sample.load.requests) * 1e6 / sample.load.refused


def markdown(samples: Mapping[int, Sample]) -> str:
    """One line for each load. The first is the one without refusals."""
    best = max(sample.load.requests_per_s for sample in samples.values())
    unrefused = next(iter(samples.values()))
    lines = [
        "| load, x capacity | asked, 1/s | served, 1/s | of the best | refused, 1/s | refusal p50 / p99, ms |"
        " CPU of a refusal, ms | served p99, ms | its core: it / others |",
        "| --: | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for multiple, sample in samples.items():
        load, cpu = sample.load, cpu_us_per_refusal(sample, unrefused)
        refused = load.refused / load.seconds
        cells = [
            f"{multiple}",
            f"{load.requests_per_s + refused:,.0f}",
            f"{load.requests_per_s:,.0f}",
            f"{load.requests_per_s / best:.1%}",
            f"{refused:,.0f}",
            f"{load.refusal_us.p50 / 1000:.1f} / {load.refusal_us.p99 / 1000:.1f}" if load.refused else "",
            "" if cpu is None else f"{cpu / 1000:.3f}",
            f"{load.latency_us.p99 / 1000:,.0f}",
            f"{sample.proxy_cpu_seconds / load.seconds:.0%} / {sample.others_share:.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"Capacity: {CAPACITY_PER_S:,.0f} requests a second."]
    return "\n".join(lines)


def problems(samples: Mapping[int, Sample]) -> list[str]:
    """What misses a goal, one line each."""
    best = max(sample.load.requests_per_s for sample in samples.values())
    unrefused = next(iter(samples.values()))
    found = []
    for multiple, sample in samples.items():
        load, cpu = sample.load, cpu_us_per_refusal(sample, unrefused)
        if load.error_count:
            found.append(f"{multiple} x: {load.error_count} errors, the first: {load.first_error}")
        if load.requests_per_s < LEAST_GOODPUT * best:
            found.append(f"{multiple} x: served {load.requests_per_s / best:.1%} of the best, not {LEAST_GOODPUT:.0%}")
        if cpu is not None and cpu > MOST_CPU_MS * 1000:
            found.append(f"{multiple} x: a refusal cost {cpu / 1000:.2f} ms of CPU, not {MOST_CPU_MS:g}")
        if load.refused and load.refusal_us.p99 > MOST_P99_MS * 1000:
            found.append(f"{multiple} x: p99 of refusals {load.refusal_us.p99 / 1000:.0f} ms, not {MOST_P99_MS:g}")
    return found
