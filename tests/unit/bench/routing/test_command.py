"""The whole comparison at its smallest: simulated engines, one arm, a few seconds."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.bench.__main__ import app
from tests.bench.routing.results import RoutingResults

SMALL = ["--engine", "sim", "--limit", "60", "--rate", "10", "--reps", "1"]


def run(tmp_path: Path, *arguments: str) -> str:
    told = CliRunner().invoke(app, ["routing", *arguments, "--dir", str(tmp_path), "--out", str(tmp_path / "out")])
    assert told.exit_code == 0, told.output
    return told.output


def test_a_trace_goes_through_the_gateway_and_its_figures_are_kept(tmp_path: Path) -> None:
    run(tmp_path, "gateway-prefix", "smg", *SMALL)
    found = RoutingResults.model_validate_json((tmp_path / "out" / "results.json").read_text())
    assert list(found.turns) == ["gateway-prefix"]  # smg is not installed there
    [turn] = found.turns["gateway-prefix"]
    assert turn.figures is not None, turn.failure
    figures = turn.figures
    assert (figures.requests, figures.failed, figures.wrong_lengths) == (60, {}, 0)
    assert 0 < figures.hit_ratio <= found.setup.ideal_hit_ratio
    assert figures.prompt_tokens == found.setup.prompt_tokens
    assert figures.fidelity is not None
    assert figures.fidelity.requests == 60
    assert len(turn.ttft_ms) == 60
    assert figures.router_cpu_ms > 0
    assert (tmp_path / "out" / "latency.svg").read_text().startswith("<svg")
    assert "gateway, prefix" in (tmp_path / "out" / "results.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--restart", "--wipe"], "--restart or --wipe"),
        (["--slow", "2.5"], "simulated engines"),
        (["--engine", "sim", "--wipe"], "--wipe and"),
        (["--engine", "sim", "--kv-events"], "--wipe and"),
        (["nginx"], "no arm nginx"),
        (["--trace", "nothing.jsonl"], "No such file"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(arguments: list[str], told: str, tmp_path: Path) -> None:
    answered = CliRunner().invoke(app, ["routing", *arguments, "--dir", str(tmp_path)])
    assert answered.exit_code == 2
    assert told in answered.output
