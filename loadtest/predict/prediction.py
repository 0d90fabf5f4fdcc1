"""From a log to a comparison: fit the engine model, replay the requests at their own times, compare."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.engine.scheduler import StepTime
from loadtest.predict.comparison import ClientRun, Line, Side, client_seconds, compared, first_of, measured_by_client
from loadtest.predict.fit import Calibration, fit, overhead_of, served
from loadtest.recording import Logged, trace_of
from loadtest.replay.engine import ReplayEngine, ReplayRequest
from loadtest.replay.policies import RouterContext, router_of
from loadtest.replay.scenario import Scenario
from loadtest.replay.simulation import Simulation
from loadtest.replay.workload import requests_of
from loadtest.workloads.trace import Row, Trace, TraceError

_ONE_COPY = 1


def trace_from(requests: Sequence[Logged], block_tokens: int) -> Trace:
    """The trace that `loadtest record` makes of them, row by row."""
    rows = [
        Row(line["timestamp"] / 1000, line["input_length"], line["output_length"], tuple(line["hash_ids"]))
        for line in trace_of(requests, block_tokens)
    ]
    return Trace("recorded", rows, block_tokens)


def replayed(trace: Trace, scenario: Scenario, step_time: StepTime, policy: str) -> list[ReplayRequest]:
    """What the model makes of each row, in the trace's order. Raises TraceError."""
    limits = scenario.limits(trace.block_tokens)
    longest = max(row.prompt_tokens + row.output_tokens for row in trace.rows)
    if longest > limits.num_blocks * trace.block_tokens:
        raise TraceError(f"--kv-tokens: the longest request has {longest} tokens")
    requests = requests_of(trace, _ONE_COPY, trace.rate_per_second, seed=0)
    engines = [ReplayEngine(limits, step_time) for _ in range(scenario.engines)]
    router = router_of(policy, RouterContext(scenario, trace.block_tokens, engines, random.Random(policy)))
    Simulation(requests, engines, router).run()
    return requests


@dataclass(frozen=True, slots=True)
class Prediction:
    """What came of it. `client_seconds` is None where the gateway's own log is what was measured."""

    lines: Sequence[Line]
    judged: int
    before: int  # requests that came earlier: they calibrate, and fill the caches
    calibration: Calibration
    client_seconds: float | None
    doubts: Sequence[str] = ()  # of what was measured


def predict(
    requests: Sequence[Logged],
    trace: Trace,
    scenario: Scenario,
    policy: str,
    step_time: StepTime | None = None,
    run: ClientRun | None = None,
) -> Prediction:
    """Judge the model by the client's run, or by the later half of the log. `trace` is what was recorded of it.

    All requests are replayed; none that is judged has a part in the calibration. Raises NoFit, Mismatch, TraceError.
    """
    first = len(requests) // 2 if run is None else first_of(requests, run)
    end = len(requests) if run is None else first + len(run.sent)
    judged = requests[first:end]
    past = list(served(requests[:first]))
    budget = scenario.max_num_batched_tokens
    calibration = fit(past, budget) if step_time is None else overhead_of(past, step_time, budget)
    answers = replayed(trace, scenario, calibration.step_time, policy)[first:end]
    way = None if run is None else client_seconds(judged, run)
    streamed = [request.first_seconds is not None for request in judged]
    predicted = _predicted(answers, streamed, (calibration.overhead_seconds or 0.0) + (way or 0.0))
    measured = _measured(judged) if run is None else _with_usage(measured_by_client(run), judged)
    doubts = () if run is None else run.doubts
    return Prediction(compared(measured, predicted), len(judged), first, calibration, way, doubts)


def _predicted(answers: Sequence[ReplayRequest], streamed: Sequence[bool], overhead_seconds: float) -> Side:
    return Side(
        ttft_seconds=[
            answer.ttft_seconds + overhead_seconds for answer, streams in zip(answers, streamed, strict=True) if streams
        ],
        e2e_seconds=[answer.e2e_seconds + overhead_seconds for answer in answers],
        output_tokens=sum(answer.output_tokens for answer in answers),
        seconds=max(answer.finished_seconds for answer in answers) - answers[0].arrival_seconds,
        hit_ratio=sum(answer.cached_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers),
    )


def _measured(judged: Sequence[Logged]) -> Side:
    return Side(
        ttft_seconds=[first for request in judged if (first := request.first_seconds) is not None],
        e2e_seconds=[request.duration_seconds for request in judged],
        output_tokens=sum(request.output_tokens for request in judged),
        seconds=max(request.at_seconds + request.duration_seconds for request in judged) - judged[0].at_seconds,
        hit_ratio=_reported_hit_ratio(judged),
    )


def _with_usage(side: Side, judged: Sequence[Logged]) -> Side:
    """The same; where the client did not read the engines' counters, with the hit rate that answers reported."""
    if side.hit_ratio is not None:
        return side
    return Side(
        side.ttft_seconds, side.e2e_seconds, side.output_tokens, side.seconds, _reported_hit_ratio(judged)
    )  # fmt: skip


def _reported_hit_ratio(judged: Sequence[Logged]) -> float | None:
    known = [request for request in judged if request.cached_tokens is not None]
    prompts = sum(request.prompt_tokens for request in known)
    return sum(request.cached_tokens or 0 for request in known) / prompts if prompts else None
