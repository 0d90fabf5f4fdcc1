"""The samples taken during the load, in words and charts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from loadtest.report.chart import STYLES, Y_END, Y_START, Axis, Chart, ChartSeries, Point, linear, nice_top
from loadtest.report.formatting import number, percent
from loadtest.report.schema import GpuSeries, PageSeries, Samples

_LEAST_SECONDS = 1.0
_MOST_POINTS = 500
_RECENT_SECONDS = 5.0
_BUSY_PERCENT = 85.0  # below it, the GPU waits for requests or for its host
_Line = tuple[str, Sequence[float], Sequence[float | None]]


def samples_rows(samples: Samples) -> list[tuple[str, str]]:
    """(what, how it was) for each GPU and page; a machine without a GPU has a row as well."""
    rows = [(f"GPU {gpu.name}", _gpu(gpu)) for gpu in samples.gpus]
    if samples.no_gpu or not samples.gpus:
        rows.append(("GPU", samples.no_gpu or "none"))
    return rows + [(f"metrics of {page.name}", _page(page)) for page in samples.pages]


def sample_charts(samples: Samples, time: Axis) -> Iterator[Chart]:
    """GPU utilisation, requests in the engines, and the usage and hits of their KV caches."""
    if samples.gpus:
        lines = [(gpu.name, gpu.at, gpu.utilization_percent) for gpu in samples.gpus]
        yield from _chart(
            "GPU utilisation",
            "from NVML, or exporters",
            time,
            lines,
            unit=" %",
            y_title="utilisation",
            bounds=[(_BUSY_PERCENT, "target: 85 %")],
        )
    requests: list[_Line] = []
    for page in samples.pages:
        requests += [(f"{page.name} running", page.at, page.running), (f"{page.name} waiting", page.at, page.waiting)]
    yield from _chart("Requests in the engines", "from their metrics, once a second", time, requests)
    used: list[_Line] = [(page.name, page.at, _percents(page.kv_cache_usage)) for page in samples.pages]
    yield from _chart("KV cache in use", "from the engines", time, used, unit=" %", y_title="of the KV cache")
    hits: list[_Line] = [
        (page.name, page.at, _percents(_recent_ratio(page.at, page.prefix_hits, page.prefix_queries)))
        for page in samples.pages
    ]
    note = f"of the prompt tokens looked up in the {_RECENT_SECONDS:g} s before"
    yield from _chart("Prefix cache hits", note, time, hits, unit=" %", y_title="of prompt tokens")


def _chart(
    title: str,
    note: str,
    time: Axis,
    lines: Sequence[_Line],
    unit: str = "",
    y_title: str = "requests",
    bounds: Sequence[tuple[float, str]] = (),
) -> Iterator[Chart]:
    known = [line for line in lines if _known(line[2])]
    if not known:
        return
    top = 100.0 if unit else nice_top(max(value for _, _, values in known for value in _known(values)))
    drawn = on_one_grid(known, time.high)
    yield Chart(
        title=title,
        note=note,
        x=time,
        y=linear(0, top, start_px=Y_START, end_px=Y_END, wanted=4, unit=unit),
        series=[
            ChartSeries(name, STYLES[number % len(STYLES)], points)
            for number, ((name, _, _), points) in enumerate(zip(known, drawn, strict=True))
        ],
        y_title=y_title,
        bounds=bounds,
    )


def on_one_grid(lines: Sequence[_Line], length_seconds: float) -> list[list[Point]]:
    """Lines with the same moments, so that one pointer finds them all: seconds, or longer in a long run.

    Where several samples fall together, the lowest and the highest of them are kept, in their order.
    """
    width = max(_LEAST_SECONDS, 2 * length_seconds / _MOST_POINTS)
    cells: list[dict[int, list[float]]] = []
    for _, at, values in lines:
        mine: dict[int, list[float]] = defaultdict(list)
        for moment, value in zip(at, values, strict=True):
            if value is not None:
                mine[int(max(0.0, moment) / width)].append(value)
        cells.append(mine)
    taken = range(min(map(min, cells)), max(map(max, cells)) + 1)
    return [[point for cell in taken for point in _extremes(_held(mine, cell), cell * width, width)] for mine in cells]


def _held(cells: Mapping[int, list[float]], cell: int) -> list[float] | None:
    """A slightly late reading leaves no gap."""
    return cells.get(cell) or cells.get(cell - 1)


def _extremes(values: Sequence[float] | None, start: float, width: float) -> Iterator[Point]:
    if not values:
        first = last = None
    else:
        first, last = sorted((min(values), max(values)), key=values.index)
    yield start, first
    yield start + width / 2, last


def _percents(ratios: Sequence[float | None]) -> list[float | None]:
    return [None if ratio is None else ratio * 100 for ratio in ratios]


def _recent_ratio(
    at: Sequence[float], parts: Sequence[float | None], wholes: Sequence[float | None]
) -> list[float | None]:
    """The growth of two totals over the last seconds, one as a share of the other; None without growth."""
    ratios: list[float | None] = []
    since = 0
    for index, moment in enumerate(at):
        while at[since] < moment - _RECENT_SECONDS:
            since += 1
        part, whole = _gained(parts[since : index + 1]), _gained(wholes[since : index + 1])
        ratios.append(part / whole if whole else None)
    return ratios


def _gpu(gpu: GpuSeries) -> str:
    busy, used, power = _known(gpu.utilization_percent), _known(gpu.memory_used_mib), _known(gpu.power_watts)
    parts = [f"busy {_mean(busy):.0f}% on average, {max(busy):.0f}% at most"] if busy else ["utilisation not reported"]
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
