"""What a plan may say, and where a wrong one is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from loadtest.drive.target import Target
from loadtest.sweep.plan import PlanError, SweepPlan, Workload, parse


def document(**changes: Any) -> dict[str, Any]:
    return {
        "serve": {"simulated": True},
        "flags": {"max-num-seqs": [4, 16]},
        "workloads": [{"name": "short", "run": {"concurrency": 8, "requests": 100}}],
        **changes,
    }


def plan(**changes: Any) -> SweepPlan:
    return parse(document(**changes))


def workload(**run: Any) -> Workload:
    return Workload(name="short", run=run)


def test_a_small_plan_is_enough() -> None:
    made = plan()
    assert made.through == ["direct"]
    assert made.search == "grid"
    assert made.serve.simulated == {}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"colour": 1}, "colour: unknown key"),
        ({"serve": {}}, "serve: give one of command, simulated and vllm_cpu"),
        ({"serve": {"simulated": True, "command": ["vllm"]}}, "serve: give one of"),
        ({"flags": {"--max-num-seqs": [1]}}, "flags: '--max-num-seqs' is no flag"),
        ({"flags": {"port": [1]}}, "flags: port is chosen by the sweep"),
        ({"flags": {"max-num-seqs": []}}, "flags: max-num-seqs needs values, each once"),
        ({"flags": {"max-num-seqs": [4, 4]}}, "flags: max-num-seqs needs values, each once"),
        ({"flags": {"max-num-seqs": [4], "max_num_seqs": [5]}}, "flags: a flag is there twice"),
        ({"workloads": []}, "workloads: List should have at least 1 item"),
        ({"workloads": [{"name": "a/b", "run": {"concurrency": 1}}]}, "workloads.0.name: may hold letters"),
        ({"workloads": [{"name": "a", "run": {"concurency": 1}}]}, "workloads.0.run: concurency is no option"),
        ({"workloads": [{"name": "a", "run": {"url": "x"}}]}, "workloads.0.run: url is not for a sweep's runs"),
        ({"workloads": [{"name": "a", "run": {"concurrency": "1,2"}}]}, "workloads.0.run: several loads"),
        ({"workloads": [{"name": "a", "run": {}}]}, "workloads.0.run: give --concurrency"),
        ({"workloads": [{"name": "a", "run": {"rate": 1}}] * 2}, "plan: workloads: each name once"),
        ({"through": ["direct", "direct"]}, "plan: through: each way once"),
        ({"through": "around"}, "through.0: must be 'direct' or 'gateway'"),
        ({"gateway_config": "gateway.yaml"}, "plan: gateway_config is for `through: gateway`"),
        ({"exclude": [{"max-num-seqs": 4, "speed": 1}]}, "plan: exclude: speed is not among the flags"),
        ({"objective": {"maximise": "joy"}}, "objective.maximise: Input should be"),
        ({"objective": {"ttft_p95_seconds": 0}}, "objective.ttft_p95_seconds: must be more than 0"),
        ({"gpus": 0}, "gpus: must be at least 1"),
    ],
)
def test_a_wrong_plan_is_reported_where(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(PlanError) as raised:
        plan(**changes)
    assert complaint in str(raised.value)


def test_a_plan_is_a_mapping() -> None:
    with pytest.raises(PlanError, match="must be a mapping"):
        parse(["serve"])


def test_values_of_yaml_are_taken_as_the_command_line_would_take_them() -> None:
    run = {"concurrency": 8, "cache-salt": False, "workers": 2, "extra-body": {"top_k": 3}, "turns": "2:6"}
    options = workload(**run).options("http://127.0.0.1:1", 1.0, 0)
    assert (options.concurrency, options.cache_salt, options.workers) == ("8", "off", "2")
    assert options.extra_body == '{"top_k":3}'


def test_a_mix_is_written_as_on_the_command_line_or_as_a_mapping() -> None:
    for written in ("shared-prefix=3,sessions=1", {"shared-prefix": 3, "sessions": 1}):
        options = workload(rate=5, mix=written).options("http://127.0.0.1:1", 1.0, 0)
        (load,) = options.loads()
        made = options.plan("http://127.0.0.1:1", Target(["m"]), load, 1)
        assert [(part.name, part.share) for part in made.mix] == [("shared-prefix", 3), ("sessions", 1)]


def test_a_mix_of_something_unknown_is_reported_where() -> None:
    with pytest.raises(PlanError, match=r"workloads.0.run: --mix: 'poems' is none of"):
        plan(workloads=[{"name": "a", "run": {"rate": 1, "mix": {"poems": 1}}}])


def test_underscores_are_dashes_in_flags() -> None:
    assert list(plan(flags={"max_num_seqs": [1], "kv-transfer-config.kv_role": ["x"]}).flags) == [
        "max-num-seqs",
        "kv-transfer-config.kv_role",
    ]


def test_a_share_shortens_requests_and_seconds() -> None:
    both = workload(rate=5, requests=100, duration=60).options("http://127.0.0.1:1", 0.25, 0)
    assert (both.requests, both.duration) == (25, 15)
    neither = workload(rate=5).options("http://127.0.0.1:1", 0.5, 0)
    assert (neither.requests, neither.duration) == (None, 15)
    few = workload(rate=5, requests=2).options("http://127.0.0.1:1", 0.1, 0)
    assert (few.requests, few.duration) == (1, None)


def test_configurations_get_the_same_prompts_and_repetitions_others() -> None:
    load = workload(rate=5, seed=7)
    seeds = [load.options("http://127.0.0.1:1", 1.0, repetition).seed for repetition in (0, 0, 1)]
    assert seeds == [7, 7, 1007]


def test_halving_does_not_cut_a_trace(tmp_path: Any) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("")
    run = [{"name": "recorded", "run": {"trace": str(trace)}}]
    assert plan(workloads=run).search == "grid"
    with pytest.raises(PlanError, match="halving shortens runs"):
        plan(workloads=run, search="halving")


def test_a_plan_never_changes() -> None:
    with pytest.raises(ValidationError):
        plan().gpus = 3  # type: ignore[misc]
