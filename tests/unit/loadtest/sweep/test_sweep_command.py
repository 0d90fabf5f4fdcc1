"""`loadtest sweep` on simulated engines, as users start it."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from loadtest.__main__ import app
from loadtest.checkpoint.document import Checkpoint, Status
from loadtest.sweep.command import read_plan
from loadtest.sweep.space import space_of

pytestmark = pytest.mark.timeout(180)
_DEADLINE_SECONDS = 150.0
_MARK = "LOADTEST_SWEEP_MARK"


def written(folder: Path, **changes: Any) -> Path:
    plan = {
        "serve": {"simulated": {"preset": "cpu-tiny"}, "ready_seconds": 40},
        "flags": {"max-num-seqs": [2, 8]},
        "workloads": [
            {"name": "short", "run": {"concurrency": 4, "requests": 8, "prefix-tokens": 32, "max-tokens": 8}}
        ],
    }
    file = folder / "plan.yaml"
    file.write_text(yaml.safe_dump(plan | changes, sort_keys=False))
    return file


def started(file: Path, mark: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "loadtest", "sweep", str(file)]
    with (file.parent / "output.txt").open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, _MARK: mark})


def living(mark: str) -> list[int]:
    """Processes that the sweep has started, itself included."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def finished(folder: Path) -> list[Path]:
    """Results of runs that are kept."""
    return sorted(path for path in folder.glob("plan/runs/*/*/*/results.json") if path.parent.suffix != ".part")


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"{what} within {_DEADLINE_SECONDS:g} s"
        time.sleep(0.05)


def test_one_configuration_that_does_not_start_does_not_end_the_sweep(tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    # A block of no tokens is refused by the engine, and nothing that the sweep knows of.
    file = written(tmp_path, flags={"block-size": [0, 16]}, through=["direct", "gateway"])
    process = started(file, mark)
    process.wait(_DEADLINE_SECONDS)
    found = json.loads((tmp_path / "plan" / "sweep.json").read_text())
    assert found["finished"], (tmp_path / "output.txt").read_text()
    entries = {(entry["label"], entry["through"]): entry for entry in found["entries"]}
    assert len(entries) == 4
    failed = entries["block-size=0", "direct"]
    assert failed["complaints"] == ["the server ended by itself, exit code 2"]
    assert "block-size" in " ".join(failed["log"])
    for way in ("direct", "gateway"):
        assert entries["block-size=16", way]["figures"]["output_tokens_per_second"] > 0
    assert process.returncode == (0 if found["winners"] else 1)
    wait_until(lambda: not living(mark), "nothing of it is left")
    kept = [Checkpoint.model_validate_json(path.read_bytes()) for path in tmp_path.glob("plan/**/checkpoint.json")]
    assert [[check for check in made.checks if check.status is Status.FAILED] for made in kept] == [[], []]
    engines = [server.process for made in kept for server in made.servers if server.name == "engine"]
    assert all(engine is not None and "--block-size" in engine.command for engine in engines)
    assert {server.name for made in kept for server in made.servers if server.driven} == {"engine", "gateway"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_sweep_that_is_ended_leaves_no_process_and_goes_on_from_there(tmp_path: Path, number: signal.Signals) -> None:
    mark = secrets.token_hex(8)
    file = written(tmp_path, flags={"max-num-seqs": [2, 4]})
    process = started(file, mark)
    wait_until(lambda: bool(finished(tmp_path)), "a first run has ended")
    process.send_signal(number)
    process.wait(_DEADLINE_SECONDS)
    assert process.returncode == (1 if number is signal.SIGTERM else -signal.SIGKILL)
    wait_until(lambda: living(mark) == [], "no process is left")
    before = {path: path.stat().st_mtime_ns for path in finished(tmp_path)}
    assert len(before) == 1

    process = started(file, mark)
    process.wait(_DEADLINE_SECONDS)
    after = {path: path.stat().st_mtime_ns for path in finished(tmp_path)}
    assert len(after) == 2
    assert before.items() <= after.items()
    assert json.loads((tmp_path / "plan" / "sweep.json").read_text())["finished"]
    wait_until(lambda: not living(mark), "nothing of it is left")


def test_a_dry_run_reports_what_would_be_tried(tmp_path: Path) -> None:
    file = written(tmp_path, flags={"max-num-seqs": [2, 64], "max-num-batched-tokens": [32]})
    result = CliRunner().invoke(app, ["sweep", str(file), "--dry-run"])
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "1 configuration to try",
        "left out: max-num-seqs=64 max-num-batched-tokens=32: max-num-batched-tokens 32 is below max-num-seqs 64",
        "to try: max-num-seqs=2 max-num-batched-tokens=32",
    ]
    assert not (tmp_path / "plan").exists()


def test_a_wrong_plan_is_reported_with_its_place(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["sweep", str(written(tmp_path, objective={"maximize": "joy"}))])
    assert result.exit_code == 2
    assert "objective.maximize: unknown key" in result.output


def test_the_plans_in_the_documentation_are_plans(tmp_path: Path) -> None:
    docs = Path(__file__).resolve().parents[4] / "docs"
    assert len(space_of(read_plan(docs / "examples/sweep/plan.yaml")).configurations) == 4
    (block,) = re.findall(r"```yaml\n(.*?)```", (docs / "sweep.md").read_text(), re.DOTALL)
    file = tmp_path / "plan.yaml"
    file.write_text(block)
    found = space_of(read_plan(file))
    assert [why for _, why in found.left_out] == ["excluded by the plan"] * 6
    assert len(found.configurations) == 48


def test_a_range_is_no_number_to_base_60(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(
        "serve: {simulated: true}\nflags: {}\n"
        "workloads: [{name: talks, run: {workload: sessions, rate: 5, turns: 2:6}}]\n"
    )
    assert read_plan(file).workloads[0].run["turns"] == "2:6"
