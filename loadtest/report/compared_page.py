"""Runs, or series, side by side on one page, each against the first; folders can be dropped on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from loadtest.drive.record import Record
from loadtest.report.chart import (
    STYLES,
    X_END,
    X_START,
    Y_END,
    Y_START,
    Chart,
    ChartSeries,
    linear,
    logarithmic,
    nice_top,
)
from loadtest.report.chart import Point as ChartPoint
from loadtest.report.diff import Pair, Significance, change_text, colour, made_of
from loadtest.report.document import render
from loadtest.report.files import Saved, column
from loadtest.report.run_charts import curves
from loadtest.report.schema import Bucket, Results
from loadtest.report.series import FIGURES, UNITS, Point, Series
from loadtest.report.series_charts import series_charts, trade_off
from loadtest.report.series_tables import spread_text, title_of
from loadtest.report.single_requests import e2e_seconds, ttft_seconds

_OVER_TIME = (("ttft_p50", "TTFT p50"), ("ttft_p95", "TTFT p95"), ("tpot_p50", "TPOT p50"), ("e2e_p95", "E2E p95"))
_KINDS = {"attainment": "ratio", "hit_ratio": "ratio", "failed_ratio": "ratio"}


@dataclass(frozen=True, slots=True)
class _Cell:
    """A figure of one side; `style` is a class of the style sheet."""

    text: str
    change: str = ""
    style: str = ""


@dataclass(frozen=True, slots=True)
class _FigureRow:
    """A figure of all sides; the script that adds sides finds it by its column in results.csv."""

    title: str
    column: str
    kind: str
    _: KW_ONLY
    first: float | None
    cells: list[_Cell]


@dataclass(frozen=True, slots=True)
class _Place:
    """A target under a load."""

    title: str
    target: str
    load: str
    _: KW_ONLY
    rows: list[_FigureRow]


@dataclass(frozen=True, slots=True)
class _RunSide:
    """A run among others on a page: its name, and its style in charts."""

    name: str
    style: str
    run: Results
    _: KW_ONLY
    records: Sequence[Record]


def compared_page(
    saved: Sequence[Saved],
    paired: Sequence[Sequence[Pair]],
    checkpoints: Sequence[Mapping[str, Any]],
    broken: Sequence[str] = (),
) -> str:
    """The whole page. `paired`: each of the others against the first one; `checkpoints`: further facts about the making
    of each; `broken`: the broken rules.
    """
    names = _names(saved)
    sides = [one.series for one in saved]
    matched = [point for point in sides[0].points if any(pair.before is point for pairs in paired for pair in pairs)]
    return render(
        "compared.html",
        f"{len(saved)} load tests compared",
        " · ".join(names),
        _charts(saved, names),
        more_scripts=["folders.js"],
        names=names,
        styles=[STYLES[number % len(STYLES)] for number in range(len(names))],
        saved=saved,
        broken=broken,
        made_head=("", *names),
        made=made_of(sides, checkpoints),
        places=[_place(sides, paired, point) for point in matched or sides[0].points[:1]],
        unmatched=_unmatched(sides, paired, names),
    )


def _names(saved: Sequence[Saved]) -> list[str]:
    """Folders by their last name, or by their whole path where that is not enough."""
    short = [one.folder.resolve().name for one in saved]
    counts = Counter(short)
    return [name if counts[name] == 1 else str(one.folder) for name, one in zip(short, saved, strict=True)]


def _place(sides: Sequence[Series], paired: Sequence[Sequence[Pair]], first: Point) -> _Place:
    its = [next((pair for pair in pairs if pair.before is first), None) for pairs in paired]
    rows = []
    for name in FIGURES:
        if name not in first.figures and not any(pair and name in pair.after.figures for pair in its):
            continue
        spread = first.figures.get(name)
        cells = [_Cell(spread_text(name, spread)), *(_cell(name, pair) for pair in its)]
        kind = _KINDS.get(name, UNITS[name])
        rows.append(
            _FigureRow(title_of(name), column(name), kind, first=None if spread is None else spread.median, cells=cells)
        )
    alone = len(sides[0].points) == 1
    return _Place("" if alone else f"{first.target} {first.load}".strip(), first.target, first.load, rows=rows)


def _cell(name: str, pair: Pair | None) -> _Cell:
    if pair is None:
        return _Cell("-")
    text = spread_text(name, pair.after.figures.get(name))
    change = next((change for change in pair.changes if change.figure == name), None)
    if change is None:
        return _Cell(text)
    note = {Significance.NO: ", tie", Significance.REDEFINED: ", defined otherwise"}.get(change.significance, "")
    return _Cell(text, change_text(change) + note, colour(change) or "soft")


def _unmatched(sides: Sequence[Series], paired: Sequence[Sequence[Pair]], names: Sequence[str]) -> list[str]:
    """Targets and loads that the first side does not have, or that it has alone."""
    known = [id(pair.before) for pairs in paired for pair in pairs]
    found = [f"{names[0]}: {p.target} {p.load}".strip() for p in sides[0].points if id(p) not in known]
    for name, side, pairs in zip(names[1:], sides[1:], paired, strict=True):
        known = [id(pair.after) for pair in pairs]
        found += [f"{name}: {p.target} {p.load}".strip() for p in side.points if id(p) not in known]
    return found


def _charts(saved: Sequence[Saved], names: Sequence[str]) -> list[Chart]:
    runs = [
        _RunSide(name, STYLES[number % len(STYLES)], one.run, records=one.records)
        for number, (name, one) in enumerate(zip(names, saved, strict=True))
        if one.run is not None
    ]
    points = [
        point.model_copy(
            update={"target": f"{name}: {point.target}" if point.target else name, "load": point.load or name}
        )
        for name, one in zip(names, saved, strict=True)
        for point in one.series.points
    ]
    together = saved[0].series.model_copy(update={"points": points, "differences": []})
    if len(runs) == len(saved):
        return [*trade_off(together), *_over_time(runs), *_distributions(runs)]
    return series_charts(together)


def _over_time(sides: Sequence[_RunSide]) -> Iterator[Chart]:
    """Latencies and tokens of all runs over the same seconds."""
    x = linear(
        0, max(1e-3, *(side.run.overall.end for side in sides)), start_px=X_START, end_px=X_END, wanted=8, unit=" s"
    )
    for name, title in _OVER_TIME:
        lines = [line for side in sides if (line := _line(side, name)) is not None]
        values = [value for line in lines for _, value in line.points if value is not None]
        if values:
            y = logarithmic(min(values), max(values), Y_START, Y_END)
            yield Chart(f"{title} over time", note="", x=x, y=y, series=lines, y_title=title)
    lines = [line for side in sides if (line := _line(side, "output_tokens_per_second")) is not None]
    top = max((value for line in lines for _, value in line.points if value is not None), default=0.0)
    if top:
        y = linear(0, nice_top(top), start_px=Y_START, end_px=Y_END, wanted=4)
        yield Chart("Output tokens per second", note="", x=x, y=y, series=lines, y_title="tokens/s")


def _line(side: _RunSide, name: str) -> ChartSeries | None:
    buckets = side.run.timeline
    return ChartSeries(side.name, side.style, _points(buckets, name)) if buckets else None


def _points(buckets: Sequence[Bucket], name: str) -> list[ChartPoint]:
    width = buckets[1].start - buckets[0].start if len(buckets) > 1 else 1.0
    return [(bucket.start + width / 2, getattr(bucket, name)) for bucket in buckets]


def _distributions(sides: Sequence[_RunSide]) -> Iterator[Chart]:
    """TTFT and E2E of the runs with known requests."""
    for kind, latency in (("TTFT", ttft_seconds), ("E2E", e2e_seconds)):
        found = [(side, [value * 1e3 for one in side.records if (value := latency(one)) is not None]) for side in sides]
        chart = curves([(side.name, side.style, its) for side, its in found if its], "from the intended send")
        if chart is not None:
            yield replace(chart, title=f"Distribution of {kind}", y_title=kind)
