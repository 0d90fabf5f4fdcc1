"""What a run says of the server, and which flag it names."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from loadtest.drive.plan import Plan
from loadtest.drive.record import Harvest, Record
from loadtest.report.schema import Bounds, GpuSeries, PageSeries, Results, Samples
from loadtest.report.series import FIGURES
from loadtest.report.summarise import summarise
from tests.unit.loadtest.report.runs import ENVIRONMENT, records_of, run_of

_SECONDS = [float(second) for second in range(9)]


def _page(**values: float) -> PageSeries:
    fields: dict[str, Any] = {"running": 8.0, "waiting": 0.0, "kv_cache_usage": 0.5} | values
    absent: dict[str, Any] = dict.fromkeys(("preemptions", "prefix_queries", "prefix_hits"), [None] * 9)
    return PageSeries(
        name="engine", url="http://e/metrics", at=_SECONDS, **{key: [v] * 9 for key, v in fields.items()}, **absent
    )


def _gpu(busy: float | None) -> GpuSeries:
    return GpuSeries(
        name="0 H100",
        driver="1",
        memory_total_mib=1.0,
        at=_SECONDS,
        utilization_percent=[busy] * 9,
        memory_used_mib=[None] * 9,
        power_watts=[None] * 9,
    )


def _run(
    records: list[Record] | None = None,
    bounds: Bounds | None = None,
    *,
    pages: list[PageSeries] | None = None,
    gpus: list[GpuSeries] | None = None,
    counted: dict[str, float] | None = None,
    **plan: Any,
) -> Results:
    samples = Samples(gpus=gpus or [], no_gpu=None, pages=pages or [])
    chosen = Plan.model_validate({"url": "http://x", "model": "m", "requests": 20, "concurrency": 1, **plan})
    harvest = Harvest(records_of(0.1) if records is None else records, Counter(), [])
    return summarise(chosen, harvest, bounds or Bounds(), ENVIRONMENT, counted or {}, samples)


def _finding(results: Results, text: str) -> str:
    (found,) = [warning for warning in results.verdict.warnings if text in warning]
    return found


def _says(results: Results, flag: str) -> bool:
    return any(flag in warning for warning in results.verdict.warnings)


def test_preemptions_are_named_with_the_flags_that_avoid_them_and_fail_nothing() -> None:
    results = _run(counted={'vllm:num_preemptions_total{engine="0"}': 11.0})
    assert "--max-num-seqs" in _finding(results, "11 preemptions")
    assert results.verdict.passed


def test_preemptions_of_a_run_without_counters_are_those_of_its_samples() -> None:
    page = _page().model_copy(update={"preemptions": [None, *map(float, range(2, 10))]})
    assert "--max-num-seqs" in _finding(_run(pages=[page]), "7 preemptions")


@pytest.mark.parametrize(("usage", "named"), [(0.983, True), (0.95, False)])
def test_a_kv_cache_above_95_percent_is_named(usage: float, named: bool) -> None:
    assert _says(_run(pages=[_page(kv_cache_usage=usage)]), "--kv-cache-dtype") == named


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"waiting": 5.0}, True),
        ({"waiting": 0.0}, False),
        ({"waiting": 5.0, "kv_cache_usage": 0.98}, False),  # then the cache is the reason
    ],
)
def test_requests_that_wait_while_the_batch_is_full_name_its_limit(values: dict[str, float], named: bool) -> None:
    results = _run(pages=[_page(**values)])
    assert _says(results, "(or the gateway's cap) limits the batch") == named
    if named:
        assert "5 requests waited while 8 ran" in _finding(results, "waited")


def test_a_gateways_page_is_no_engine() -> None:
    page = _page(waiting=5.0).model_copy(update={"kv_cache_usage": [None] * 9})
    assert not _says(_run(pages=[page]), "limits the batch")


@pytest.mark.parametrize(
    ("cached", "backends", "remedy"),
    [(0, "a", "--enable-prefix-caching"), (0, "ab", "route by prefix"), (80, "a", None)],
)
def test_hits_far_below_the_ideal_are_named_with_where_to_look(cached: int, backends: str, remedy: str | None) -> None:
    records = records_of(0.1)
    for index, record in enumerate(records):
        record.cached_tokens, record.prompt_tokens = cached, 100
        record.backend = backends[index % len(backends)]
    workload = {"groups": 1, "prefix_tokens": 90, "tail_tokens": 10, "max_tokens": 5}
    results = _run(records, workload=workload)
    assert _says(results, "prefix cache hits were") == (remedy is not None)
    assert remedy is None or remedy in _finding(results, "prefix cache hits were")


@pytest.mark.parametrize(
    ("seconds_a_token", "noise_seconds", "named"), [(2e-4, 0.005, True), (0.0, 0.1, False), (2e-4, 2.0, False)]
)
def test_a_ttft_in_proportion_to_the_prompt_is_named(seconds_a_token: float, noise_seconds: float, named: bool) -> None:
    draw, records = Random(1), records_of(0.1, count=60, seconds=5.0)
    for record in records:
        record.prompt_tokens = draw.randint(100, 4000)
        record.cached_tokens = 0
        record.first_token = record.sent + 0.02 + seconds_a_token * record.prompt_tokens + noise_seconds * draw.random()
    results = _run(records)
    assert _says(results, "in proportion to the prompt") == named
    if named:
        assert "200 ms for 1,000 tokens" in _finding(results, "in proportion")


def test_a_gpu_below_85_percent_is_named_and_fails_only_where_that_is_asked_for() -> None:
    assert "42 %" in _finding(_run(gpus=[_gpu(42.0)]), "GPUs were busy")
    assert _run(gpus=[_gpu(42.0)]).verdict.passed
    assert not _says(_run(gpus=[_gpu(91.0)]), "GPUs were busy")
    assert not _says(_run(gpus=[_gpu(None)]), "GPUs were busy")


@pytest.mark.parametrize(
    ("busy", "passed", "reason"), [(90.0, True, ""), (42.0, False, "42 % < 85 %"), (None, False, "was not measured")]
)
def test_a_bound_on_the_gpu_is_kept_only_by_what_was_measured(busy: float | None, passed: bool, reason: str) -> None:
    results = _run(None, Bounds(gpu_percent=85), gpus=[_gpu(busy)])
    assert (results.verdict.passed, results.slo is not None and results.slo.passed) == (passed, passed)
    assert passed or any(reason in one for one in results.verdict.reasons)
    assert FIGURES["gpu_percent"](results) == busy


def test_a_run_with_nothing_to_say_says_nothing() -> None:
    assert not _says(run_of(records_of(0.1, count=200)), "--max")
