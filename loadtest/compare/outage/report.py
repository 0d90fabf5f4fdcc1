"""The fates of requests in outage tests as tables, notes and one SVG file with a panel each. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from loadtest.compare.outage.schema import Fate, Fault, OutageFigures, OutageResults
from loadtest.drive.record import CONNECTION, ERROR_OBJECT, NOTHING, OTHER_ANSWER, SILENT_END
from loadtest.report.chart import X_END, X_START, Y_END, Y_START, Chart, ChartSeries, Point, linear, nice_top
from loadtest.report.formatting import milliseconds
from loadtest.report.sheet import sheet, style

TITLES = {Fault.KILL: "One engine is killed and started again", Fault.HANG: "One engine hangs and goes on"}
HEAD = [
    "proxy",
    "lost of sent",
    "answer begun",
    "no byte yet",
    "sent while away",
    "at other times",
    "held up",
    "steered away after",
    "TTFT p99 before / while away / after",
    "share again after",
    "reached engines",
    "failures show as",
]
_TTFT = ("ttft_p99_before", "ttft_p99_away", "ttft_p99_after")
_SHOWN_AS = {
    ERROR_OBJECT: "error object",
    OTHER_ANSWER: "other answer",
    SILENT_END: "silent end",
    CONNECTION: "broken connection",
    NOTHING: "nothing",
}


def rows(killed: OutageResults, fault: Fault, labels: Mapping[str, str]) -> list[list[str]]:
    """One for each proxy that has figures, of those with these labels. Requests are summed up, times are medians."""
    made = []
    for arm, label in labels.items():
        found = [turn.figures for turn in killed.turns_of(arm, fault) if turn.figures is not None]
        if found:
            made.append([label, *_cells(found)])
    return made


def _cells(found: Sequence[OutageFigures]) -> list[str]:
    fates = Counter[Fate]()
    for one in found:
        fates.update(one.fates)
    sent = sum(one.requests for one in found)
    return [
        f"{sum(one.lost for one in found)} of {sent}",
        *(str(fates[fate]) for fate in (Fate.BEGUN, Fate.NOT_BEGUN, Fate.WHILE_AWAY)),
        str(fates[Fate.LOST_BEFORE] + fates[Fate.AFTERWARDS]),
        str(fates[Fate.HELD_UP]),
        _middle([one.steered_away_seconds for one in found], _seconds),
        " / ".join(_middle([getattr(one, name) for one in found], milliseconds) for name in _TTFT),
        _middle([one.share_seconds for one in found], _seconds, "not in the run"),
        f"{sum(one.reached_engines for one in found) / max(sent, 1):.1%}",
        _shown_as(found),
    ]


def _middle(values: Sequence[float | None], shown: Callable[[float], str], otherwise: str = "-") -> str:
    known = [value for value in values if value is not None]
    return shown(median(known)) if known else otherwise


def _seconds(value: float) -> str:
    return f"{value:.1f} s"


def _shown_as(found: Sequence[OutageFigures]) -> str:
    shown = Counter[str]()
    for one in found:
        shown.update(one.shown_as)
    return ", ".join(f"{count} {_SHOWN_AS.get(kind, kind)}" for kind, count in shown.most_common()) or "-"


def notes(killed: OutageResults) -> list[str]:
    """How to read the tables, and what went wrong."""
    lines = [
        f"While an engine is away: {killed.load}. It is away from a third to two thirds of that time. Lost is what "
        "was not answered whole. Of that, an answer that had begun when the engine went cannot be saved; a request "
        "without a byte yet could have been sent again. Held up: streams that began only once the engine was let "
        "back, after more than a fifth of the client's patience. Steered away: when the last request was sent that "
        "was lost or held up. Share again: from when the engine serves until it gets half of the share of requests "
        "that it had before. Reached engines: requests that engines got, over those that clients sent. Requests are "
        "summed up over the repetitions, times are medians."
    ]
    lines += [f"{failure}." for failure in failures(killed)]
    for arm, fault in dict.fromkeys((turn.arm, turn.fault) for turn in killed.turns):
        errors = [turn.figures.first_error for turn in killed.turns_of(arm, fault) if turn.figures]
        lines += [f"{arm}, {fault}: {error.rstrip('.')}." for error in errors if error][:1]
    return lines


def failures(killed: OutageResults, arm: str | None = None) -> list[str]:
    """Which turns have no figures, of all arms or of one, and why."""
    return [
        f"{turn.arm}, {turn.fault}, repetition {turn.repetition + 1}: {turn.failure}"
        for turn in killed.turns
        if turn.failure and arm in (None, turn.arm)
    ]


_ANSWERED, _LOST, _MOMENT = style(0), style(1, strong=True), style(6)
_GOES = {Fault.KILL: "killed", Fault.HANG: "hanging"}


def picture(killed: OutageResults, arms: Sequence[str]) -> str:
    """Of those arms as one SVG file; empty where nothing was measured."""
    drawn = charts(killed, arms)
    if not drawn:
        return ""
    legend = [(_ANSWERED, "requests a second that were answered, by when they were sent"), (_LOST, "that were lost")]
    return sheet(drawn, [*legend, (_MOMENT, "the engine goes; it is let back; it serves again")])


def charts(killed: OutageResults, arms: Sequence[str]) -> list[Chart]:
    """One of each arm and fault, all repetitions together."""
    drawn = {
        (arm, fault): [turn.figures for turn in killed.turns_of(arm, fault) if turn.figures]
        for fault in Fault
        for arm in arms
    }
    drawn = {key: found for key, found in drawn.items() if found}
    if not drawn:
        return []
    right = max(span.start + _width(one) for found in drawn.values() for one in found for span in one.spans)
    top = max(value or 0.0 for found in drawn.values() for series in _rates(found) for _, value in series)
    return [_chart(f"{arm}, engine {_GOES[fault]}:", found, right, top) for (arm, fault), found in drawn.items()]


def _chart(title: str, found: Sequence[OutageFigures], right: float, top: float) -> Chart:
    answered, lost = _rates(found)
    high = nice_top(top)
    moments = [median(getattr(one, name) for one in found) for name in ("gone", "let_back", "serving")]
    series = [ChartSeries("moment", _MOMENT, [(moment, 0.0), (moment, high)]) for moment in dict.fromkeys(moments)]
    series += [ChartSeries("answered", _ANSWERED, answered, steps=True), ChartSeries("lost", _LOST, lost, steps=True)]
    note = "requests a second over seconds"
    x, y = (
        linear(0, right, start_px=X_START, end_px=X_END, wanted=6, unit=" s"),
        linear(0, high, start_px=Y_START, end_px=Y_END, wanted=4),
    )
    return Chart(title=title, note=note, x=x, y=y, series=series)


def _rates(found: Sequence[OutageFigures]) -> tuple[list[Point], list[Point]]:
    """Answered and lost requests a second, the mean of the repetitions."""
    answered: dict[float, float] = defaultdict(float)
    lost: dict[float, float] = defaultdict(float)
    for one in found:
        weight = 1 / _width(one) / len(found)
        for span in one.spans:
            answered[span.start] += span.answered * weight
            lost[span.start] += span.lost * weight
    end = max(answered) + _width(found[0])
    return _to_the_end(answered, end), _to_the_end(lost, end)


def _to_the_end(rates: Mapping[float, float], end: float) -> list[Point]:
    """A step begins at its point: the last one needs another."""
    points: list[Point] = [*sorted(rates.items())]
    return [*points, (end, points[-1][1])]


def _width(figures: OutageFigures) -> float:
    return figures.spans[1].start if len(figures.spans) > 1 else 1.0
