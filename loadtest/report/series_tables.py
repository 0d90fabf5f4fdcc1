"""The tables of a series, as text cells for the terminal and for the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from loadtest.report.formatting import margin, milliseconds, number, percent
from loadtest.report.schema import Interval, Results
from loadtest.report.series import UNITS, Difference, Point, Series, Spread

_INTERVAL = "(95 % confidence interval)"
Table = tuple[str, list[str], list[list[str]]]
_PAIR = 2
# What no figure of that name exceeds.
_MOST = {"attainment": 1.0, "hit_ratio": 1.0, "failed_ratio": 1.0, "gpu_percent": 100.0}
_UNITS = {"attainment": percent, "hit_ratio": percent, "failed_ratio": percent}
_RATES = (
    "requests_per_second",
    "output_tokens_per_second",
    "output_tokens_per_second_per_user",
    "audio_seconds_per_second",
    "goodput_per_second",
    "attainment",
    "gpu_percent",
    "gpu_watts",
    "tokens_per_joule",
    "failed_ratio",
)
_LATENCIES = ("ttft_p50", "ttft_p95", "tpot_p50", "e2e_p50", "e2e_p95", "hit_ratio")
_MOST_TELLING = ("requests_per_second", "ttft_p50", "tpot_p50", "e2e_p50")
_MOST_TELLING_RATIOS = ("output_tokens_per_second", "ttft_p50", "e2e_p50")
_TITLES = {
    "requests_per_second": "requests/s",
    "output_tokens_per_second": "tokens/s",
    "output_tokens_per_second_per_user": "tokens/s and user",
    "prompt_tokens_per_second": "prompt tokens/s",
    "audio_seconds_per_second": "audio s/s",
    "goodput_per_second": "goodput/s",
    "attainment": "in SLO",
    "gpu_percent": "GPU %",
    "gpu_watts": "GPU W",
    "tokens_per_joule": "tokens/J",
    "failed_ratio": "failed",
    "hit_ratio": "cache hits",
    "peak_in_flight": "peak in flight",
}


def tables(series: Series, *, compact: bool = False) -> list[Table]:
    """Title, head and rows of each; columns without figures are left out.

    Compact: the farther end of the interval in percent of the median.
    """
    spread = "± 95 % confidence" if compact else _INTERVAL
    made = [
        _points(f"Rates and goodput: median {spread}", series.points, _RATES, compact),
        _points(f"Latency from the intended send: median {spread}", series.points, _LATENCIES, compact),
    ]
    if series.differences:
        against = series.differences[0].against
        made.append(_differences(f"Less {against}, pair by pair: median {_INTERVAL}", series.differences, compact))
        if any(one.ratios for one in series.differences):
            made.append(_ratios(f"To {against}, pair by pair: median {_INTERVAL}", series.differences, compact))
    return made


def run_line(folder: str, results: Results) -> str:
    rates, latency = results.steady or results.overall, results.latency
    ttft, e2e = latency.ttft_from_intended, latency.e2e_from_intended
    verdict = results.verdict
    outcome = "passed" if verdict.passed else "failed" if verdict.valid else "invalid"
    name, values = ("TTFT", ttft) if ttft else ("E2E", e2e)
    parts = [f"{folder}: {number(rates.requests_per_second)} requests/s"]
    parts += [f"{name} p50 {milliseconds(values.p50)}, p95 {milliseconds(values.p95)}"] if values else []
    parts += [f"{percent(results.slo.attainment)} in SLO"] if results.slo else []
    return ", ".join([*parts, outcome + (f" ({verdict.reasons[0]})" if verdict.reasons else "")])


def _points(title: str, points: Sequence[Point], names: Sequence[str], compact: bool) -> Table:
    shown = [name for name in names if any(name in point.figures for point in points)]
    outcome = _close if compact else spread_text
    head = [*_head(points), "passed", *map(title_of, shown)]
    rows = [
        [*_place(point, points), _runs(point), *(outcome(name, point.figures.get(name)) for name in shown)]
        for point in points
    ]
    return title, head, rows


def _runs(point: Point) -> str:
    invalid = point.runs - point.valid
    return f"{point.passed}/{point.runs}" + (f" ({invalid} invalid)" if invalid else "")


def _differences(title: str, differences: Sequence[Difference], compact: bool) -> Table:
    known = dict.fromkeys(name for difference in differences for name in difference.figures)
    shown = [name for name in known if not compact or name in _MOST_TELLING]
    head = ["target", "load", "pairs", *map(title_of, shown)]
    rows = [
        [
            one.target,
            one.load,
            str(one.pairs),
            *(spread_text(name, one.figures.get(name), signed=True) for name in shown),
        ]
        for one in differences
    ]
    return title, head, rows


def _ratios(title: str, differences: Sequence[Difference], compact: bool) -> Table:
    known = dict.fromkeys(name for difference in differences for name in difference.ratios)
    shown = [name for name in known if not compact or name in _MOST_TELLING_RATIOS]
    head = ["target", "load", "pairs", *map(title_of, shown)]
    rows = [
        [one.target, one.load, str(one.pairs), *(_ratio(one.ratios.get(name)) for name in shown)] for one in differences
    ]
    return title, head, rows


def _ratio(spread: Spread | None) -> str:
    return "-" if spread is None else _with_spread("", spread, "{:.3f}".format, least=0.0)


def title_of(name: str) -> str:
    """What a figure is called in a table."""
    kind, _, percentile = name.partition("_")
    return _TITLES.get(name, f"{kind.upper()} {percentile}")


def _head(points: Sequence[Point]) -> list[str]:
    return ["target", "load"] if any(point.target for point in points) else ["load"]


def _place(point: Point, points: Sequence[Point]) -> list[str]:
    return [point.target, point.load] if any(other.target for other in points) else [point.load]


def spread_text(name: str, spread: Spread | None, *, signed: bool = False) -> str:
    """The median, and behind it the interval where there are several runs, or the values of two."""
    if spread is None:
        return "-"

    def value(amount: float) -> str:
        sign = "-" if amount < 0 else "+" if signed else ""
        return sign + figure_text(name, abs(amount))

    return _with_spread(name, spread, value, least=-_MOST.get(name, math.inf) if signed else 0.0)


def _with_spread(name: str, spread: Spread, text: Callable[[float], str], *, least: float) -> str:
    known, joined = _interval(name, spread, least), "to"
    if known is None and len(spread.values) == _PAIR:
        known, joined = (spread.low, spread.high), "and"
    low, high = map(text, known or (spread.median, spread.median))
    return text(spread.median) if low == high else f"{text(spread.median)} ({low} {joined} {high})"


def _interval(name: str, spread: Spread, least: float = 0.0) -> Interval | None:
    """Student's t knows no bounds: what cannot be is cut off."""
    if (interval := spread.interval) is None:
        return None
    return max(least, interval[0]), min(_MOST.get(name, math.inf), interval[1])


def _close(name: str, spread: Spread | None) -> str:
    if spread is None:
        return "-"
    interval = None if name in _UNITS else _interval(name, spread)
    return figure_text(name, spread.median) + margin(spread.median, interval)


def figure_text(name: str, value: float) -> str:
    return _UNITS.get(name, milliseconds if UNITS[name] == "ms" else number)(value)
