"""The tables of a series, as text cells for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.report.formatting import margin, milliseconds, number, percent, reach
from loadtest.report.schema import Results
from loadtest.report.series import UNITS, Difference, Point, Series, Spread

_INTERVAL = "± 95 % confidence"
_PAIR = 2  # runs
Table = tuple[str, list[str], list[list[str]]]
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

_SHORT = {
    "requests_per_second": "req/s",
    "output_tokens_per_second": "tok/s",
    "output_tokens_per_second_per_user": "tok/s a user",
    "goodput_per_second": "good/s",
}


def tables(series: Series, *, compact: bool = False) -> list[Table]:
    """Title, head and rows of each; columns without figures are left out.

    Compact: short titles, fewer differences and ratios, and no word of invalid runs, which are named elsewhere.
    """
    made = [
        _points(f"Rates and goodput: median {_INTERVAL}", series.points, _RATES, compact),
        _points(f"Latency from the intended send: median {_INTERVAL}", series.points, _LATENCIES, compact),
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
    titles = [_SHORT.get(name, title_of(name)) if compact else title_of(name) for name in shown]
    head = [*_head(points), "passed", *titles]
    rows = [
        [
            *_place(point, points),
            _runs(point, compact),
            *(spread_text(name, point.figures.get(name), both=not compact) for name in shown),
        ]
        for point in points
    ]
    return title, head, rows


def _runs(point: Point, compact: bool) -> str:
    invalid = point.runs - point.valid
    return f"{point.passed}/{point.runs}" + (f" ({invalid} invalid)" if invalid and not compact else "")


def _differences(title: str, differences: Sequence[Difference], compact: bool) -> Table:
    known = dict.fromkeys(name for difference in differences for name in difference.figures)
    shown = [name for name in known if not compact or name in _MOST_TELLING]
    head = ["target", "load", "pairs", *map(title_of, shown)]
    rows = [
        [
            one.target,
            one.load,
            str(one.pairs),
            *(_difference(name, one.figures.get(name)) for name in shown),
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
    if spread is None:
        return "-"
    interval = spread.interval
    near = f" ±{reach(spread.median, interval):.3f}" if interval else ""
    return f"{spread.median:.3f}{near}{_tie(spread, 1.0)}"


def _difference(name: str, spread: Spread | None) -> str:
    if spread is None:
        return "-"
    sign, interval = "-" if spread.median < 0 else "+", spread.interval
    near = f" ±{figure_text(name, reach(spread.median, interval))}" if interval else ""
    return f"{sign}{figure_text(name, abs(spread.median))}{near}{_tie(spread, 0.0)}"


def _tie(spread: Spread, same: float) -> str:
    """Marks what may as well be no difference."""
    interval = spread.interval
    return ", tie" if interval and interval[0] <= same <= interval[1] else ""


def title_of(name: str) -> str:
    """What a figure is called in a table."""
    kind, _, percentile = name.partition("_")
    return _TITLES.get(name, f"{kind.upper()} {percentile}")


def _head(points: Sequence[Point]) -> list[str]:
    return ["target", "load"] if any(point.target for point in points) else ["load"]


def _place(point: Point, points: Sequence[Point]) -> list[str]:
    return [point.target, point.load] if any(other.target for other in points) else [point.load]


def spread_text(name: str, spread: Spread | None, *, both: bool = True) -> str:
    """The median, and behind it how far its interval reaches: in percent, or in percentage points of a ratio.

    Two runs have no interval: their values are shown, unless not `both`.
    """
    if spread is None:
        return "-"
    shown, interval = figure_text(name, spread.median), spread.interval
    if both and len(spread.values) == _PAIR and spread.low < spread.high:
        return f"{shown} ({figure_text(name, spread.low)} and {figure_text(name, spread.high)})"
    if name not in _UNITS:
        return shown + margin(spread.median, interval)
    points = 100 * reach(spread.median, interval) if interval else 0.0
    return f"{shown} ±{points:.1f} pp" if points >= 0.05 else shown


def figure_text(name: str, value: float) -> str:
    return _UNITS.get(name, milliseconds if UNITS[name] == "ms" else number)(value)
