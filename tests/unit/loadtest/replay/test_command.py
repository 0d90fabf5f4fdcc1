"""`loadtest replay` from the command line to its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from loadtest.__main__ import app
from tests.unit.loadtest.replay.builders import conversation_trace

RUNNER = CliRunner()


def replayed(trace_file: Path, out: Path, options: str) -> tuple[str, dict[str, Any]]:
    """What a replay prints, and its results."""
    arguments = ["replay", str(trace_file), "--block-size", "64", "--out", str(out), *options.split()]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout, json.loads((out / "results.json").read_text())


@pytest.fixture(name="trace_file")
def _trace_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "small.jsonl"
    rows = (
        {
            "timestamp": round(row.at_seconds * 1000),
            "input_length": row.prompt_tokens,
            "output_length": row.output_tokens,
            "hash_ids": row.keys,
        }
        for row in conversation_trace(rows=200).rows
    )
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    return path


def test_a_grid_is_reported_as_tables_figures_and_a_picture(trace_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    printed, document = replayed(
        trace_file,
        out,
        "--policies ours,lmetric --backends 2 --load 0.5,1.2 --seeds 2 --jobs 1"
        " --slow 2:1 --restart 0.5:half --flash-crowd --join 0.6:1 --misleading waiting:40,preemptions,kv:0.5,seqs:8",
    )
    assert "2 engines, load 0.5" in printed
    assert "geometric mean" in printed
    assert "before and after engines joined" in printed
    assert len(document["outcomes"]) == 8
    assert set(document["ratios"]) == {"ours", "lmetric"}
    assert set(document["ratios"]["lmetric"].values()) == {1.0}
    assert document["capacity_requests_per_second"]["2"] > 0
    page = (out / "report.html").read_text()
    assert page.count("data-plot=") == 5
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert (tmp_path / "cache" / "loadtest" / "capacities.json").exists()


def test_a_regime_stands_in_place_of_a_trace(tmp_path: Path) -> None:
    options = "--policies lmetric --backends 1 --load 1 --capacity 10 --jobs 1 --limit 100"
    _, document = replayed(Path("regime:tools"), tmp_path, options)
    assert document["trace"] == {"name": "tools", "rows": 100, "block_tokens": 64}


def test_several_traces_have_a_folder_each_and_one_verdict(trace_file: Path, tmp_path: Path) -> None:
    options = "--policies ours,lmetric,ours_exact --backends 1 --load 0.5,1 --capacity 10 --jobs 1 --limit 60"
    arguments = ["replay", str(trace_file), "regime:synthetic", "--out", str(tmp_path), *options.split()]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "small" / "results.json").read_text())["trace"]["name"] == "small"
    assert (tmp_path / "synthetic" / "report.html").exists()
    table = result.stdout.partition("Ours against the best other policy")[2]
    cells, lines = table.split("Verdict")
    assert cells.count("lmetric") == 2 * 2 * 2
    assert [line.split()[:2] for line in lines.splitlines()[4:7]] == [["small", "2"], ["synthetic", "2"], ["all", "4"]]


def test_two_processes_find_what_one_finds(trace_file: Path, tmp_path: Path) -> None:
    documents = []
    for jobs in ("1", "2"):
        options = f"--policies ours,sglang --backends 2 --load 0.9 --capacity 20 --jobs {jobs}"
        _, document = replayed(trace_file, tmp_path / jobs, options)
        for outcome in document["outcomes"]:
            del outcome["figures"]["cpu_seconds"]
        documents.append(document["outcomes"])
    assert documents[0] == documents[1]


def test_arms_of_admission_stand_side_by_side(trace_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    printed, document = replayed(
        trace_file,
        out,
        "--policies ours,lmetric --backends 1 --load 1 --capacity 30 --jobs 1 --kv-tokens 6000 --output-times 5"
        " --max-tokens-times 1 --misjudged 0.1 --admission none,static:1,static:4,static:16",
    )
    assert "most waiting" in printed
    outcomes = document["outcomes"]
    preempted = {outcome["policy"]: outcome["figures"]["preemptions"] for outcome in outcomes}
    assert list(preempted) == ["ours, none", "ours, static:1", "ours, static:4", "ours, static:16", "lmetric"]
    assert preempted["ours, none"] > preempted["ours, static:4"]
    assert "ours, static:4" in (out / "report.html").read_text()
    curve = (out / "knee.svg").read_text()
    assert "preemptions over the limit" in curve
    assert ">none</text>" in curve


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "best"], "best unknown"),
        (["--baseline", "best"], "--baseline: best unknown"),
        (["--admission", "slots,static:0"], "'static:0' unknown"),
        (["--load", "0.5,x"], "--load"),
        (["--backends", "0"], "above 0"),
        (["--slow", "x"], "FACTOR:COUNT"),
        (["--slow", "2:1:secret"], "FACTOR:COUNT:untold"),
        (["--restart", "2"], "share from 0 to 1"),
        (["--restart", "0.5:some"], "AT:SHARE"),
        (["--join", "0.5:none"], "AT:COUNT"),
        (["--join", "1:1"], "share from 0 to 1"),
        (["--misleading", "waiting:x"], "'waiting:x' is not waiting:N"),
        (["--misleading", "kv:0"], "numbers must be above 0"),
        (["--kv-tokens", "500"], "--kv-tokens"),
        (["regime:tools", "regime:tools"], "same name"),
        (["regime:best"], "there are reasoning"),
    ],
)
def test_what_cannot_be_is_reported_with_exit_code_2(trace_file: Path, arguments: list[str], message: str) -> None:
    result = RUNNER.invoke(app, ["replay", str(trace_file), "--block-size", "64", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
