"""What is maximised against what is bounded, with the frontier: one SVG a workload. Pure."""

from __future__ import annotations

from collections.abc import Sequence

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
    best: dict[str, str] = {}
    charts = [
        chart
        for name in LATENCIES[:2]
        if (chart := _chart([entry for entry in entries if name in entry.figures], name, objective, best)) is not None
    ]
    if not charts:
        return None
    legend = [(colour, label) for label, colour in best.items()]
    legend += [(_LINE, "frontier, and what lies behind it")]
    legend += [(_BOUND, "bound")] if objective.bounds else []
    return sheet(charts, legend)


def _chart(entries: Sequence[Entry], name: str, objective: Objective, best: dict[str, str]) -> Chart | None:
    """`best` has the colours of configurations that are on the frontier of a chart."""
    if not entries:
        return None
    costs = {entry.label: entry.figures[name] for entry in entries}
    worths = {entry.label: entry.value or 0.0 for entry in entries}
    kept = frontier(list(costs), costs.__getitem__, worths.__getitem__)
    for label in kept:
        best.setdefault(label, style(len(best) % _COLOURS))
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
