"""Confidence intervals of one run's figures, by a bootstrap over stretches of the run. Pure.

Requests that overlap share batches and queues, so single requests are no independent measurements, and stretches that
are longer than requests nearly are. A conversation counts in the stretch where it begins. The intervals hold for the
servers as they were during this run; other runs may differ by more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadtest.drive.record import Record
from loadtest.report.schema import Interval
from loadtest.report.statistics import ALPHA, t_quantile
from loadtest.report.timeline import tokens_within

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Few and long, as servers have slow phases as well: with 40 stretches a phase of 2 s in a run of 60 s is not seen.
_STRETCHES = 10
_REQUESTS_LONG = 1.0
_RESAMPLES = 500
_BEYOND = 10  # values that a percentile needs beyond it


@dataclass(frozen=True, slots=True)
class Stretches:
    """Equal parts of [start, end)."""

    start: float
    end: float
    count: int

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / self.count

    def at(self, moment: float) -> int:
        """Which one a moment is in; the first or the last if it is outside."""
        return min(self.count - 1, max(0, int((moment - self.start) / self.seconds)))

    def draws(self, random: np.random.Generator) -> Integers:
        """How often each stretch is in each resample."""
        return random.multinomial(self.count, np.full(self.count, 1 / self.count), size=_RESAMPLES)

    @property
    def reach(self) -> float:
        """Standard deviations of the resamples that the interval reaches to either side."""
        return t_quantile(self.count - 1) * math.sqrt(self.count / (self.count - 1))


def latency_intervals(
    good: Sequence[Record], window: tuple[float, float], random: np.random.Generator
) -> dict[str, Interval]:
    """In milliseconds from the intended send, by figure as in a series: percentiles with enough values beyond."""
    stretches = _stretches(good, window)
    if stretches is None:
        return {}
    begun = {index: start for index, (start, _) in _conversations(good).items()}
    draws, found = stretches.draws(random), dict[str, Interval]()
    measured: Mapping[str, list[tuple[float | None, Record]]] = {
        "ttft": [(None if r.first_token is None else r.first_token - r.due, r) for r in good],
        "tpot": [(r.tpot_seconds, r) for r in good],
        "e2e": [(r.end - r.due, r) for r in good],
    }
    for name, values in measured.items():
        known = sorted((value * 1e3, stretches.at(begun[r.index])) for value, r in values if value is not None)
        percents = [percent for percent in (50, 95, 99) if len(known) * (100 - percent) >= 100 * _BEYOND]
        if percents:
            ordered, places = np.array([one for one, _ in known]), np.array([place for _, place in known])
            resampled = _percentiles(ordered, places, draws, percents)
            # The estimate itself is the resample that has each stretch once.
            (estimates,) = _percentiles(ordered, places, np.ones((1, stretches.count), np.int64), percents)
            for column, percent in enumerate(percents):
                found[f"{name}_p{percent}"] = _interval(estimates[column], resampled[:, column], stretches.reach)
    return found


def rate_intervals(
    good: Sequence[Record],
    within_slo: Sequence[Record] | None,
    window: tuple[float, float],
    random: np.random.Generator,
) -> dict[str, Interval]:
    """Of the rates over the window; with an SLO also of goodput."""
    stretches = _stretches(good, window)
    if stretches is None:
        return {}
    counted = {"requests_per_second": _ended(good, stretches), "output_tokens_per_second": _tokens(good, stretches)}
    if within_slo is not None:
        counted["goodput_per_second"] = _ended(within_slo, stretches)
    draws, scale = stretches.draws(random), 1 / (window[1] - window[0])
    return {
        name: _interval(float(counts.sum()), draws @ counts, stretches.reach, scale) for name, counts in counted.items()
    }


def _stretches(good: Sequence[Record], window: tuple[float, float]) -> Stretches | None:
    """None where the window is too short for what is in it."""
    start, end = window
    stretches, spans = Stretches(start, end, _STRETCHES), _conversations(good).values()
    if not spans or stretches.seconds <= 0:
        return None
    mean_seconds = math.fsum(end - start for start, end in spans) / len(spans)
    return stretches if stretches.seconds >= _REQUESTS_LONG * mean_seconds else None


def _conversations(records: Sequence[Record]) -> dict[int, tuple[float, float]]:
    """When each began and ended, in seconds of the run, by its index."""
    spans = dict[int, tuple[float, float]]()
    for record in records:
        start, end = spans.get(record.index, (record.due, record.end))
        spans[record.index] = min(start, record.due), max(end, record.end)
    return spans


def _tokens(good: Sequence[Record], stretches: Stretches) -> Floats:
    """The output tokens in each stretch."""
    tokens = np.zeros(stretches.count)
    for record in good:
        if record.sent < stretches.end and record.end > stretches.start:
            for place in range(stretches.at(record.sent), stretches.at(record.end) + 1):
                begin = stretches.start + place * stretches.seconds
                tokens[place] += tokens_within(record, begin, begin + stretches.seconds)
    return tokens


def _ended(records: Sequence[Record], stretches: Stretches) -> Floats:
    inside = [stretches.at(record.end) for record in records if stretches.start <= record.end <= stretches.end]
    return np.bincount(inside, minlength=stretches.count).astype(float)


def _percentiles(ordered: Floats, places: Integers, draws: Integers, percents: Sequence[float]) -> Floats:
    """The nearest ranks of each resample, a row each."""
    found = np.empty((len(draws), len(percents)))
    for row, times in enumerate(draws):
        running = np.cumsum(times[places])
        ranks = np.ceil(np.round(running[-1] * np.array(percents) / 100, 9))
        found[row] = ordered[np.minimum(np.searchsorted(running, ranks), len(ordered) - 1)]
    return found


def _interval(estimate: float, resampled: Floats, reach: float, scale: float = 1.0) -> Interval:
    """As far as the resamples vary, by ratio, as latencies and rates do; from nothing where some have nothing."""
    if estimate <= 0 or resampled.min() <= 0:
        return 0.0, max(estimate, float(np.quantile(resampled, 1 - ALPHA / 2))) * scale
    factor = math.exp(reach * float(np.log(resampled).std()))
    return estimate / factor * scale, estimate * factor * scale
