"""What is maximised against what is bounded, with the frontier: one SVG a workload. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadtest.report.axes import linear, nice_top
from loadtest.report.chart import X_END, X_START, Y_END, Y_START, Chart, Series
from loadtest.report.sheet import sheet, style
from loadtest.sweep.judge import LATENCIES, told_name
from loadtest.sweep.outcome import Entry
from loadtest.sweep.plan import Objective
from loadtest.sweep.search import frontier

_LINE, _GREY, _BOUND = style(6), style(6), style(5)
_COLOURS = 5  # the sixth and seventh are the bound's and that of the line


def pareto(entries: Sequence[Entry], objective: Objective) -> str | None:
    """A chart for each latency that was measured; None where no configuration has both figures."""
    measured = {name: found for name in LATENCIES[:2] if (found := [one for one in entries if name in one.figures])}
    on_a_frontier = dict.fromkeys(label for name, found in measured.items() for label in _frontier(found, name))
    best = {label: style(number % _COLOURS) for number, label in enumerate(on_a_frontier)}
    charts = [_chart(found, name, objective, best) for name, found in measured.items()]
    if not charts:
        return None
    legend = [(colour, label) for label, colour in best.items()]
    legend += [(_LINE, "frontier; grey dots are on none")]
    legend += [(_BOUND, "bound")] if objective.bounds else []
    return sheet(charts, legend)


def _frontier(entries: Sequence[Entry], name: str) -> list[str]:
    costs, worths = _points(entries, name)
    return frontier(list(costs), costs.__getitem__, worths.__getitem__)


def _points(entries: Sequence[Entry], name: str) -> tuple[dict[str, float], dict[str, float]]:
    return {one.label: one.figures[name] for one in entries}, {one.label: one.value or 0.0 for one in entries}


def _chart(entries: Sequence[Entry], name: str, objective: Objective, best: Mapping[str, str]) -> Chart:
    """`best` has the colours of configurations that are on the frontier of this chart or another."""
    costs, worths = _points(entries, name)
    kept = _frontier(entries, name)
    bound = objective.bounds.get(name)
    right = nice_top(max([*costs.values(), *([bound] if bound is not None else [])]))
    top = nice_top(max(worths.values()))
    series = [Series("frontier", _LINE, [(costs[label], worths[label]) for label in kept], steps=True)]
    if bound is not None:
        series.append(Series("bound", _BOUND, [(bound, 0.0), (bound, top)]))
    series += [
        Series(label, best.get(label, _GREY), [(costs[label], worths[label])])
        for label in sorted(costs, key=lambda label: label in best)
    ]
    return Chart(
        title=f"{told_name(objective.maximise.value)} against {told_name(name)}",
        note="in seconds; up and left is better",
        x=linear(0, right, X_START, X_END, 6),
        y=linear(0, top, Y_START, Y_END, 4),
        series=series,
    )
