"""What the options of a run come to as a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loadtest.drive.options import RunOptions
from loadtest.drive.plan import Plan
from loadtest.drive.run import orders_of
from loadtest.drive.target import Target
from loadtest.workloads.prompts import Endpoint, WorkloadKind

_TARGET = Target(["first", "second"], bytes_per_token=4.0)


def _plan(**options: Any) -> Plan:
    chosen = RunOptions(url="http://x/v1", **options)
    return chosen.plan("http://x", _TARGET, chosen.loads()[0], chosen.drawn_seed(), cpus=4)


def test_a_load_from_one_value_to_another_takes_the_whole_run_or_as_long_as_said() -> None:
    plan = _plan(rate="5:50", duration=20.0)
    assert (plan.first_rate_per_second, plan.rate_per_second, plan.ramp_seconds) == (5, 50, 20)
    plan = _plan(concurrency="4:64", requests=900, ramp=8.0)
    assert (plan.first_concurrency, plan.concurrency, plan.ramp_seconds, plan.duration_seconds) == (4, 64, 8, None)
    assert _plan(rate="1:2").ramp_seconds == _plan(rate="1:2").duration_seconds == 30


def test_gamma_gaps_are_bursty_by_default() -> None:
    assert _plan(rate="1", arrivals="gamma").burstiness == 0.5
    assert _plan(rate="1", arrivals="gamma", burstiness=3.0).burstiness == 3


def test_a_trace_is_sent_at_its_own_times_and_to_its_end(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text("{}")
    plan = _plan(trace=trace, trace_speed=2.0)
    assert (plan.trace_speed, plan.duration_seconds, plan.workload.kind) == (2, None, WorkloadKind.TRACE)
    assert plan.workload.file is not None
    assert len(plan.workload.file.sha256) == 64
    plan = _plan(trace=trace, rate="3")
    assert (plan.trace_speed, plan.rate_per_second) == (None, 3)


def test_the_workload_follows_from_what_is_asked_for(tmp_path: Path) -> None:
    dataset = tmp_path / "d.json"
    dataset.write_text("[]")
    assert _plan(concurrency="1").workload.kind is WorkloadKind.SHARED_PREFIX
    assert _plan(concurrency="1", dataset=dataset).workload.kind is WorkloadKind.SHAREGPT
    embeddings = _plan(concurrency="1", endpoint=Endpoint.EMBEDDINGS, inputs="1:8")
    assert (embeddings.workload.kind, embeddings.workload.inputs) == (WorkloadKind.TEXTS, (1, 8))
    assert not embeddings.stream


def test_a_mix_names_endpoints_or_workloads_and_has_a_model_for_embeddings() -> None:
    plan = _plan(concurrency="1", mix="chat=3,sessions=1,embeddings=1", embeddings_model="second", turns="3")
    reported = [(part.endpoint, part.model, part.stream, part.workload.kind) for part in plan.mix]
    assert reported == [
        (Endpoint.CHAT, "first", True, WorkloadKind.SHARED_PREFIX),
        (Endpoint.CHAT, "first", True, WorkloadKind.SESSIONS),
        (Endpoint.EMBEDDINGS, "second", False, WorkloadKind.TEXTS),
    ]
    assert plan.mix[1].workload.turns == (3, 3)
    assert len({part.workload.seed for part in plan.mix}) == 3
    assert plan.part(plan.mix[2]).endpoint is Endpoint.EMBEDDINGS


def test_bounds_are_asked_for_in_seconds_and_kept_in_milliseconds() -> None:
    bounds = RunOptions(url="x", concurrency="1", slo="ttft=0.5, tpot=0.05,e2e=9,p=0.9").bounds
    assert (bounds.ttft_ms, bounds.tpot_ms, bounds.e2e_ms, bounds.attainment) == (500, 50, 9000, 0.9)
    assert RunOptions(url="x", concurrency="1", slo="ttft=1").bounds.attainment == 0.95


def test_every_target_is_run_under_every_load_in_turns_with_the_same_prompts_and_a_cold_cache() -> None:
    options = RunOptions(targets="direct=http://a/v1,gateway=http://b", rate="5,10", repeat=2, seed=7, requests=9)
    runs = list(orders_of(options, {"direct": _TARGET, "gateway": _TARGET}))
    assert [(target, load, repetition) for target, load, repetition, _ in runs] == [
        ("direct", "r5", 0),
        ("gateway", "r5", 0),
        ("direct", "r10", 0),
        ("gateway", "r10", 0),
        ("gateway", "r5", 1),
        ("direct", "r5", 1),
        ("gateway", "r10", 1),
        ("direct", "r10", 1),
    ]
    plans = [order.plan for _, _, _, order in runs]
    assert [plan.url for plan in plans[:2]] == ["http://a", "http://b"]
    assert [plan.rate_per_second for plan in plans[:4]] == [5, 5, 10, 10]
    seeds = [plan.workload.seed for plan in plans]
    assert seeds[0::2] == seeds[1::2]
    assert len(set(seeds)) == 4
    assert len({plan.cache_salt for plan in plans}) == 8
