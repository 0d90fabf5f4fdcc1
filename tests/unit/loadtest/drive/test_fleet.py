"""Worker processes and the command line, for real."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from loadtest.__main__ import app
from loadtest.checkpoint.questions import QUESTION
from loadtest.drive.fallback import ASKED
from loadtest.drive.fleet import WorkerDied, WorkerFleet
from loadtest.drive.options import RunOptions
from loadtest.drive.plan import Plan
from loadtest.drive.record import Record, Tick
from loadtest.drive.target import Target
from loadtest.report.schema import Results
from loadtest.report.series import Series

_DEADLINE_SECONDS = 150  # for what takes a second or two on an idle machine
_SMALL = ["--prefix-tokens", "20", "--tail-tokens", "5", "--max-tokens", "4", "--warmup", "2", "--seed", "1"]
_ANY_FIELDS = ["--cache-salt", "off", "--no-ignore-eos"]  # no server refuses these, so none is asked


def _plan(url: str, **more: Any) -> Plan:
    workload = {"groups": 3, "prefix_tokens": 20, "tail_tokens": 5, "max_tokens": 4}
    return Plan.model_validate({"url": url, "model": "m", "workload": workload, **more})


def _loadtest(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtest", "run", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_SECONDS, check=False)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"did not happen in {_DEADLINE_SECONDS} s"
        time.sleep(0.01)


def test_two_workers_bring_in_every_request_once_and_their_own_health(fake_elsewhere: Any) -> None:
    ticks: list[Tick] = []
    plan = _plan(fake_elsewhere.url, concurrency=4, requests=25, workers=2, warmup_requests=3)
    with WorkerFleet(plan, lambda: False) as fleet:
        assert len(fleet.warm_up()) == 3
        harvest = fleet.measure(ticks.append)
    assert sorted(record.index for record in harvest.records) == list(range(25))
    assert [health.worker for health in harvest.healths] == [0, 1]
    assert sum(len(tick.records) for tick in ticks) == 25
    assert not harvest.stopped_early


def test_all_requests_of_a_ramp_down_are_sent_though_most_users_have_left(fake_elsewhere: Any) -> None:
    options = RunOptions(url=fake_elsewhere.url, concurrency="6:1", ramp=0.01, requests=60, workers="3", max_tokens=4)
    (load,) = options.loads()
    plan = options.plan(fake_elsewhere.url, Target(["m"]), load, 1, cpus=8)
    with WorkerFleet(plan, lambda: False) as fleet:
        fleet.warm_up()
        harvest = fleet.measure(lambda _: None)
    assert sorted(record.index for record in harvest.records) == list(range(60))


def test_a_stopped_run_still_brings_in_what_was_in_flight(fake_elsewhere: Any) -> None:
    plan = _plan(fake_elsewhere.url, concurrency=3, requests=50, extra_body={"act": "held"})
    with WorkerFleet(plan, lambda: fake_elsewhere.open_requests == 3) as fleet:
        fleet.warm_up()
        harvest = fleet.measure(lambda _: None)
    assert harvest.stopped_early
    assert [record.outcome for record in harvest.records] == ["interrupted"] * 3


def test_a_worker_that_is_killed_ends_the_run_and_what_was_measured_is_kept(fake_elsewhere: Any) -> None:
    plan = _plan(fake_elsewhere.url, concurrency=2, requests=10**6, workers=2)
    seen: list[Record] = []
    with WorkerFleet(plan, lambda: False, stop_grace_seconds=_DEADLINE_SECONDS) as fleet:
        fleet.warm_up()

        def kill_once_measured(tick: Tick) -> None:
            seen.extend(tick.records)
            if len(seen) >= 20:
                fleet.processes[0].kill()

        harvest = fleet.measure(kill_once_measured)
    assert harvest.lost == ["client worker 0 was killed by signal 9; what it measured last is missing"]
    assert len([record for record in harvest.records if record.ok]) >= 20
    assert [health.worker for health in harvest.healths] == [1]
    assert not harvest.stopped_early
    assert not any(process.is_alive() for process in fleet.processes)


def test_a_worker_that_hangs_is_given_up_after_a_stop_and_what_was_measured_is_kept(fake_elsewhere: Any) -> None:
    plan = _plan(fake_elsewhere.url, concurrency=2, requests=10**6, workers=2)
    hung: list[int] = []
    with WorkerFleet(plan, lambda: bool(hung), stop_grace_seconds=1.0) as fleet:
        fleet.warm_up()

        def hang_once_measured(tick: Tick) -> None:
            pid = fleet.processes[0].pid
            if tick.records and not hung and pid is not None:
                hung.append(pid)
                os.kill(pid, signal.SIGSTOP)

        harvest = fleet.measure(hang_once_measured)
        fleet.processes[0].kill()
    assert "client worker 0 did not report within 1 s of being stopped" in harvest.lost
    assert harvest.records


def test_a_worker_that_fails_says_why(fake_elsewhere: Any) -> None:
    unsendable = {"n": 2**70}
    plan = _plan(fake_elsewhere.url, concurrency=1, requests=1, warmup_requests=0, extra_body=unsendable)
    with WorkerFleet(plan, lambda: False) as fleet:
        fleet.warm_up()
        harvest = fleet.measure(lambda _: None)
    assert harvest.lost == ["client worker 0 failed: TypeError: Integer exceeds 64-bit range"]
    assert [health.worker for health in harvest.healths] == [0]


def test_a_worker_that_dies_in_the_warm_up_leaves_nothing_to_report(fake_elsewhere: Any) -> None:
    plan = _plan(fake_elsewhere.url, concurrency=1, requests=1, warmup_requests=1, extra_body={"act": "held"})
    with WorkerFleet(plan, lambda: False) as fleet:
        _until(lambda: fake_elsewhere.open_requests == 1)
        fleet.processes[0].kill()
        with pytest.raises(WorkerDied, match="client worker 0 was killed by signal 9 before the run began"):
            fleet.warm_up()


def test_a_run_that_lost_a_worker_is_invalid_and_written(fake_elsewhere: Any, tmp_path: Path) -> None:
    words = [fake_elsewhere.url, "-c", "1", "-d", "60", "--no-verify", "--out", str(tmp_path), *_SMALL]
    command = [sys.executable, "-m", "loadtest", "run", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        _until(lambda: len(fake_elsewhere.bodies) > 50)
        os.kill(_worker_of(process.pid), signal.SIGKILL)
        shown, _ = process.communicate(timeout=_DEADLINE_SECONDS)
    assert process.returncode == 1
    assert "client worker 0 was killed by signal 9" in shown
    results = Results.model_validate_json((tmp_path / "results.json").read_text())
    assert not results.verdict.valid
    assert not results.verdict.ended_early
    assert results.requests.offered == len((tmp_path / "requests.jsonl").read_text().splitlines())
    assert _junit_fails(tmp_path)


def _worker_of(parent: int) -> int:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    (worker,) = [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return worker


def test_a_good_run_exits_0_and_writes_results_a_log_and_a_page(fake_elsewhere: Any, tmp_path: Path) -> None:
    metrics = ["--metrics-url", f"{fake_elsewhere.url}/metrics"]
    words = ["-r", "50", "-n", "20", "--api-key", "sk-secret", "--bytes-per-token", "2", *metrics, *_SMALL]
    ran = _loadtest(fake_elsewhere.url + "/v1", *words, "--out", str(tmp_path))
    results = Results.model_validate_json((tmp_path / "results.json").read_text())
    assert all("lag p99" in reason for reason in results.verdict.reasons)  # of a machine that is busy
    assert ran.returncode == (0 if results.verdict.passed else 1), ran.stdout + ran.stderr
    assert _junit_fails(tmp_path) == bool(ran.returncode)
    assert results.requests.succeeded == 20
    assert results.plan["model"] == "first"
    assert results.plan["cache_salt"]
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 20
    assert "sk-secret" not in "".join(file.read_text() for file in tmp_path.iterdir()) + ran.stdout
    measured = [body for body in fake_elsewhere.bodies if QUESTION not in str(body) and ASKED not in str(body)]
    assert {body["cache_salt"] for body in measured} == {results.plan["cache_salt"]}


def _junit_fails(folder: Path) -> bool:
    suites = ElementTree.parse(folder / "junit.xml").getroot()
    return any(int(suite.attrib["failures"]) for suite in suites)


def test_a_missed_slo_and_failed_requests_exit_1(fake_elsewhere: Any, tmp_path: Path) -> None:
    missed = ("--slo", "ttft=0.000001", "--out", str(tmp_path))
    ran = _loadtest(fake_elsewhere.url, "-c", "1", "-n", "3", *missed, *_SMALL)
    assert ran.returncode == 1
    assert _junit_fails(tmp_path)
    assert "SLO met by 0.0%" in ran.stdout
    refused = json.dumps({"act": "refused"})
    ran = _loadtest(fake_elsewhere.url, "-c", "1", "-n", "3", *_SMALL, "--warmup", "0", "--extra-body", refused)
    assert ran.returncode == 1
    assert "http_429: queue full" in ran.stdout


def test_two_targets_at_two_loads_are_run_in_turns_and_reported_together(fake_elsewhere: Any, tmp_path: Path) -> None:
    targets = f"one={fake_elsewhere.url},two={fake_elsewhere.url}/v1"
    ran = _loadtest("--targets", targets, "-c", "1,2", "-n", "6", "--slo", "ttft=9", "-o", str(tmp_path), *_SMALL)
    series = Series.model_validate_json((tmp_path / "series.json").read_text())
    assert [(point.target, point.load, point.runs) for point in series.points] == [
        ("one", "c1", 1),
        ("two", "c1", 1),
        ("one", "c2", 1),
        ("two", "c2", 1),
    ]
    assert ran.returncode == (0 if series.passed else 1)
    assert _junit_fails(tmp_path) == bool(ran.returncode)
    assert series.folders == ["one-c1-1", "two-c1-1", "one-c2-1", "two-c2-1"]
    for folder in series.folders:
        assert Results.model_validate_json((tmp_path / folder / "results.json").read_text()).requests.succeeded == 6
    assert 'href="two-c2-1/report.html"' in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("stopped_by", ["signal", "server"])
def test_a_search_that_cannot_go_on_reports_the_runs_it_has_made(
    fake_elsewhere: Any, tmp_path: Path, stopped_by: str
) -> None:
    words = ["--find", "max-concurrency", "--slo", "ttft=9", "-n", "12", "--no-verify", "-o", str(tmp_path), *_SMALL]
    command = [sys.executable, "-m", "loadtest", "run", fake_elsewhere.url, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        _until(lambda: (tmp_path / "c8-1" / "results.json").exists())
        if stopped_by == "signal":
            process.send_signal(signal.SIGTERM)
        else:
            fake_elsewhere.act = "refused"
        shown, _ = process.communicate(timeout=_DEADLINE_SECONDS)
    assert "The search was stopped before its end" in shown
    series = Series.model_validate_json((tmp_path / "series.json").read_text())
    assert "c8-1" in series.folders
    if stopped_by == "server":
        assert list(series.failures.values()) == ["no warm-up request succeeded: http_429: queue full"]
    assert process.returncode == (0 if series.passed else 1)


def test_a_url_alone_is_asked_for_its_batch_size_curve(fake_elsewhere: Any, tmp_path: Path) -> None:
    ran = _loadtest(fake_elsewhere.url, "-n", "32", "--no-verify", "-o", str(tmp_path), *_SMALL)
    series = Series.model_validate_json((tmp_path / "series.json").read_text())
    assert [point.load for point in series.points] == ["c1", "c8", "c32"]
    assert "Batch-size curve" in ran.stdout
    says = "From 1 to 32 users the server generates" if all(point.valid for point in series.points) else "not keep up"
    assert says in ran.stdout


def test_a_run_that_cannot_be_made_fails_the_series_and_takes_no_other_along(
    fake_elsewhere: Any, another_elsewhere: Any, tmp_path: Path
) -> None:
    another_elsewhere.act = "refused"
    targets = f"bad={another_elsewhere.url},good={fake_elsewhere.url}"
    ran = _loadtest("--targets", targets, "-c", "1", "-n", "3", "--repeat", "2", "-o", str(tmp_path), *_SMALL)
    assert ran.returncode == 1
    series = Series.model_validate_json((tmp_path / "series.json").read_text())
    why = "no warm-up request succeeded: http_429: queue full"
    assert series.failures == {"bad-c1-1": why, "bad-c1-2": why}
    assert not series.passed
    assert _junit_fails(tmp_path)
    assert [(point.target, point.runs) for point in series.points] == [("good", 2)]
    assert f"bad-c1-1: failed: {why}" in ran.stdout
    assert "Latency from the intended send" in ran.stdout


def test_a_page_that_is_gone_after_the_run_does_not_take_the_results_along(fake_elsewhere: Any, tmp_path: Path) -> None:
    fake_elsewhere.loses_its_metrics = True
    metrics = f"{fake_elsewhere.url}/metrics"
    words = [
        "-c",
        "1",
        "-n",
        "3",
        "--metrics-url",
        metrics,
        "-o",
        str(tmp_path),
        *_SMALL,
        "--warmup",
        "0",
        *_ANY_FIELDS,
    ]
    ran = _loadtest(fake_elsewhere.url, *words)
    assert f"no counters: {metrics} answers 503" in ran.stdout, ran.stdout + ran.stderr
    results = Results.model_validate_json((tmp_path / "results.json").read_text())
    assert results.requests.succeeded == 3


def test_a_target_that_refuses_every_warm_up_is_reported_without_a_report(fake_elsewhere: Any) -> None:
    refused = json.dumps({"act": "refused"})
    ran = _loadtest(fake_elsewhere.url, "-c", "1", "-n", "3", *_SMALL, "--extra-body", refused)
    assert ran.returncode == 1
    assert "no warm-up request succeeded: http_429: queue full" in ran.stderr


def test_a_target_that_is_not_there_exits_1_with_one_line() -> None:
    ran = _loadtest("http://127.0.0.1:1", "-c", "1", "-n", "1")
    assert ran.returncode == 1
    assert ran.stderr.startswith("cannot reach http://127.0.0.1:1")
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--find", "max-rate"],
        ["--find", "max-rate", "--slo", "ttft=1", "-c", "1"],
        ["--find", "max-rate", "--slo", "ttft=1,gpu=85"],
        ["-c", "1", "--until", "narrow"],
        ["-c", "1", "--slo", "gpu=101"],
        ["-c", "1", "--rate", "1"],
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--rate", "5:inf"],
        ["-c", "1", "--workers", "none"],
        ["-c", "1", "--extra-body", "[]"],
        ["-c", "1", "--duration", "-1"],
        ["-c", "0"],
        ["--no-such-option"],
        ["-r", "5:50", "-n", "9"],
        ["-c", "1", "--ramp", "9"],
        ["-r", "5", "--burstiness", "2"],
        ["-c", "1", "--trace-speed", "2"],
        ["-c", "1", "-w", "trace"],
        ["--trace", __file__],
        ["-c", "1", "--dataset", __file__],
        ["-c", "1", "--inputs", "3"],
        ["-c", "1", "-e", "embeddings", "--inputs", "5:3"],
        ["-c", "1", "-w", "texts"],
        ["-c", "1", "--mix", "chat"],
        ["-c", "1,1"],
        ["-c", "1", "--targets", "a=http://127.0.0.1:1"],
        ["-c", "1", "--slo", "ttft"],
        ["-c", "1", "--slo", "p=0.9"],
        ["-c", "1", "--slo", "ttft=1,p=2"],
        ["-c", "1", "--mix", "trace=1"],
    ],
)
def test_unusable_options_exit_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["run", "http://127.0.0.1:1", *words])
    assert ended.value.code == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_ends_a_run_early_and_it_still_reports(
    fake_elsewhere: Any, number: signal.Signals
) -> None:
    held = json.dumps({"act": "held"})
    words = [fake_elsewhere.url, "-c", "2", "-n", "9", *_SMALL, "--warmup", "0", *_ANY_FIELDS, "--extra-body", held]
    command = [sys.executable, "-m", "loadtest", "run", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        _until(lambda: fake_elsewhere.open_requests == 2)
        os.killpg(process.pid, number)  # as Ctrl-C, a supervisor, or timeout(1) does
        shown, _ = process.communicate(timeout=_DEADLINE_SECONDS)
    assert process.returncode == 1
    assert re.search(r"2 interrupted", shown)
    assert "ended by hand" in shown
