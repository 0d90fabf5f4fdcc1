"""Proxies are compared on simulated engines; what is told of them is what the engines counted."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

pytestmark = pytest.mark.simulated("the command starts them")
REQUESTS = 40
LOAD = ("-c", "4", "-n", str(REQUESTS), "--max-tokens", "6", "--output-spread", "0", "--groups", "2")
SIZES = ("--prefix-tokens", "256", "--pairs", "6", "--overhead", "no", "--kv-tokens", "16384")
BROKEN = "#!/bin/sh\necho 'no such policy' >&2\nexit 3\n"


def compared(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "loadtest", "compare", *arguments, *LOAD, *SIZES, "--out", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (folder / "compare.json").exists(), ended.stderr + ended.stdout
    return ended.returncode, orjson.loads((folder / "compare.json").read_bytes()), ended.stdout


def results_of(folder: Path, turn: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads((folder / turn["folder"] / "results.json").read_bytes())
    return found


def check_outcome(code: int, document: dict[str, Any]) -> None:
    """Nothing failed but, on a machine that others use, the client, which is told and fails the comparison."""
    assert code == (0 if document["passed"] else 1)
    assert all("invalid: client" in reason or "requests were sent late" in reason for reason in document["reasons"])


def served(results: dict[str, Any]) -> float:
    return sum(value for name, value in results["metrics_delta"].items() if "vllm:request_success_total" in name)


def test_figures_are_the_engines_counts_and_a_proxy_that_does_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    broken = tmp_path / "peers" / "smg" / "bin" / "smg"
    broken.parent.mkdir(parents=True)
    broken.write_text(BROKEN)
    broken.chmod(0o755)
    plain = next((name for name in ("haproxy", "nginx") if shutil.which(name)), None)
    arms = ["gateway", "smg", *([plain] if plain else [])]
    code, document, printed = compared(tmp_path / "out", *arms, "--peers", str(tmp_path / "peers"))
    turns = {turn["arm"]: turn for turn in document["turns"]}
    assert sorted(turns) == sorted(arms)
    for name in set(arms) - {"smg"}:
        turn, results = turns[name], results_of(tmp_path / "out", turns[name])
        figures = turn["figures"]
        assert figures["requests"] == results["requests"]["succeeded"] == served(results) == REQUESTS
        told = results["tokens"]["cached"] / results["tokens"]["prompt"]
        assert figures["hit_ratio"] == pytest.approx(told, abs=1e-6)
        assert 0.2 < figures["hit_ratio"] < 1
        assert turn["passes_salt"] is True
        assert turn["overhead"]["added"]["pairs"] == 6
        assert figures["cpu_us_per_request"] > figures["cpu_us_per_event"] > 0
        assert figures["memory_mib"] > 1
        assert len(figures["ttft_ms"]) == REQUESTS
    assert turns["smg"]["failure"] == "it ended by itself, exit code 3"
    assert turns["smg"]["log"] == ["no such policy"]
    assert "no such policy" in printed
    check_outcome(code, document)
    told = (tmp_path / "out" / "compare.md").read_text()
    assert "smg, repetition 1: it ended by itself, exit code 3." in told
    assert "| gateway" in told


def test_one_engine_without_a_proxy_is_an_arm_like_the_others(tmp_path: Path) -> None:
    code, document, _ = compared(tmp_path / "out", "direct", "gateway", "--engines", "1", "--repeat", "2")
    assert [turn["arm"] for turn in document["turns"]].count("direct") == 2
    assert document["turns"][0]["arm"] != document["turns"][2]["arm"]
    hits = {turn["arm"]: turn["figures"]["hit_ratio"] for turn in document["turns"] if turn["repetition"] == 0}
    assert hits["direct"] == pytest.approx(hits["gateway"], abs=0.1)
    assert all(turn["figures"]["cpu_us_per_request"] is None for turn in document["turns"] if turn["arm"] == "direct")
    check_outcome(code, document)
