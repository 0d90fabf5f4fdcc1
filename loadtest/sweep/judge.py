"""Judges configurations by their runs against the objective, and plans the rounds of the search. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import combinations
from statistics import median
from typing import TypeVar

from loadtest.report.diagnosis import gpu_percent, gpu_watts, tokens_per_joule
from loadtest.report.formatting import milliseconds
from loadtest.report.schema import Distribution, Interval, Results
from loadtest.report.series_tables import title_of
from loadtest.report.statistics import mann_whitney, mean_interval, significant
from loadtest.sweep.plan import Figure, Halving, Objective

GPU_FIGURES = {"gpu_percent": gpu_percent, "gpu_watts": gpu_watts, "tokens_per_joule": tokens_per_joule}
LATENCIES = ("ttft_p95_seconds", "tpot_p95_seconds", "e2e_p95_seconds")


@dataclass(frozen=True, slots=True)
class Judged:
    """One configuration under one workload. `excess` is how far the worst bound is missed: 0.2 is by a fifth."""

    figures: Mapping[str, float]
    value: float
    _: KW_ONLY
    excess: float
    complaints: list[str]
    values: Sequence[float] = ()  # what is maximised, of each run
    interval: Interval | None = None  # 95 % confidence of what is maximised
    valid: bool = True  # whether the client kept up in any of the runs

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
    watched = {name: of(results.samples, rates) for name, of in GPU_FIGURES.items()}
    return figures | {name: value for name, value in watched.items() if value is not None}


def judged(runs: Sequence[Results], objective: Objective, gpus: int) -> Judged:
    """Of all repetitions: medians against the bounds, and what any of the runs complains of.

    Runs that the client spoilt count only where there are no others, and then nothing fits.
    """
    valid = [run for run in runs if run.verdict.valid]
    believed = valid or list(runs)
    each = [figures_of(run, gpus) for run in believed]
    names = [name for name in each[0] if all(name in figures for figures in each)]
    figures = {name: median(figures[name] for figures in each) for name in names}
    complaints = list(dict.fromkeys(reason for run in believed for reason in run.verdict.reasons))
    excess = 0.0 if not complaints else math.inf
    for missed, by in _missed(figures, objective):
        complaints.append(missed)
        excess = max(excess, by)
    values = [one[objective.maximise.value] for one in each]
    interval = mean_interval(values) if len(values) > 1 else _within(believed[0], objective.maximise, gpus)
    return Judged(
        figures,
        figures[objective.maximise.value],
        excess=excess,
        complaints=complaints,
        values=values,
        interval=interval,
        valid=bool(valid),
    )


def _missed(figures: Mapping[str, float], objective: Objective) -> Iterator[tuple[str, float]]:
    """What is beyond its bound, in words, and by what part of it."""
    for name, bound in objective.bounds.items():
        if (found := figures.get(name)) is None:
            yield f"{figure_label(name)} was not measured", math.inf
        elif found > bound:
            yield f"{figure_label(name)} {found:.3g} s > {bound:g} s", found / bound - 1
    if (least := objective.gpu_percent) is not None:
        if (busy := figures.get("gpu_percent")) is None:
            yield "GPU utilisation was not measured", math.inf
        elif busy < least:
            yield f"GPU utilisation {busy:.3g} % < {least:g} %", 1 - busy / least


def _within(run: Results, figure: Figure, gpus: int) -> Interval | None:
    """The interval that a single run has by itself."""
    per_gpu = figure is Figure.OUTPUT_TOKENS_PER_GPU
    found = run.intervals.get((Figure.OUTPUT_TOKENS if per_gpu else figure).value)
    return (found[0] / gpus, found[1] / gpus) if found and per_gpu else found


def figure_label(figure: str) -> str:
    """A figure's name as people write it."""
    if figure in LATENCIES:
        name, percentile, _ = figure.split("_")
        return f"{name.upper()} {percentile}"
    if figure in GPU_FIGURES:
        return title_of(figure)
    return figure.replace("_per_second", "/s").replace("_per_gpu", " a GPU").replace("_", " ")


def aim_of(objective: Objective) -> str:
    """The objective in words, for the head of a report."""
    bounds = [f"{figure_label(name)} at most {milliseconds(bound * 1e3)}" for name, bound in objective.bounds.items()]
    if objective.gpu_percent is not None:
        bounds.append(f"GPU utilisation at least {objective.gpu_percent:g} %")
    return f"Most {figure_label(objective.maximise.value)}{' with ' if bounds else ''}{' and '.join(bounds)}"


Item = TypeVar("Item", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Round:
    """So many configurations, at most, each in runs that are this share of whole ones."""

    count: int
    share: float


def rounds(count: int, halving: Halving | None) -> list[Round]:
    """One round of whole runs, or successive halving: each round is longer and has fewer, the last one is whole."""
    if halving is None or count <= 1:
        return [Round(count, 1.0)]
    by_length = math.floor(math.log(1 / halving.shortest, halving.factor) + 1e-9)
    by_count = math.ceil(math.log(count, halving.factor) - 1e-9)
    cuts = min(by_length, by_count)
    return [
        Round(math.ceil(count / halving.factor**cut - 1e-9), halving.factor ** (cut - cuts)) for cut in range(cuts + 1)
    ]


def best(found: Mapping[Item, Judged], count: int) -> list[Item]:
    """The best of those that could be measured, at most `count`, best first."""
    return sorted(found, key=lambda item: found[item].rank)[:count]


def winner(found: Mapping[Item, Judged]) -> Item | None:
    """The best of those that nothing stands against."""
    return next((item for item in best(found, 1) if found[item].fits), None)


def tied(found: Mapping[Item, Judged], first: Item) -> list[Item]:
    """Those within all bounds that do not differ from the first one significantly, best first.

    All pairs are tested together, as any of them could have come first by chance.
    """
    fitting = [item for item in best(found, len(found)) if found[item].fits]
    p_values = {pair: mann_whitney(found[pair[0]].values, found[pair[1]].values) for pair in combinations(fitting, 2)}
    apart = significant(p_values)
    return [item for item in fitting if item != first and not apart & {(first, item), (item, first)}]


def frontier(items: Sequence[Item], cost: Callable[[Item], float], worth: Callable[[Item], float]) -> list[Item]:
    """Those that no other beats in one without losing in the other, by rising cost."""
    kept: list[Item] = []
    for item in sorted(items, key=lambda item: (cost(item), -worth(item))):
        if not kept or worth(item) > worth(kept[-1]):
            kept.append(item)
    return kept
