"""The same requests by vLLM's own client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.drive.plan import Plan
from loadtest.drive.vllm_rs import (
    NoClient,
    check_plan,
    command_for,
    cross_check,
    find_client,
    pairs_of,
    with_check,
)
from loadtest.report.cross import cross_rows, cross_title
from loadtest.report.schema import CrossCheck, Pair
from loadtest.workloads.prompts import PromptSource
from tests.unit.loadtest.report.test_summarise import _record, _summary

pytestmark = pytest.mark.flaky(reruns=2)  # clocks of a shared machine: what holds, holds in one of three tries

_RESULT = {
    "failed": 0, "request_throughput": 2.0, "output_throughput": 22.0, "p50_ttft_ms": 400.0, "p95_ttft_ms": 450.0,
    "p50_tpot_ms": 50.0, "p95_tpot_ms": 51.0, "p50_e2el_ms": 900.0, "p95_e2el_ms": 990.0,
}  # fmt: skip
_FAKE = """#!/usr/bin/env python3
import json, os, pathlib, sys
words = sys.argv[1:]
folder = pathlib.Path(words[words.index("--result-dir") + 1])
seen = {"words": words, "key": os.environ.get("OPENAI_API_KEY"), "prompts": pathlib.Path(
    words[words.index("--dataset-path") + 1]).read_text().splitlines()}
pathlib.Path(__file__).with_name("seen.json").write_text(json.dumps(seen))
(folder / "result.json").write_text('RESULT')
"""


def _plan(**more: Any) -> Plan:
    load = {"concurrency": 4, "requests": 9} if "rate_per_second" not in more else {"requests": 9}
    workload = {"groups": 2, "prefix_tokens": 20, "tail_tokens": 5, "max_tokens": 4, "output_spread": 0.5}
    return Plan.model_validate({"url": "http://x", "model": "m", "workload": workload} | load | more)


def _client(folder: Path, text: str) -> Path:
    path = folder / "vllm-rs"
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_it_gets_as_many_of_the_same_prompts_with_a_salt_of_their_own(tmp_path: Path) -> None:
    client = _client(tmp_path, _FAKE.replace("RESULT", json.dumps(_RESULT)))
    plan = _plan(cache_salt="cold", api_key="sk-secret")
    check = cross_check(client, plan, _summary([_record(index, 0.0) for index in range(3)]), "/tokenizer")
    seen = json.loads((tmp_path / "seen.json").read_text())
    prompts = [PromptSource(plan.workload).prompt(index) for index in range(3)]
    assert [json.loads(line) for line in seen["prompts"]] == [
        {"prompt": prompt.prefix + prompt.tail, "output_tokens": prompt.max_tokens} for prompt in prompts
    ]
    words = seen["words"]
    assert json.loads(words[words.index("--extra-body") + 1]) == {"cache_salt": "cold-vllm-rs"}
    assert words[words.index("--tokenizer") + 1] == "/tokenizer"
    assert seen["key"] == "sk-secret"
    assert "sk-secret" not in words
    assert check.figures["ttft_p50"] == Pair(ours=500, theirs=400)


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ({}, ["--max-concurrency", "4"]),
        ({"rate_per_second": 2.5}, ["--request-rate", "2.5", "--burstiness", "1"]),
        ({"rate_per_second": 9, "arrivals": "constant"}, ["--request-rate", "9", "--burstiness", "inf"]),
        (
            {"rate_per_second": 9, "arrivals": "gamma", "burstiness": 0.3},
            ["--request-rate", "9", "--burstiness", "0.3"],
        ),
    ],
)
def test_the_load_is_said_in_its_words(load: dict[str, Any], words: list[str]) -> None:
    command = command_for(Path("vllm-rs"), _plan(**load), Path("/d/prompts.jsonl"), 9, None)
    assert command[-len(words) :] == words
    assert command[command.index("--tokenizer") + 1] == "m"


@pytest.mark.parametrize(
    "plan",
    [
        {"endpoint": "embeddings"},
        {"stream": False},
        {"workload": {"kind": "sessions"}},
        {"first_concurrency": 1, "ramp_seconds": 3},
    ],
)
def test_what_it_cannot_repeat_is_refused_before_anything_is_sent(plan: dict[str, Any]) -> None:
    with pytest.raises(NoClient, match="only for"):
        check_plan(_plan(**plan))
    check_plan(_plan())


def test_its_failure_is_told_in_its_own_words(tmp_path: Path) -> None:
    client = _client(tmp_path, "#!/bin/sh\necho 'no tokenizer for m' >&2\nexit 3\n")
    with pytest.raises(NoClient, match="ended with 3: no tokenizer for m"):
        cross_check(client, _plan(), _summary([_record(0, 0.0)]), None)


def test_it_is_found_on_the_path_or_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = _client(tmp_path, "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_client() == client
    client.unlink()
    with pytest.raises(NoClient, match="put it on the PATH"):
        find_client()


def test_figures_stand_side_by_side_with_their_ratio() -> None:
    figures = pairs_of(_summary([_record(0, 0.0)]), _RESULT)
    check = CrossCheck(client="vllm-rs", failed=2, figures=figures)
    rows = {row[0]: row[1:] for row in cross_rows(check)}
    assert rows["TTFT p50"] == ["500 ms", "400 ms", "1.25"]
    assert rows["requests/s"] == ["1", "2", "0.50"]
    assert "2 of its requests failed" in cross_title(check)


def test_figures_that_the_clients_do_not_agree_on_are_warned_of() -> None:
    results = _summary([_record(index, 0.0) for index in range(3)])
    apart = {"requests_per_second": Pair(ours=2, theirs=3), "ttft_p50": Pair(ours=30, theirs=20)}
    near = {"tpot_p50": Pair(ours=10, theirs=12), "e2e_p95": Pair(ours=1, theirs=9)}
    check = CrossCheck(client="vllm-rs", failed=0, figures=apart | near)

    def doubts(**plan: Any) -> list[str]:
        checked = with_check(results.model_copy(update={"plan": results.plan | plan}), check)
        assert checked.cross_check is check
        return checked.verdict.warnings[len(results.verdict.warnings) :]

    closed = doubts(concurrency=4)
    assert [line.split(":")[0] for line in closed] == [
        "vllm-rs measured requests per second 3, this client 2",
        "vllm-rs measured ttft p50 20, this client 30",
    ]
    assert doubts(concurrency=None, rate_per_second=2.0) == closed[1:]
