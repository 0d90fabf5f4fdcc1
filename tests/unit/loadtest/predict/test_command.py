import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner, Result

from loadtest.__main__ import app
from loadtest.engine.command import SimOptions
from loadtest.engine.step_time import PRESETS
from loadtest.recording import Logged
from loadtest.replay.options import ReplayOptions
from loadtest.workloads.trace import read_trace
from tests.unit.loadtest.predict.worlds import BLOCK, SIZES, logged, traffic


def line_of(request: Logged) -> dict[str, Any]:
    return {
        "time": request.at_seconds + request.duration_seconds,
        "duration_ms": request.duration_seconds * 1000,
        "first_byte_ms": None if request.first_seconds is None else request.first_seconds * 1000,
        "queue_ms": request.queue_seconds * 1000,
        "stream": True,
        "model": request.model,
        "backend": request.backend,
        "prompt_tokens": request.prompt_tokens,
        "completion_tokens": request.output_tokens,
        "actual_hit_tokens": request.cached_tokens,
        "prefix": {"bytes": request.size_bytes, "ends": request.ends, "hashes": request.hashes},
    }


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines))
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return written(tmp_path / "access.log", [line_of(request) for request in logged(traffic())])


def asked(*arguments: str | Path) -> Result:
    sizes = {
        "--kv-tokens": SIZES.kv_tokens,
        "--max-num-seqs": SIZES.max_num_seqs,
        "--max-num-batched-tokens": SIZES.max_num_batched_tokens,
        "--block-size": BLOCK,
    }
    flags = [str(part) for pair in sizes.items() for part in pair]
    return CliRunner().invoke(app, ["predict", *map(str, arguments), *flags])


def test_the_later_half_of_a_log_is_predicted_and_kept(log: Path, tmp_path: Path) -> None:
    result = asked(log, "--out", tmp_path / "kept")
    assert result.exit_code == 0, result.output
    assert "The model fits" in result.output
    document = orjson.loads((tmp_path / "kept" / "prediction.json").read_bytes())
    assert document["fits"] is True
    assert document["engines"]["count"] == 2
    assert [figure["name"] for figure in document["figures"]][:2] == ["TTFT p50", "TTFT p90"]
    text = (tmp_path / "kept" / "prediction.md").read_text()
    assert "| TTFT p50 | " in text
    assert re.search(r"Step time, fitted to 1\d\d earlier answers", text)
    assert len(read_trace(tmp_path / "kept" / "trace.jsonl", BLOCK).rows) == 400


def test_a_simulated_engine_and_a_replay_take_the_fitted_step_times(log: Path, tmp_path: Path) -> None:
    assert asked(log, "--out", tmp_path).exit_code == 0
    prediction = tmp_path / "prediction.json"
    fitted = orjson.loads(prediction.read_bytes())["calibration"]["step_time"]
    given = SimOptions(port=0, step_times=prediction, tensor_parallel_size=2).engine.step_time
    assert asdict(given) == fitted
    [fleet] = ReplayOptions(traces=["any"], step_times=prediction, backends="1").fleets()
    assert fleet.step_time == given


@pytest.mark.parametrize(
    "change", [{"base_seconds": 0.0}, {"per_prefill_token_seconds": -1.0}, {"matrix_seconds": "x"}]
)
def test_step_times_of_another_file_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "prediction.json"
    path.write_bytes(orjson.dumps({"calibration": {"step_time": asdict(PRESETS["cpu-tiny"]) | change}}))
    for command in (["sim", "--port", "0"], ["replay", "regime:mixed"]):
        result = CliRunner().invoke(app, [*command, "--step-times", str(path)])
        assert result.exit_code == 2
        assert "step" in result.output


def test_given_step_times_are_used(log: Path) -> None:
    result = asked(log, "--preset", "cpu-tiny")
    assert result.exit_code == 0, result.output
    assert "Step time, given: 3.30 ms, 60.0 µs a prefilled token" in result.output


@pytest.mark.parametrize(
    ("change", "flags", "complaint"),
    [
        ({"prefix": None}, [], "0 requests are too few; left out: 12 without prefix hashes"),
        ({}, ["--policy", "lmetric"], "'lmetric' unknown"),
        ({}, [], "a fit needs 20 streamed answers"),
    ],
)
def test_what_cannot_be_used_is_reported(
    tmp_path: Path, change: dict[str, Any], flags: list[str], complaint: str
) -> None:
    few = written(tmp_path / "few.log", [line_of(request) | change for request in logged(traffic(12))])
    result = asked(few, *flags)
    assert result.exit_code == 2
    assert complaint in result.output


def test_one_model_is_predicted_at_a_time(tmp_path: Path) -> None:
    lines = [line_of(request) for request in logged(traffic(24))]
    lines[3]["model"] = "other"
    assert "--model: the log has m, other" in asked(written(tmp_path / "two.log", lines)).output
