"""Whether the runs of a series are enough: the confidence interval of its main figure is narrow at every load. Pure.

Looking after each repetition and stopping at the first narrow interval costs some confidence: simulated, the interval
at which a series stops holds the true mean in 91 to 96 % of the cases instead of 95 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from loadtest.report.schema import Results
from loadtest.report.series import FIGURES, Ran
from loadtest.report.statistics import FEWEST, mean_interval


def main_figure(results: Results) -> str:
    """What a load cannot fix: the rate of a closed loop, the latency of an open one."""
    if results.plan["concurrency"] is None:
        return "e2e_p50"
    return "output_tokens_per_second" if results.tokens.completion else "requests_per_second"


def half_width(values: Sequence[float]) -> float | None:
    """Half of the 95 % confidence interval as a share of the mean; None of fewer runs than can differ at all."""
    interval = mean_interval(values)
    if interval is None or len(values) < FEWEST or not fmean(values):
        return None
    return (interval[1] - interval[0]) / 2 / fmean(values)


def is_settled(ran: Sequence[Ran], within: float) -> bool:
    """Whether every target's main figure is known to that share at every load. Runs that are invalid do not count."""
    places = dict.fromkeys((one.target, one.load) for one in ran)
    widths = [half_width(_values([one for one in ran if (one.target, one.load) == place])) for place in places]
    return bool(widths) and all(width is not None and width <= within for width in widths)


def spoilt_loads(ran: Sequence[Ran]) -> list[str]:
    """Where the client spoilt as many runs as could have been enough, and none was valid: more would not help."""
    by_place = dict[str, list[bool]]()
    for one in ran:
        by_place.setdefault(f"{one.target} {one.load}".strip(), []).append(one.results.verdict.valid)
    return [place for place, valid in by_place.items() if len(valid) >= FEWEST and not any(valid)]


def why_unsettled(ran: Sequence[Ran], within: float) -> str:
    """Why the intervals stayed wider than that share."""
    if spoilt := spoilt_loads(ran):
        return f"no run was valid at {', '.join(spoilt)}: the intervals are the client's, and more runs would not help"
    most = max(one.repetition for one in ran) + 1
    return f"{most} repetitions did not bring the intervals down to ±{within * 100:g}%"


def _values(ran: Sequence[Ran]) -> list[float]:
    valid = [one.results for one in ran if one.results.verdict.valid]
    values = (FIGURES[main_figure(results)](results) for results in valid)
    return [value for value in values if value is not None]
