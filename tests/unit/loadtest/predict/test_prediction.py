from dataclasses import replace

import pytest

from loadtest.engine.step_time import StepTime
from loadtest.predict.command import Prediction, predict, trace_from
from loadtest.predict.comparison import ClientRun, Mismatch, Sent, verdict
from loadtest.recording import Logged
from loadtest.workloads.trace import TraceError
from tests.unit.loadtest.predict.worlds import BLOCK, SIZES, START, STEP, logged, traffic


def prediction_of(
    requests: list[Logged], step_time: StepTime | None = None, run: ClientRun | None = None, kv_tokens: int = 40_000
) -> Prediction:
    return predict(requests, trace_from(requests, BLOCK), replace(SIZES, kv_tokens=kv_tokens), "ours", step_time, run)


def client_of(requests: list[Logged], answered: int, way_seconds: float = 0.0) -> ClientRun:
    """A client whose clock starts elsewhere, and which sent the last requests of the log."""
    sent = [
        Sent(
            one.at_seconds - START - 5,
            one.at_seconds - START - 5 + (one.first_seconds or 0.0) + way_seconds,
            one.at_seconds - START - 5 + one.duration_seconds + way_seconds,
            output_tokens=one.output_tokens,
        )
        for one in requests[-answered:]
    ]
    return ClientRun(sent, None)


def test_a_replay_runs_at_the_recorded_times() -> None:
    requests = logged(traffic())
    found = prediction_of(requests, STEP)
    lines = {line.name: line for line in found.lines}
    assert (found.before, found.judged) == (200, 200)
    assert lines["output tokens/s"].difference == pytest.approx(0, abs=0.01)
    assert lines["TTFT p50"].difference == pytest.approx(0, abs=0.02)
    assert abs(lines["hit rate"].difference) < 2
    assert verdict(found.lines)[0]


def test_sparse_arrivals_are_not_spread_as_if_a_coarse_clock_had_written_them() -> None:
    requests = logged(traffic(60, per_second=0.2))
    assert trace_from(requests, BLOCK).tick_seconds == 0
    assert {line.name: line for line in prediction_of(requests, STEP).lines}["E2E p99"].difference == pytest.approx(
        0, abs=0.01
    )


def test_a_fit_to_the_earlier_half_predicts_the_later_one() -> None:
    found = prediction_of(logged(traffic(), overhead_seconds=0.004))
    assert found.calibration.answers > 100
    assert verdict(found.lines)[0]


def test_a_wrong_step_time_does_not_fit() -> None:
    wrong = replace(STEP, per_prefill_token_seconds=STEP.per_prefill_token_seconds * 3)
    assert not verdict(prediction_of(logged(traffic()), wrong).lines)[0]


def test_the_client_s_run_is_judged_where_there_is_one() -> None:
    requests = logged(traffic(), overhead_seconds=0.004)
    found = prediction_of(requests, STEP, client_of(requests, 150, way_seconds=0.001))
    assert (found.before, found.judged) == (250, 150)
    assert found.client_seconds == pytest.approx(0.001)
    assert verdict(found.lines)[0]


def test_the_client_s_run_is_found_though_others_came_after_it() -> None:
    requests = logged(traffic(), overhead_seconds=0.004)
    for later in (1, 100):
        found = prediction_of(requests, STEP, client_of(requests[:-later], 150, way_seconds=0.001))
        assert (found.before, found.judged) == (250 - later, 150)
        assert found.client_seconds == pytest.approx(0.001)
        assert verdict(found.lines)[0]


def test_results_of_another_run_are_refused() -> None:
    requests = logged(traffic())
    with pytest.raises(Mismatch, match="no 150 requests of the log"):
        prediction_of(requests, STEP, client_of(logged(traffic(per_second=3.0)), 150))
    longer = [replace(one, output_tokens=one.output_tokens + 1) for one in requests]
    with pytest.raises(Mismatch, match="no 150 requests of the log"):
        prediction_of(requests, STEP, client_of(longer, 150))
    with pytest.raises(Mismatch, match="the log has 120"):
        prediction_of(requests[:120], STEP, client_of(requests, 150))


def test_a_cache_too_small_for_a_request_is_refused() -> None:
    with pytest.raises(TraceError, match="--kv-tokens"):
        prediction_of(logged(traffic()), STEP, kv_tokens=512)
