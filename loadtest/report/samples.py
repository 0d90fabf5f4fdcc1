"""What was watched beside the load, in words and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loadtest.report.axes import Axis, linear, nice_top
from loadtest.report.chart import Y_END, Y_START, Chart, Series
from loadtest.report.figure import number, percent
from loadtest.report.schema import GpuSeries, PageSeries, Samples

_STYLES = ("s1", "s2", "s3", "s1 dashed", "s2 dashed", "s3 dashed")
_Line = tuple[str, Sequence[float], Sequence[float | None]]


def samples_told(samples: Samples) -> list[tuple[str, str]]:
    """(what, how it was) for each GPU and page; that there is no GPU is told as well."""
    told = [(f"GPU {gpu.name}", _gpu(gpu)) for gpu in samples.gpus]
    if samples.no_gpu or not samples.gpus:
        told.append(("GPU", samples.no_gpu or "none"))
    return told + [(f"metrics of {page.name}", _page(page)) for page in samples.pages]


def sample_charts(samples: Samples, time: Axis) -> Iterator[Chart]:
    """GPU utilisation, requests in the engines, and how full their KV caches were."""
    if samples.gpus:
        lines = [(gpu.name, gpu.at, gpu.utilization_percent) for gpu in samples.gpus]
        yield _chart("GPU utilisation", "percent, as nvidia-smi tells it", time, lines, top=100.0)
    requests: list[_Line] = []
    for page in samples.pages:
        requests += [(f"{page.name} running", page.at, page.running), (f"{page.name} waiting", page.at, page.waiting)]
    requests = [line for line in requests if _known(line[2])]
    if requests:
        yield _chart("Requests in the engines", "as their metrics tell it, once a second", time, requests)
    used: list[_Line] = [
        (page.name, page.at, [None if value is None else value * 100 for value in page.kv_cache_usage])
        for page in samples.pages
        if _known(page.kv_cache_usage)
    ]
    if used:
        yield _chart("KV cache in use", "percent", time, used, top=100.0)


def _chart(title: str, note: str, time: Axis, lines: Sequence[_Line], top: float | None = None) -> Chart:
    highest = max((value for _, _, values in lines for value in _known(values)), default=1.0)
    return Chart(
        title=title,
        note=note,
        x=time,
        y=linear(0, top or nice_top(highest), Y_START, Y_END, 4),
        series=[
            Series(name, _STYLES[number % len(_STYLES)], [(max(0.0, a), v) for a, v in zip(at, values, strict=True)])
            for number, (name, at, values) in enumerate(lines)
        ],
    )


def _gpu(gpu: GpuSeries) -> str:
    busy, used, power = _known(gpu.utilization_percent), _known(gpu.memory_used_mib), _known(gpu.power_watts)
    parts = [f"busy {_mean(busy):.0f}% on average, {max(busy):.0f}% at most"] if busy else ["utilisation not told"]
    if used and gpu.memory_total_mib:
        parts.append(f"{max(used) / 1024:.1f} of {gpu.memory_total_mib / 1024:.1f} GiB")
    if power:
        parts.append(f"{_mean(power):.0f} W")
    return ", ".join(parts)


def _page(page: PageSeries) -> str:
    if not page.at:
        return f"never read ({page.failures} failures)"
    parts = [
        f"{name} {number(_mean(values))} on average, {number(max(values))} at most"
        for name, values in (("running", _known(page.running)), ("waiting", _known(page.waiting)))
        if values
    ]
    if usage := _known(page.kv_cache_usage):
        parts.append(f"KV cache {percent(max(usage))} at most")
    if looked_up := _gained(page.prefix_queries):
        parts.append(f"{percent(_gained(page.prefix_hits) / looked_up)} prefix hits")
    if preempted := _gained(page.preemptions):
        parts.append(f"{number(preempted)} preemptions")
    return "; ".join(parts) or "nothing that is known here"


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _gained(totals: Sequence[float | None]) -> float:
    known = _known(totals)
    return known[-1] - known[0] if known and known[-1] > known[0] else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
