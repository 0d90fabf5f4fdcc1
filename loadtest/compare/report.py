"""A comparison as Markdown with the notes on its tables, and TTFT percentiles of all arms as one SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from loadtest.compare.outage.report import notes as outage_notes
from loadtest.compare.peers import OURS
from loadtest.compare.schema import DIRECT, ArmRun, Comparison
from loadtest.compare.tables import QUALITY, Table, cell, has_figures, measured_arms, tables, winners
from loadtest.console import markdown_table
from loadtest.report.chart import X_END, X_START, Y_END, Y_START, Chart, ChartSeries, Point, logarithmic, percentiles
from loadtest.report.formatting import milliseconds
from loadtest.report.sheet import sheet, style
from loadtest.report.statistics import percentile

_FEW_REQUESTS = 100
_SHARED = 0.1


def markdown(comparison: Comparison) -> str:
    """Everything, as it can be put into a README."""
    shown = "\n\n".join(f"{table.title}:\n\n{_markdown(table)}" for table in tables(comparison))
    ahead = winners(comparison)
    parts = [shown] if shown else []
    parts += ["Best medians: " + "; ".join(ahead) + "."] if ahead else []
    return "\n\n".join([*parts, *notes(comparison)]) + "\n"


def _markdown(table: Table) -> str:
    rows = [
        [f"**{text}**" if (number, at) in table.best else text for at, text in enumerate(row)]
        for number, row in enumerate(table.rows)
    ]
    return markdown_table(table.head, rows, texts=1)


def notes(comparison: Comparison) -> list[str]:
    """How it was measured, and what went wrong."""
    setup, where = comparison.setup, comparison.environment
    repetitions = len({turn.repetition for turn in comparison.turns})
    under = f"Model {setup.model} on {setup.engines}. {setup.load}" + (f", SLO {setup.slo}" if setup.slo else "")
    memory = int(where.host["memory_bytes"]) / 2**30
    machine = f"{where.host['cpu']}, {where.host['cpus']} cores, {memory:.0f} GiB, {where.host['system']}"
    of_workload = [
        f"{under}. Medians (± 95 % confidence) of {repetitions} repetition{'s' if repetitions != 1 else ''}, each with "
        "all arms in another order on the same prompts, each arm started anew with cold caches. Hit rates are the "
        "engines' own counters; latencies run from when a request was due. Bold: the best median of a column; a tie is "
        "what the repetitions do not separate from it.",
        *_of_cost(comparison),
        *_of_percentiles(comparison),
        *_of_others(comparison),
    ]
    lines = [
        *(of_workload if comparison.turns else [f"Model {setup.model} on {setup.engines}."]),
        *(outage_notes(comparison.killed) if comparison.killed else []),
        f"Policies: {'; '.join(f'{arm.name} {arm.policy}' for arm in comparison.arms if not arm.missing)}.",
        f"{machine}; {where.started_at[:10]}; `{' '.join(where.command[1:])}`.",
    ]
    lines += [f"Not here: {arm.name} ({arm.missing})." for arm in comparison.arms if arm.missing]
    for arm in comparison.arms:
        lines += _complaints(arm.name, [turn for turn in comparison.turns if turn.arm == arm.name])
    return lines + [f"Failed: {reason}." for reason in comparison.reasons]


def _of_percentiles(comparison: Comparison) -> list[str]:
    measured = [found for name in measured_arms(comparison) for found in has_figures(comparison.turns_of(name))]
    fewest = min((found.requests for found in measured), default=_FEW_REQUESTS)
    return [f"p99 of {fewest} requests is their maximum."] if fewest < _FEW_REQUESTS else []


def _of_others(comparison: Comparison) -> list[str]:
    shares = [
        (found.others_share, turn.folder)
        for name in measured_arms(comparison)
        for turn in comparison.turns_of(name)
        if (found := turn.figures) is not None and found.others_share is not None
    ]
    most, folder = max(shares, default=(0.0, ""))
    if most <= _SHARED:
        return []
    return [
        f"Other processes used up to {most:.0%} of the machine ({folder}), {median(share for share, _ in shares):.0%} "
        "in the median run: latencies and rates are unreliable."
    ]


def _of_cost(comparison: Comparison) -> list[str]:
    turns = [turn for name in measured_arms(comparison) for turn in comparison.turns_of(name) if name != DIRECT]
    added = [turn.overhead.added for turn in turns if turn.overhead.added]
    alone = any(turn.overhead.cpu_us_per_request is not None for turn in turns)
    lines = []
    if added:
        direct = milliseconds(median(one.direct_p50 for one in added))
        lines.append(
            f"Added latency: single requests of one token, {added[0].pairs} with and {added[0].pairs} without the "
            f"proxy, in turns; percentiles of the differences. Without, the median is {direct}."
        )
    if turns:
        how = (
            "of whole answers of one token, 16 at once, and of streams of 100 tokens, 32 at once"
            if alone
            else "under the workload, divided by its requests and by its streamed events"
        )
        lines.append(f"CPU is that of the proxy's whole process tree {how}; memory is its Pss.")
    return [" ".join(lines)] if lines else []


def _complaints(name: str, turns: list[ArmRun]) -> list[str]:
    lines = [f"{name}, repetition {turn.repetition + 1}: {turn.failure}." for turn in turns if turn.failure]
    if any(turn.passes_salt is False for turn in turns):
        lines.append(f"{name} does not pass `cache_salt` on: only emptied caches are cold for it.")
    lines += [f"{name}: {figures.first_error}." for figures in has_figures(turns) if figures.failed][:1]
    spoilt = [turn for turn in turns if turn.figures is not None and not turn.valid]
    if spoilt:
        many = f"{len(spoilt)} of {len(turns)} runs"
        lines.append(
            f"{name}: {many} cannot be believed: {spoilt[0].reasons[0] if spoilt[0].reasons else 'ended early'}."
        )
    return lines


def reasons_of(turns: list[ArmRun]) -> list[str]:
    """Why the comparison fails: ours did, or the client was the limit."""
    ours = [turn for turn in turns if turn.arm == OURS]
    reasons = [f"{OURS}, repetition {turn.repetition + 1}: {turn.failure}" for turn in ours if turn.failure]
    reasons += [
        f"{OURS}, repetition {turn.repetition + 1}: {'; '.join(turn.reasons)}"
        for turn in ours
        if not turn.failure and turn.valid and not turn.passed
    ]
    return reasons + [
        f"{turn.arm}, repetition {turn.repetition + 1}: invalid: {'; '.join(turn.reasons) or 'ended early'}"
        for turn in turns
        if not turn.valid
    ]


_PERCENTS = (*range(0, 90, 2), *(90 + step / 2 for step in range(20)), 99.9, 100)
_HIT_RATE, *_ = QUALITY


def picture(comparison: Comparison) -> str:
    """TTFT of all arms as one SVG file; empty where nothing was streamed."""
    chart = ttft_chart(comparison)
    if chart is None:
        return ""
    return sheet([chart], [(one.style, _legend(comparison, one.name)) for one in chart.series])


def ttft_chart(comparison: Comparison) -> Chart | None:
    """All repetitions together; None where nothing was streamed."""
    drawn = {
        name: sorted(value for figures in has_figures(comparison.turns_of(name)) for value in figures.ttft_ms)
        for name in measured_arms(comparison)
    }
    drawn = {name: values for name, values in drawn.items() if values}
    if not drawn:
        return None
    fewest = min(len(values) for values in drawn.values())
    shown = [percent for percent in _PERCENTS if percent == 100 or (100 - percent) / 100 * fewest >= 1]
    return Chart(
        title="TTFT",
        note="by percentile, all repetitions together",
        x=percentiles(fewest, X_START, X_END),
        y=logarithmic(
            min(values[0] for values in drawn.values()), max(values[-1] for values in drawn.values()), Y_START, Y_END
        ),
        series=[
            ChartSeries(name, _style(number, name), _points(values, shown))
            for number, (name, values) in enumerate(drawn.items())
        ],
        x_shown=["max" if percent == 100 else f"p{percent:g}" for percent in shown],
    )


def _points(ordered: Sequence[float], percents: Sequence[float]) -> list[Point]:
    return [(percent, percentile(ordered, percent)) for percent in percents]


def _style(number: int, name: str) -> str:
    return style(number, strong=name == OURS)


def _legend(comparison: Comparison, name: str) -> str:
    hits = cell(comparison.turns_of(name), _HIT_RATE)
    return name if hits is None else f"{name}: {hits.median:.0%} of prompt tokens found in a cache"
