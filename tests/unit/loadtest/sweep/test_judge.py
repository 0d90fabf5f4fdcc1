"""Runs against the objective."""

from __future__ import annotations

import math

import pytest

from loadtest.report.schema import GpuSeries, Samples
from loadtest.sweep.judge import aim_of, figure_label, figures_of, judged
from loadtest.sweep.plan import Figure, Objective
from tests.unit.loadtest.sweep.runs import results


def test_figures_are_in_the_units_of_the_objective() -> None:
    figures = figures_of(results(ttft=0.1, tpot=0.01), gpus=2)
    assert figures["ttft_p95_seconds"] == pytest.approx(0.1, rel=0.01)
    assert figures["tpot_p95_seconds"] == pytest.approx(0.01, rel=0.01)
    assert figures["output_tokens_per_second"] == pytest.approx(2 * figures["output_tokens_per_second_per_gpu"])


def test_a_run_within_the_bounds_fits() -> None:
    found = judged([results()], Objective(ttft_p95_seconds=0.2, tpot_p95_seconds=0.02), 1)
    assert found.fits
    assert found.excess == 0
    assert found.value == found.figures["output_tokens_per_second"]


def test_the_worst_missed_bound_counts() -> None:
    found = judged([results(ttft=0.3)], Objective(ttft_p95_seconds=0.2, e2e_p95_seconds=0.1), 1)
    assert found.excess == pytest.approx(3, rel=0.05)
    assert len(found.complaints) == 2
    assert found.complaints[0].startswith("TTFT p95 0.3 s > 0.2 s")


def test_the_median_of_the_runs_counts() -> None:
    runs = [results(ttft=ttft) for ttft in (0.1, 0.15, 9.0)]
    assert judged(runs, Objective(ttft_p95_seconds=0.2), 1).fits


def test_a_run_that_the_client_spoilt_counts_only_where_there_is_no_other() -> None:
    spoilt = results(valid=False)
    assert judged([spoilt, results()], Objective(), 1).fits
    alone = judged([spoilt], Objective(), 1)
    assert not alone.fits
    assert alone.excess == math.inf


def test_a_bound_on_what_was_not_measured_is_missed() -> None:
    run = results()
    run = run.model_copy(update={"latency": run.latency.model_copy(update={"tpot": None})})
    found = judged([run], Objective(tpot_p95_seconds=1), 1)
    assert found.complaints == ["TPOT p95 was not measured"]


@pytest.mark.parametrize(
    ("busy", "complaints", "excess"),
    [
        (None, ["GPU utilisation was not measured"], math.inf),
        (68.0, ["GPU utilisation 68 % < 85 %"], 0.2),
        (85.0, [], 0.0),
    ],
)
def test_gpus_that_are_too_idle_miss_their_bound(busy: float | None, complaints: list[str], excess: float) -> None:
    at = [float(second) for second in range(20)]
    figures = {"at": at, "utilization_percent": [busy] * 20, "power_watts": [None] * 20}
    gpu = GpuSeries.model_validate({"name": "0", "driver": "1", "memory_total_mib": 1.0, **figures})
    run = results().model_copy(update={"samples": Samples(gpus=[gpu], no_gpu=None, pages=[])})
    objective = Objective(gpu_percent=85)
    found = judged([run], objective, 1)
    assert (found.complaints, found.excess) == (complaints, pytest.approx(excess))
    assert aim_of(objective) == "Most output tokens/s with GPU utilisation at least 85 %"


def test_names_are_written_for_people() -> None:
    assert figure_label("ttft_p95_seconds") == "TTFT p95"
    assert figure_label(Figure.OUTPUT_TOKENS_PER_GPU) == "output tokens/s a GPU"
