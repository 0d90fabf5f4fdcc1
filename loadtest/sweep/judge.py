"""What runs say of a configuration, against the objective. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from loadtest.report.schema import Distribution, Results
from loadtest.sweep.plan import Figure, Objective

LATENCIES = ("ttft_p95_seconds", "tpot_p95_seconds", "e2e_p95_seconds")


@dataclass(frozen=True, slots=True)
class Judged:
    """One configuration under one workload. `excess` is how far the worst bound is missed: 0.2 is by a fifth."""

    figures: Mapping[str, float]
    value: float
    excess: float
    complaints: list[str]
    values: Sequence[float] = ()  # what is maximised, of each run

    @property
    def fits(self) -> bool:
        return not self.complaints

    @property
    def rank(self) -> tuple[float, float]:
        """Smaller is better: what fits by its value, then the rest by how little it misses."""
        return self.excess, -self.value


def figures_of(results: Results, gpus: int) -> dict[str, float]:
    """A run's figures in the units of the objective: rates of the steady part where it has one."""
    rates, latency = results.steady or results.overall, results.latency
    figures = {
        Figure.OUTPUT_TOKENS.value: rates.output_tokens_per_second,
        Figure.OUTPUT_TOKENS_PER_GPU.value: rates.output_tokens_per_second / gpus,
        Figure.PROMPT_TOKENS.value: rates.prompt_tokens_per_second,
        Figure.REQUESTS.value: rates.requests_per_second,
    }
    measured: tuple[Distribution | None, ...] = latency.ttft_from_intended, latency.tpot, latency.e2e_from_intended
    for name, values in zip(LATENCIES, measured, strict=True):
        if values is not None:
            figures[name] = values.p95 / 1e3
    return figures


def judged(runs: Sequence[Results], objective: Objective, gpus: int) -> Judged:
    """Of all repetitions: medians against the bounds, and what any of the runs complains of.

    Runs that the client spoilt count only where there are no others, and then nothing fits.
    """
    believed = [run for run in runs if run.verdict.valid] or list(runs)
    each = [figures_of(run, gpus) for run in believed]
    names = [name for name in each[0] if all(name in figures for figures in each)]
    figures = {name: median(figures[name] for figures in each) for name in names}
    complaints = list(dict.fromkeys(reason for run in believed for reason in run.verdict.reasons))
    excess = 0.0 if not complaints else math.inf
    for name, bound in objective.bounds.items():
        if (found := figures.get(name)) is None:
            complaints.append(f"{told_name(name)} was not measured")
            excess = math.inf
        elif found > bound:
            complaints.append(f"{told_name(name)} {found:.3g} s > {bound:g} s")
            excess = max(excess, found / bound - 1)
    values = [one[objective.maximise.value] for one in each]
    return Judged(figures, figures[objective.maximise.value], excess, complaints, values)


def told_name(figure: str) -> str:
    """A figure's name as people write it."""
    if figure in LATENCIES:
        name, percentile, _ = figure.split("_")
        return f"{name.upper()} {percentile}"
    return figure.replace("_per_second", "/s").replace("_per_gpu", " a GPU").replace("_", " ")
