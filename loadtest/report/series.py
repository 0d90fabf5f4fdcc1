"""What several runs come to: medians with their spread by target and load, and targets against the first of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from statistics import median
from typing import Any

from pydantic import Field

from loadtest.report.diagnosis import gpu_percent, gpu_watts, tokens_per_joule
from loadtest.report.schema import Environment, Interval, Results, Slo, StrictModel, Throughput
from loadtest.report.statistics import mean_interval, value_of

# 2: ratios. 3: each run's value, versions of definitions. 4: the answer of a search.
# 5: the limits of the SLO, intervals of single runs. Whatever reads this version reads older files as well.
SERIES_SCHEMA_VERSION = 5


class Spread(StrictModel):
    """A figure over repetitions."""

    median: float
    low: float
    high: float
    values: list[float] = Field(default_factory=list, description="Of each run, in order; older files have none.")
    within_run: Interval | None = Field(default=None, description="95 % confidence of a single run by itself.")

    @property
    def interval(self) -> Interval | None:
        """95 % confidence: of the mean of several runs, or of a single one by its stretches."""
        return self.within_run if len(self.values) == 1 else mean_interval(self.values)


class Point(StrictModel):
    """All repetitions of one load on one target. Figures are of the valid runs, and of all only where none is valid."""

    target: str
    load: str
    offered: float = Field(description="Requests/s of an open loop, users of a closed one, speed of a trace.")
    runs: int
    valid: int
    passed: int
    figures: dict[str, Spread]


class Difference(StrictModel):
    """A target against the first target, pair by pair: same load, same repetition, same prompts."""

    target: str
    against: str
    load: str
    pairs: int
    figures: dict[str, Spread] = Field(description="The target's less the first one's.")
    ratios: dict[str, Spread] = Field(default_factory=dict, description="The target's to the first one's.")


class Series(StrictModel):
    """The results of several runs; each run's own are in the folder that `folders` names."""

    schema_version: int = SERIES_SCHEMA_VERSION
    definitions: dict[str, int] = Field(default_factory=dict, description="As in results.json.")
    environment: Environment
    plan: dict[str, Any] = Field(description="Of the first run.")
    points: list[Point]
    differences: list[Difference]
    folders: list[str]
    failures: dict[str, str] = Field(default_factory=dict, description="Why runs that were to be made have no results.")
    passed: bool
    reasons: list[str]
    limits: dict[str, float] = Field(default_factory=dict, description="Of the SLO, by their names in results.json.")
    answer: list[str] = Field(default_factory=list, description="What a search for the highest load found.")


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of a series."""

    target: str
    load: str
    repetition: int
    _: KW_ONLY
    results: Results

    @property
    def folder(self) -> str:
        return folder_of(self.target, self.load, self.repetition)


def folder_of(target: str, load: str, repetition: int) -> str:
    """The name of a run among those of its series."""
    return "-".join(filter(None, (target, load, str(repetition + 1))))


def _rates(results: Results) -> Throughput:
    return results.steady or results.overall


def _per_user(results: Results, rate: float) -> float | None:
    """Closed loop: what each of the users got."""
    users = results.plan["concurrency"]
    return rate / users if users else None


# Latencies are milliseconds from the intended send; rates are those of the steady part, where there is one.
FIGURES: dict[str, Callable[[Results], float | None]] = {
    "requests_per_second": lambda results: _rates(results).requests_per_second,
    "output_tokens_per_second": lambda results: _rates(results).output_tokens_per_second,
    "output_tokens_per_second_per_user": lambda results: _per_user(results, _rates(results).output_tokens_per_second),
    "prompt_tokens_per_second": lambda results: _rates(results).prompt_tokens_per_second,
    "audio_seconds_per_second": lambda results: results.audio.seconds_per_second if results.audio else None,
    "goodput_per_second": lambda results: results.slo.goodput_per_second if results.slo else None,
    "attainment": lambda results: results.slo.attainment if results.slo else None,
    "ttft_p50": lambda results: value_of(results.latency.ttft_from_intended, "p50"),
    "ttft_p95": lambda results: value_of(results.latency.ttft_from_intended, "p95"),
    "ttft_p99": lambda results: value_of(results.latency.ttft_from_intended, "p99"),
    "tpot_p50": lambda results: value_of(results.latency.tpot, "p50"),
    "tpot_p95": lambda results: value_of(results.latency.tpot, "p95"),
    "tpot_p99": lambda results: value_of(results.latency.tpot, "p99"),
    "itl_p50": lambda results: value_of(results.latency.itl, "p50"),
    "itl_p95": lambda results: value_of(results.latency.itl, "p95"),
    "itl_p99": lambda results: value_of(results.latency.itl, "p99"),
    "e2e_p50": lambda results: value_of(results.latency.e2e_from_intended, "p50"),
    "e2e_p95": lambda results: value_of(results.latency.e2e_from_intended, "p95"),
    "e2e_p99": lambda results: value_of(results.latency.e2e_from_intended, "p99"),
    "hit_ratio": lambda results: results.routing.hit_ratio,
    "gpu_percent": lambda results: gpu_percent(results.samples, _rates(results)),
    "gpu_watts": lambda results: gpu_watts(results.samples, _rates(results)),
    "tokens_per_joule": lambda results: tokens_per_joule(results.samples, _rates(results)),
    "failed_ratio": lambda results: results.requests.failed / max(1, results.requests.offered),
    "peak_in_flight": lambda results: results.concurrency.peak,
}
# Where a figure, or figures whose names begin so, stand in results.json.
_PLACES = {
    "audio_seconds_per_second": "audio",
    "goodput_per_second": "slo.goodput_per_second",
    "attainment": "slo.attainment",
    "hit_ratio": "routing",
    "failed_ratio": "requests",
    "gpu_percent": "slo",
    "peak_in_flight": "concurrency",
    "ttft_": "latency",
    "tpot_": "latency",
    "itl_": "latency",
    "e2e_": "latency",
}
# In which unit a figure is; a figure without one has its unit in its name, or is a count.
UNITS = {
    name: "ms" if name.startswith(("ttft_", "tpot_", "itl_", "e2e_")) else "ratio" if name == "attainment" else ""
    for name in FIGURES
}
_LIMITS = ("ttft_ms", "tpot_ms", "e2e_ms", "gpu_percent")
_COMPARED = ("requests_per_second", "ttft_p50", "ttft_p95", "tpot_p50", "e2e_p50", "e2e_p95", "hit_ratio")
_RATIOS = (
    "requests_per_second",
    "output_tokens_per_second",
    "prompt_tokens_per_second",
    "ttft_p50",
    "ttft_p95",
    "tpot_p50",
    "e2e_p50",
    "e2e_p95",
)


def place_of(figure: str) -> str:
    """Where a figure stands in results.json, for the version of its definition."""
    return next((place for name, place in _PLACES.items() if figure.startswith(name)), "steady")


def series_of(ran: Sequence[Ran], environment: Environment, failures: Mapping[str, str] | None = None) -> Series:
    """All points in the order in which they first ran, and what to think of them."""
    places = list(dict.fromkeys((one.target, one.load) for one in ran))
    points = [_point([one for one in ran if (one.target, one.load) == place]) for place in places]
    failures = dict(failures or {})
    reasons = [f"{folder}: {why}" for folder, why in failures.items()] + _reasons(points, ran)
    return Series(
        definitions=ran[0].results.definitions,
        environment=environment,
        plan=ran[0].results.plan,
        points=points,
        differences=_differences(ran, places),
        folders=[one.folder for one in ran],
        failures=failures,
        passed=not reasons,
        reasons=reasons,
        limits=_limits(ran[0].results.slo),
    )


def _limits(slo: Slo | None) -> dict[str, float]:
    named = {} if slo is None else {name: getattr(slo, name) for name in _LIMITS}
    return {name: limit for name, limit in named.items() if limit is not None}


def series_of_one(results: Results) -> Series:
    """A single run in the form of several."""
    series = series_of([Ran("", "", 0, results=results)], results.environment)
    return series.model_copy(update={"passed": results.verdict.passed, "reasons": results.verdict.reasons})


def _point(ran: Sequence[Ran]) -> Point:
    first = ran[0]
    plan = first.results.plan
    valid = [one.results for one in ran if one.results.verdict.valid]
    counted = valid or [one.results for one in ran]
    spreads = {name: spread_of([figure(results) for results in counted]) for name, figure in FIGURES.items()}
    if len(counted) == 1:
        for name, interval in counted[0].intervals.items():
            if (spread := spreads.get(name)) is not None:
                spreads[name] = spread.model_copy(update={"within_run": interval})
    return Point(
        target=first.target,
        load=first.load,
        offered=plan["concurrency"] or plan["rate_per_second"] or plan["trace_speed"],
        runs=len(ran),
        valid=len(valid),
        passed=sum(one.results.verdict.passed for one in ran),
        figures={name: spread for name, spread in spreads.items() if spread is not None},
    )


def spread_of(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread(median=median(known), low=min(known), high=max(known), values=known) if known else None


def _differences(ran: Sequence[Ran], places: Sequence[tuple[str, str]]) -> list[Difference]:
    by_run = {(one.target, one.load, one.repetition): one.results for one in ran if one.results.verdict.valid}
    against = ran[0].target
    made: list[Difference] = []
    for target, load in places:
        pairs = [
            (by_run[against, load, repetition], results)
            for (one, its_load, repetition), results in by_run.items()
            if (one, its_load) == (target, load) and target != against and (against, load, repetition) in by_run
        ]
        if pairs:
            made.append(
                Difference(
                    target=target,
                    against=against,
                    load=load,
                    pairs=len(pairs),
                    figures=_over_pairs(pairs, _COMPARED, lambda before, after: after - before),
                    ratios=_over_pairs(pairs, _RATIOS, lambda before, after: after / before if before else None),
                )
            )
    return made


def _over_pairs(
    pairs: Sequence[tuple[Results, Results]], names: Sequence[str], of: Callable[[float, float], float | None]
) -> dict[str, Spread]:
    spreads = {}
    for name in names:
        known = [(FIGURES[name](first), FIGURES[name](other)) for first, other in pairs]
        values = [of(before, after) for before, after in known if before is not None and after is not None]
        if (spread := spread_of(values)) is not None:
            spreads[name] = spread
    return spreads


def _reasons(points: Sequence[Point], ran: Sequence[Ran]) -> list[str]:
    """A run that the client spoilt fails the series; a load that a target does not carry is a finding."""
    reasons = []
    for point in points:
        spoilt = [one.results for one in _runs_of(point, ran) if not one.results.verdict.valid]
        if spoilt:
            count = "its run is" if point.runs == 1 else f"{len(spoilt)} of {point.runs} runs are"
            why = "; ".join(spoilt[0].verdict.reasons[:1]) or "ended early"
            reasons.append(f"{_named(point)}: {count} invalid: {why}".removeprefix(": "))
    for target in dict.fromkeys(point.target for point in points):
        its = [point for point in points if point.target == target]
        if any(point.valid for point in its) and all(point.passed < point.valid or not point.valid for point in its):
            many = "no load passed in all its runs" if len(its) > 1 else "not all runs passed"
            reasons.append(f"{target}: {many}" if target else many)
    return reasons


def _runs_of(point: Point, ran: Sequence[Ran]) -> list[Ran]:
    return [one for one in ran if (one.target, one.load) == (point.target, point.load)]


def _named(point: Point) -> str:
    return f"{point.target} {point.load}".strip()
