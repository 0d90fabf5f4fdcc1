"""From records to figures and a verdict."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.drive.plan import Plan
from loadtest.drive.record import Harvest, Record, WorkerHealth
from loadtest.report.schema import Bounds, Environment, Results
from loadtest.report.summarise import summarise

_ENVIRONMENT = Environment(versions={}, command=[], started_at="", host={}, server={})
_WORKLOAD = {"groups": 2, "prefix_tokens": 90, "tail_tokens": 10, "max_tokens": 11}


def _record(index: int, start: float, **more: Any) -> Record:
    """A second long: the first token after 0.5 s, then ten more in half a second."""
    fields: dict[str, Any] = {
        "index": index,
        "group": 0,
        "intended": start,
        "sent": start,
        "first_token": start + 0.5,
        "end": start + 1.0,
        "outcome": "ok",
        "asked_tokens": 11,
        "prompt_tokens": 100,
        "completion_tokens": 11,
        "events": 11,
        "reads": 11,
    }
    return Record(**(fields | more))


def _failed(index: int, start: float, outcome: str = "http_503") -> Record:
    return Record(index, 0, start, sent=start, end=start + 0.01, outcome=outcome, status=503, detail="no backend")


def _summary(records: list[Record], bounds: Bounds | None = None, **more: Any) -> Results:
    health = more.pop("health", WorkerHealth(0, array("d", [0.001]), array("d", [0.2])))
    load = more.pop("load", {"concurrency": 4})
    early = more.pop("stopped_early", False)
    plan = Plan.model_validate({"url": "http://x", "model": "m", "requests": 9, "workload": _WORKLOAD, **load})
    ticks = more.pop("ticks", {5000: 3})
    harvest = Harvest(records, Counter(ticks), [health], stopped_early=early, lost=more.pop("lost", []))
    return summarise(plan, harvest, bounds or Bounds(), _ENVIRONMENT, {})


def test_latencies_count_from_the_intended_send_and_from_the_actual_one() -> None:
    results = _summary([_record(0, 10.0, intended=9.0)])
    latency = results.latency
    assert latency.ttft is not None
    assert latency.ttft_from_intended is not None
    assert latency.e2e_from_intended is not None
    assert latency.ttft.p50 == pytest.approx(500)
    assert latency.ttft_from_intended.p50 == pytest.approx(1500)
    assert latency.e2e_from_intended.p50 == pytest.approx(2000)
    assert results.requests.late == 1


def test_a_timer_that_fired_early_does_not_shorten_latency() -> None:
    latency = _summary([_record(0, 10.0, intended=10.0004)]).latency
    assert latency.ttft_from_intended is not None
    assert latency.ttft_from_intended.p50 == pytest.approx(500)


def test_tpot_takes_its_tokens_from_usage_even_where_chunks_hold_many() -> None:
    results = _summary([_record(0, 0.0, events=4, reads=2)])
    assert results.latency.tpot is not None
    assert results.latency.tpot.p50 == pytest.approx(50)
    assert results.streaming is not None
    assert results.streaming.tokens_per_event == 2.75
    assert results.streaming.events_per_read == 2
    assert results.latency.itl is None
    assert any("ITL is not measured" in warning for warning in results.verdict.warnings)


def test_times_between_tokens_are_reported_where_each_came_alone() -> None:
    assert _summary([_record(0, 0.0)]).latency.itl is not None


def test_answers_that_come_in_one_piece_have_no_tpot_and_are_named() -> None:
    results = _summary([_record(0, 0.0, events=1, reads=1), _record(1, 0.0)])
    assert results.latency.tpot is not None
    assert results.latency.tpot.count == 1
    assert any("50% of the streamed answers came in one piece" in warning for warning in results.verdict.warnings)


def test_failures_are_counted_by_kind_with_an_example_and_fail_the_run() -> None:
    results = _summary([_record(0, 0.0), _failed(1, 0.0), _failed(2, 0.1)])
    assert results.requests.errors == {"http_503": 2}
    assert results.requests.error_examples == {"http_503": "no backend"}
    assert results.verdict.valid
    assert not results.verdict.passed
    assert _summary([_record(0, 0.0), _failed(1, 0.0)], Bounds(max_error_ratio=0.5)).verdict.passed


def test_goodput_divides_by_what_was_offered_not_by_what_succeeded() -> None:
    records = [_record(0, 0.0), _record(1, 0.0, first_token=0.9), _failed(2, 0.0), _failed(3, 0.0, "dropped")]
    slo = _summary(records, Bounds(ttft_ms=600)).slo
    assert slo is not None
    assert (slo.met, slo.offered, slo.attainment) == (1, 4, 0.25)
    assert not slo.passed


def test_goodput_holds_the_client_queue_against_the_server() -> None:
    slo = _summary([_record(0, 5.0, intended=0.0)], Bounds(ttft_ms=600)).slo
    assert slo is not None
    assert slo.met == 0


def test_goodput_is_of_the_same_stretch_as_requests_a_second() -> None:
    slow_end = [_record(index, index / 10) for index in range(100)] + [_record(100, 10.0, end=20.0)]
    results = _summary(slow_end, Bounds(ttft_ms=600), load={"rate_per_second": 10})
    assert results.slo is not None
    assert results.steady is not None
    assert results.slo.attainment == 1
    assert results.slo.goodput_per_second == results.steady.requests_per_second == pytest.approx(10, rel=0.02)
    assert results.overall.requests_per_second < 6


@given(
    waits=st.lists(st.floats(0.01, 3), min_size=1, max_size=40),
    load=st.sampled_from([{"concurrency": 4}, {"rate_per_second": 10}]),
)
def test_goodput_is_requests_a_second_less_those_beyond_a_bound(waits: list[float], load: dict[str, float]) -> None:
    records = [_record(i, i / 10, first_token=i / 10 + wait, end=i / 10 + wait + 1) for i, wait in enumerate(waits)]
    results = _summary(records, Bounds(ttft_ms=1000), load=load)
    rates = results.steady or results.overall
    late = sum(wait > 1 and rates.start <= record.end <= rates.end for wait, record in zip(waits, records, strict=True))
    assert results.slo is not None
    lost = rates.requests_per_second - results.slo.goodput_per_second
    assert lost * (rates.end - rates.start) == pytest.approx(late, abs=1e-6)


@pytest.mark.parametrize(
    ("record", "keeps"),
    [
        ({}, True),  # 50 ms a token
        ({"end": 2.5}, False),
        ({"events": 11, "reads": 1}, False),  # collected on the way: nothing was measured
        ({"completion_tokens": None}, False),
        ({"first_token": None, "events": 0, "reads": 0}, False),  # was not streamed
        ({"completion_tokens": 1, "events": 1, "reads": 1}, True),  # has no time between tokens
        ({"completion_tokens": None, "asked_tokens": 0, "first_token": None}, True),  # embeddings
    ],
)
def test_a_bound_on_tpot_is_kept_only_by_what_was_measured_or_has_no_tpot(record: dict[str, Any], keeps: bool) -> None:
    slo = _summary([_record(0, 0.0, **record)], Bounds(tpot_ms=60)).slo
    assert slo is not None
    assert (slo.met, slo.attainments) == (int(keeps), {"tpot": float(keeps)})


@pytest.mark.parametrize(
    ("token_ms", "lag_ms", "valid"),
    [(8, 3.9, True), (8, 4.1, False), (8, 9.9, False), (30, 9.9, True), (1, 1.9, True), (1, 2.1, False)],
)
def test_a_loop_that_lags_by_half_a_time_between_tokens_makes_the_run_invalid(
    token_ms: int, lag_ms: float, valid: bool
) -> None:
    health = WorkerHealth(0, array("d", [lag_ms / 1e3]), array("d", [0.2]))
    verdict = _summary([_record(0, 0.0)], health=health, ticks={token_ms * 100: 10}).verdict
    assert verdict.valid == valid
    assert valid or "half of ITL p50" in verdict.reasons[0]


@pytest.mark.parametrize(
    ("health", "reason"),
    [
        (WorkerHealth(0, array("d", [0.2] * 10), array("d", [0.2])), "event loop lag"),
        (WorkerHealth(0, array("d", [0.001]), array("d", [0.95])), "of a core"),
    ],
)
def test_a_client_at_its_limit_makes_the_run_invalid(health: WorkerHealth, reason: str) -> None:
    verdict = _summary([_record(0, 0.0)], health=health).verdict
    assert not verdict.valid
    assert not verdict.passed
    assert reason in verdict.reasons[0]


def test_late_or_dropped_sends_make_the_run_invalid() -> None:
    late = _summary([_record(index, 10.0, intended=9.0) for index in range(5)]).verdict
    assert any("sent late" in reason for reason in late.reasons)
    dropped = _summary([_record(0, 0.0), _failed(1, 0.0, "dropped")]).verdict
    assert any("never sent" in reason for reason in dropped.reasons)
    assert not late.valid
    assert not dropped.valid


def test_a_run_that_lost_a_worker_is_invalid_and_says_why() -> None:
    verdict = _summary([_record(0, 0.0)], lost=["client worker 1 was killed by signal 9"]).verdict
    assert not verdict.valid
    assert verdict.reasons == ["client worker 1 was killed by signal 9: the load was not the planned one"]


def test_a_single_freeze_is_a_stall_and_no_rate_above_capacity() -> None:
    """20 requests a second for 8 s, half a second each; nothing moves from second 3.5 to 6.5."""
    records = []
    for index in range(160):
        sent = index / 20
        end = sent + 0.5 if sent + 0.5 < 3.5 or sent >= 6.5 else max(6.5, sent) + 0.5
        quiet = (max(sent, 3.5), 6.5) if sent < 6.5 < end else (sent, sent + 0.1)
        fields = {"first_token": end - 0.1, "end": end, "quiet_from": quiet[0], "quiet_until": quiet[1]}
        records.append(_record(index, sent, **fields))
    warnings = _summary(records, load={"rate_per_second": 20}).verdict.warnings
    assert any("1 stall: nothing came for 3.0 s" in warning for warning in warnings)
    assert not any("above capacity" in warning for warning in warnings)


def test_the_steady_part_of_a_closed_loop_leaves_out_ramp_and_tail() -> None:
    records = [_record(slot * 10 + turn, float(turn)) for slot in range(4) for turn in range(5)]
    records += [_record(99, 5.0, end=15.0, first_token=5.5)]
    results = _summary(records)
    assert results.steady is not None
    assert (results.steady.start, results.steady.end) == (1.0, 5.0)
    assert results.steady.requests_per_second == pytest.approx(5.0)
    assert results.overall.requests_per_second == pytest.approx(21 / 15)
    assert results.concurrency.peak == 4


def test_a_stretch_shorter_than_a_request_is_no_steady_part() -> None:
    few = [_record(0, 0.0), _record(1, 1.05)]
    results = _summary(few, load={"rate_per_second": 0.5, "requests": 2})
    assert results.steady is None  # the one answer in the 50 ms between would make 20 requests/s
    assert results.overall.requests_per_second == pytest.approx(2 / 2.05)


def test_tokens_of_a_request_count_only_for_the_part_decoded_in_the_window() -> None:
    results = _summary([_record(0, 0.0), _record(1, 0.25)], load={"concurrency": 2})
    assert results.steady is None
    assert results.overall.output_tokens_per_second == pytest.approx(22 / 1.25)


def test_backends_share_hits_affinity_and_the_ideal_are_reported() -> None:
    a, b = {"backend": "a", "cached_tokens": 80, "predicted_tokens": 90}, {"backend": "b", "cached_tokens": 0}
    records = [_record(0, 0.0, **a), _record(1, 0.0, **a), _record(2, 0.0, **b), _record(3, 0.0, group=1, **b)]
    routing = _summary(records).routing
    assert [(one.name, one.share, one.hit_ratio, one.peak_in_flight) for one in routing.backends] == [
        ("a", 0.5, 0.8, 2),
        ("b", 0.5, 0.0, 2),
    ]
    assert routing.backends[0].predicted_ratio == 0.9
    assert routing.hit_ratio == 0.4
    assert routing.affinity == 0.75
    assert routing.ideal_hit_ratio == pytest.approx(2 * 90 / 400)


def test_time_queued_in_the_gateway_is_not_time_in_flight_at_the_backend() -> None:
    queued = {"backend": "a", "queue_seconds": 0.9}
    records = [_record(0, 0.0, backend="a", end=0.8), _record(1, 0.0, **queued)]
    assert _summary(records).routing.backends[0].peak_in_flight == 1


def test_a_growing_backlog_in_an_open_loop_is_named() -> None:
    growing = [_record(index, index / 10, end=index / 10 + 1 + index / 10) for index in range(200)]
    flat = [_record(index, index / 10) for index in range(200)]
    load = {"rate_per_second": 10, "requests": 200}
    assert any("backlog" in warning for warning in _summary(growing, load=load).verdict.warnings)
    assert not any("backlog" in warning for warning in _summary(flat, load=load).verdict.warnings)


def test_a_ramp_is_no_part_of_the_steady_stretch_and_no_backlog() -> None:
    load = {"rate_per_second": 10, "first_rate_per_second": 0, "ramp_seconds": 8, "requests": 200}
    growing = [_record(index, index / 10, end=index / 10 + 1 + index / 10) for index in range(200)]
    results = _summary(growing, load=load)
    assert results.steady is not None
    assert results.steady.start == 8
    assert not any("backlog" in warning for warning in results.verdict.warnings)


def test_a_run_that_was_ended_by_hand_says_so_and_counts_no_request_as_failed() -> None:
    results = _summary([_record(0, 0.0), _failed(1, 0.0, "interrupted")], stopped_early=True)
    assert results.verdict.ended_early
    assert results.verdict.passed
    assert results.requests.interrupted == 1


def test_a_run_without_a_single_request_is_a_failure_and_not_a_crash() -> None:
    results = _summary([])
    assert results.verdict.reasons == ["no request succeeded"]


def test_results_survive_their_json() -> None:
    results = _summary([_record(0, 0.0), _failed(1, 0.0)])
    assert Results.model_validate_json(results.model_dump_json()) == results


def test_results_of_the_first_schema_are_still_read() -> None:
    old = _summary([_record(0, 0.0)]).model_dump(mode="json")
    for added in ("parts", "stalls", "samples", "definitions"):
        del old[added]
    del old["streaming"]["whole_ratio"]
    old["schema_version"] = 1
    assert Results.model_validate(old).schema_version == 1


def test_results_that_hold_the_figures_of_a_second_client_are_still_read() -> None:
    results = _summary([_record(0, 0.0)])
    for second in (None, {"client": "another", "failed": 0, "figures": {"ttft_p50": {"ours": 2.0, "theirs": 3.0}}}):
        assert Results.model_validate(results.model_dump(mode="json") | {"cross_check": second}) == results


def test_the_timeline_accounts_for_every_request_and_token() -> None:
    records = [_record(index, index * 0.37) for index in range(50)] + [_failed(50, 3.0)]
    timeline = _summary(records).timeline
    width = timeline[1].start - timeline[0].start
    assert sum(bucket.succeeded for bucket in timeline) == 50
    assert sum(bucket.failed for bucket in timeline) == 1
    assert sum(bucket.output_tokens_per_second * width for bucket in timeline) == pytest.approx(550)
