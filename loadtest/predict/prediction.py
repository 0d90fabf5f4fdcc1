"""From a log to a comparison: what calibrates the model, what it is judged by, and what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.engine.step_time import StepTime
from loadtest.predict.client import ClientRun, client_seconds, first_of, measured_by_client
from loadtest.predict.compare import Line, Side, compared
from loadtest.predict.fit import Calibration, fit, overhead_of
from loadtest.predict.model import replayed
from loadtest.predict.served import served
from loadtest.recording.access_log import Logged
from loadtest.replay.request import ReplayRequest
from loadtest.replay.scenario import Scenario
from loadtest.replay.trace import Trace


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
