"""One statement about batching with its computed evidence: charts, a table, and a verdict. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from loadtest.engine.scheduler import Batching, Limits
from loadtest.engine.step_time import kv_tokens
from loadtest.report.chart import (
    STYLES,
    X_END,
    X_START,
    Y_END,
    Y_START,
    Axis,
    Chart,
    ChartSeries,
    doubling,
    linear,
    logarithmic,
    nice_top,
)

BLOCK_TOKENS = 16
Line = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A common statement about batching, and the result of the simulated engine or the planner."""

    name: str
    _: KW_ONLY
    title: str
    statement: str
    verdict: str  # in a word or two
    finding: str
    charts: Sequence[Chart] = field(default_factory=list)
    head: Sequence[str] = field(default_factory=list)
    rows: Sequence[Sequence[str]] = field(default_factory=list)
    setting: str = ""  # what was computed, of which load


def chart(
    title: str,
    lines: Mapping[str, Line],
    x_title: str,
    y_title: str,
    *,
    note: str = "",
    x: Axis | None = None,
    unit: str = "",
    log: bool = False,
    bounds: Sequence[tuple[float, str]] = (),
    steps: bool = False,
) -> Chart:
    """Lines over powers of two, unless another horizontal axis is given; `log` is an axis of milliseconds."""
    places = sorted({at for line in lines.values() for at, _ in line})
    values = [value for line in lines.values() for _, value in line] + [value for value, _ in bounds]
    own = x or doubling(
        [round(at) for at in places], places[0] / 1.15, places[-1] * 1.15, start_px=X_START, end_px=X_END
    )
    y = (
        logarithmic(min(values), max(values), Y_START, Y_END)
        if log
        else linear(0, nice_top(max(values)), start_px=Y_START, end_px=Y_END, wanted=4, unit=unit)
    )
    series = [
        ChartSeries(name, STYLES[number % len(STYLES)], list(line), steps=steps)
        for number, (name, line) in enumerate(lines.items())
    ]
    shown = [] if x is not None and x.even else [f"{at:g}" for at, _ in series[0].points]
    return Chart(
        title, note=note, x=own, y=y, series=series, x_shown=shown, x_title=x_title, y_title=y_title, bounds=bounds
    )


def even(high: float, unit: str = "") -> Axis:
    return linear(0, high, start_px=X_START, end_px=X_END, wanted=6, unit=unit)


def limits(
    preset: str,
    max_num_seqs: int = 256,
    batched_tokens: int = 8192,
    *,
    gpus: int = 1,
    prefix_caching: bool = True,
    chunked: bool = True,
    batching: Batching = Batching.CONTINUOUS,
) -> Limits:
    """Those of an engine on the preset's GPUs, with the KV cache that they have."""
    blocks = kv_tokens(preset, gpus) // BLOCK_TOKENS
    return Limits(
        max_num_seqs,
        batched_tokens,
        block_size=BLOCK_TOKENS,
        num_blocks=blocks,
        prefix_caching=prefix_caching,
        chunked_prefill=chunked,
        batching=batching,
    )


def times(more: float, less: float) -> str:
    return f"{more / less:.1f}x" if less else "-"
