"""A sweep as one HTML page: winners, throughput against latency with numbered configurations, and all figures. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from loadtest.report.chart import (
    X_END,
    X_START,
    Y_END,
    Y_START,
    Axis,
    Chart,
    ChartSeries,
    linear,
    logarithmic,
    nice_top,
)
from loadtest.report.document import render
from loadtest.report.formatting import margin, milliseconds, number
from loadtest.report.schema import Environment
from loadtest.sweep.judge import GPU_FIGURES, LATENCIES, aim_of, figure_label, frontier
from loadtest.sweep.plan import Objective, Way
from loadtest.sweep.schema import ConfigurationResult, SweepOutcome, Winner, unsure

_STRETCHED = 10.0  # beyond that ratio of latencies their axis is logarithmic
WAYS: Mapping[Way, str] = {"direct": "direct", "gateway": "through the gateway"}


@dataclass(frozen=True, slots=True)
class _ConfigurationRow:
    """A configuration in the table; `style` is a class of the style sheet."""

    cells: list[str]
    pages: Sequence[str]
    complaints: str
    _: KW_ONLY
    style: str


@dataclass(frozen=True, slots=True)
class _Section:
    """A workload, direct or through the gateway."""

    title: str
    winner: Winner | None
    _: KW_ONLY
    unsure: str
    first_plot: int
    charts: list[Chart]
    head: list[str]
    rows: list[_ConfigurationRow]


def sweep_page(
    found: SweepOutcome,
    objective: Objective,
    environment: Environment | None,
    pages: Mapping[tuple[str, Way, str], Sequence[str]],
) -> str:
    """The whole page. `environment` of one of the runs; `pages` of runs by workload, way and label."""
    sections: list[_Section] = []
    for workload, way in dict.fromkeys((entry.workload, entry.through) for entry in found.entries):
        first = sum(len(section.charts) for section in sections)
        sections.append(_section(found, objective, workload=workload, way=way, pages=pages, first_plot=first))
    return render(
        "sweep.html",
        "Sweep of configurations",
        aim_of(objective),
        [chart for section in sections for chart in section.charts],
        found=found,
        sections=sections,
        answers=_answers(found, objective),
        tested=_tested(found, environment),
        failed={entry.label: entry for entry in found.entries if entry.log},
    )


def _section(
    found: SweepOutcome,
    objective: Objective,
    workload: str,
    way: Way,
    pages: Mapping[tuple[str, Way, str], Sequence[str]],
    first_plot: int,
) -> _Section:
    entries = found.of(workload, way)
    flags = varied(entries)
    watched = [name for name in GPU_FIGURES if any(name in entry.figures for entry in entries)]
    won = next((one for one in found.winners if one.workload == workload), None)
    base = next((entry.value for entry in entries if entry.label == next(iter(found.gpus), "")), None)
    maximised = figure_label(objective.maximise.value)
    decided = way == next(entry.through for entry in found.entries if entry.workload == workload)
    tied = [won.label, *won.tied] if decided and won is not None and won.tied else []
    rows = []
    for place, entry in enumerate(entries, 1):
        cells = [str(place), *(flag_text(entry.flags.get(flag)) for flag in flags), _maximised(entry, tied)]
        cells.append("-" if not base or entry.value is None else f"{entry.value / base:.2f}x")
        latencies = [entry.figures.get(name) for name in LATENCIES]
        cells += [milliseconds(None if seconds is None else seconds * 1e3) for seconds in latencies]
        cells += [number(entry.figures.get(name)) for name in watched]
        cells.append(f"{entry.runs}" if entry.share == 1 else f"{entry.runs} of {entry.share:.0%}")
        won_it = won is not None and won.label == entry.label
        style = "won" if won_it else "" if entry.fits else "soft" if entry.value is not None else "bad"
        rows.append(
            _ConfigurationRow(
                cells, pages.get((workload, way, entry.label), []), "; ".join(entry.complaints), style=style
            )
        )
    return _Section(
        title=f"{workload}, {WAYS[way]}",
        winner=won,
        unsure=unsure(won) if won is not None else "",
        first_plot=first_plot,
        charts=_charts(entries, objective, won),
        head=[
            "",
            *flags,
            f"{maximised}, ± 95 % confidence",
            "over the first",
            *map(figure_label, (*LATENCIES, *watched)),
            "runs",
        ],
        rows=rows,
    )


def _maximised(entry: ConfigurationResult, tied: Collection[str]) -> str:
    text = number(entry.value) + margin(entry.value or 0.0, entry.interval)
    return f"{text}, tie" if entry.label in tied else text


def _answers(found: SweepOutcome, objective: Objective) -> list[tuple[str, str, str, str]]:
    """Workload, what won it, its command, and why it is no clear winner."""
    answers = []
    for workload in dict.fromkeys(entry.workload for entry in found.entries):
        won = next((one for one in found.winners if one.workload == workload), None)
        if won is None:
            why = "No configuration keeps within the limits." if found.finished else "Not finished."
            answers.append((workload, why, "", ""))
        else:
            text = f"{won.label}: {number(won.value)} {figure_label(objective.maximise.value)}"
            answers.append((workload, text, won.command, unsure(won)))
    return answers


def _tested(found: SweepOutcome, environment: Environment | None) -> list[tuple[str, str]]:
    plan: Mapping[str, Any] = found.plan
    serve = {name: value for name, value in plan.get("serve", {}).items() if value is not None}
    same = {
        flag: flag_text(value)
        for flag, value in (found.entries[0].flags if found.entries else {}).items()
        if flag not in varied(found.entries)
    }
    facts = {
        "server": " ".join(map(str, serve.get("command") or [])) or _words(serve),
        "flags of all": ", ".join(f"--{flag} {value}" for flag, value in same.items()),
        "configurations": f"{len(found.gpus)}, and {len(found.left_out)} not tried",
        "GPUs": str(plan.get("gpus") or ""),
    }
    for workload in plan.get("workloads", []):
        load = ", ".join(f"{name} {value}" for name, value in workload["run"].items() if value is not None)
        facts[f"load {workload['name']}"] = load
    if environment is not None:
        facts["engine"] = ", ".join(f"{name} {value}" for name, value in environment.server.items())
        facts["client"] = ", ".join(f"{name} {value}" for name, value in environment.versions.items())
        facts["machine"] = ", ".join(f"{name} {value}" for name, value in environment.host.items())
    return [(name, value) for name, value in facts.items() if value]


def _words(values: Mapping[str, Any]) -> str:
    """Names with their values, as "simulated preset card-8b"."""
    return ", ".join(
        f"{name} {_words(value) if isinstance(value, Mapping) else value}" for name, value in values.items()
    )


def _charts(entries: Sequence[ConfigurationResult], objective: Objective, won: Winner | None) -> list[Chart]:
    """For each latency that was measured: what is maximised against it; whole and valid runs alone."""
    numbered = {entry.label: place for place, entry in enumerate(entries, 1)}
    charts = []
    for name in LATENCIES:
        whole = [entry for entry in entries if entry.share == 1 and entry.valid]
        measured = [entry for entry in whole if name in entry.figures and entry.value]
        if measured:
            charts.append(_chart(measured, name, objective, won=won, numbered=numbered))
    return charts


def _chart(
    measured: Sequence[ConfigurationResult],
    name: str,
    objective: Objective,
    won: Winner | None,
    numbered: Mapping[str, int],
) -> Chart:
    at = {entry.label: (entry.figures[name] * 1e3, entry.value or 0.0) for entry in measured}
    kept = frontier(list(at), lambda label: at[label][0], lambda label: at[label][1])
    bound = objective.bounds.get(name)
    latencies = [x for x, _ in at.values()] + ([bound * 1e3] if bound is not None else [])
    ends = {at[one.label]: one.interval or (at[one.label][1], at[one.label][1]) for one in measured}
    # Of two runs an interval can be so long that its end is left outside.
    top = max(max(y, min(ends[x, y][1], 2 * y)) for x, y in at.values())
    series = [ChartSeries("frontier", "s1", [at[label] for label in kept], spread=[ends[at[label]] for label in kept])]
    for title, style, fits in (("within the limits", "s3 apart", True), ("beyond the limits", "s2 apart", False)):
        its = sorted(at[one.label] for one in measured if one.fits == fits and one.label not in kept)
        series += [ChartSeries(title, style, its, spread=[ends[place] for place in its])] if its else []
    return Chart(
        title=f"{figure_label(objective.maximise.value).capitalize()} against {figure_label(name)}",
        note="numbers are those of the table; up and left is better; whiskers: 95 % confidence",
        x=_latency_axis(latencies),
        y=linear(0, nice_top(top), start_px=Y_START, end_px=Y_END, wanted=4),
        series=series,
        x_title=figure_label(name),
        y_title=figure_label(objective.maximise.value),
        uprights=[] if bound is None else [(bound * 1e3, f"limit: {milliseconds(bound * 1e3)}")],
        labels=[(*place, str(numbered[label])) for label, place in at.items()],
        ringed=[at[won.label]] if won is not None and won.label in at else [],
    )


def _latency_axis(milliseconds_: Sequence[float]) -> Axis:
    low, high = min(milliseconds_), max(milliseconds_)
    if high > _STRETCHED * low:
        return logarithmic(low, high, X_START, X_END)
    return linear(0, nice_top(high), start_px=X_START, end_px=X_END, wanted=6, unit=" ms")


def varied(entries: Sequence[ConfigurationResult]) -> list[str]:
    """Flags that do not have the same value in all configurations."""
    names = dict.fromkeys(flag for entry in entries for flag in entry.flags)
    return [flag for flag in names if len({flag_text(entry.flags.get(flag)) for entry in entries}) > 1]


def flag_text(value: object) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
