"""Figures of recorded streams: each is what follows from the times of the reads, to the last digit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.drive.plan import Plan
from loadtest.report.schema import Bounds, Distribution, Results
from tests.unit.loadtest.drive.recorded import (
    END,
    HEAD,
    Answer,
    RecordedServer,
    Recording,
    chunk,
    drive,
    stream,
    summarised,
)

pytestmark = pytest.mark.virtual_time

_RECORDINGS = Path(__file__).parent / "recordings"
_OF_VLLM = Path(__file__).parents[3] / "contract" / "recordings"


def recordings(name: str) -> list[Recording]:
    lines = (_RECORDINGS / name).read_text().splitlines()
    return [Recording([(at, text.encode("latin-1")) for at, text in json.loads(line)]) for line in lines]


async def results_of(answer: Answer, bounds: Bounds | None = None, **load: Any) -> Results:
    async with RecordedServer(answer) as server:
        plan = Plan.model_validate({"url": server.url, "model": "m", **load})
        harvest = await drive(plan)
    return summarised(plan, harvest, bounds)


def milliseconds(values: Distribution | None) -> tuple[float, float, float]:
    """Median, 95th percentile and mean."""
    assert values is not None
    return round(values.p50, 3), round(values.p95, 3), round(values.mean, 3)


async def test_four_streams_of_the_simulated_engine_have_the_figures_of_their_recording() -> None:
    recorded = recordings("simulated_engine.jsonl")
    answers = iter(recorded)
    results = await results_of(lambda _: next(answers), Bounds(ttft_ms=40.0), concurrency=4, requests=4)
    latency = results.latency
    assert milliseconds(latency.ttft) == (38.926, 43.531, 40.013)
    assert milliseconds(latency.e2e) == (201.473, 219.577, 206.003)
    assert milliseconds(latency.tpot) == (7.067, 7.654, 7.217)
    assert milliseconds(latency.itl) == (7.98, 11.88, 7.214)  # counted in steps of 10 µs
    assert latency.itl is not None
    assert latency.itl.count == 4 * 23
    assert latency.ttft_from_intended == latency.ttft
    assert (results.overall.start, results.overall.end) == pytest.approx((0, 0.219577))
    assert results.overall.requests_per_second == pytest.approx(4 / 0.219577)
    assert results.overall.output_tokens_per_second == pytest.approx(96 / 0.219577)
    assert results.slo is not None
    assert results.slo.attainment == 0.75
    assert results.slo.goodput_per_second == pytest.approx(3 / 0.219577)
    assert results.verdict.valid


async def test_a_stream_of_vllm_is_timed_by_the_events_that_have_text() -> None:
    events = json.loads((_OF_VLLM / "chat_stream_usage.json").read_text())["answer"]["events"]
    reads = [(0.5 + number / 8, chunk(event.encode() + b"\n\n")) for number, event in enumerate(events)]
    answer = Recording([(0.25, HEAD), *reads, (2.0, END)])
    results = await results_of(lambda _: answer, concurrency=1, requests=1)
    # The role comes first, then the tokens every 125 ms, the usage and [DONE]; the body ends after them.
    assert milliseconds(results.latency.ttft) == (625, 625, 625)
    assert milliseconds(results.latency.itl) == (125, 125, 125)
    assert milliseconds(results.latency.e2e) == (2000, 2000, 2000)
    assert milliseconds(results.latency.tpot) == (275, 275, 275)  # (2000 - 625) / (6 - 1)
    assert results.streaming is not None
    assert (results.streaming.tokens_per_event, results.streaming.events_per_read) == (1, 1)


async def test_rates_of_a_closed_loop_are_those_of_its_answers() -> None:
    answer = stream(0.5, 0.75, 1.0)
    results = await results_of(lambda _: answer, Bounds(e2e_ms=1500.0), concurrency=4, duration_seconds=10)
    assert results.requests.succeeded == 40
    # The first answers belong to no steady part.
    assert results.steady is not None
    assert (results.steady.start, results.steady.end) == pytest.approx((1, 10))
    assert results.overall.requests_per_second == pytest.approx(4)
    assert results.overall.output_tokens_per_second == pytest.approx(12)
    assert results.concurrency.mean == pytest.approx(4)
    assert results.slo is not None
    assert results.slo.attainment == 1


async def test_an_answer_that_is_late_once_counts_in_goodput_as_missed() -> None:
    recorded = iter([stream(0.25, 0.5)] * 7 + [stream(0.25, 3.0)] + [stream(0.25, 0.5)] * 2)
    load = {"rate_per_second": 1, "arrivals": "constant", "requests": 10}
    results = await results_of(lambda _: next(recorded), Bounds(e2e_ms=1000.0, attainment=0.95), **load)
    assert milliseconds(results.latency.e2e_from_intended) == (500, 3000, 750)
    assert results.slo is not None
    assert (results.slo.met, results.slo.offered, results.slo.attainment) == (9, 10, 0.9)
    assert results.slo.attainments == {"e2e": 0.9}
    assert not results.slo.passed
    assert results.verdict.valid
    assert not results.verdict.passed
